"""Named sections of one buffer, each of which begins with a cache line.

Knows bytes, dtypes and shapes; no processes. Writer and reader make equal layouts from the same
sections, so no offset travels between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

ALIGN_BYTES = 64  # a cache line, and the longest vector
Name = TypeVar("Name", bound=Hashable)
Views = dict[Name, torch.Tensor]


class AlignedLayout(Generic[Name]):
    """Where the sections of a buffer lie, of these dtypes and shapes and in this order.

    They begin at `begins`, the first at or after `begin`; `end` is behind the last, and aligned as
    they are.
    """

    def __init__(
        self, sections: Mapping[Name, tuple[torch.dtype, Sequence[int]]], begin: int = 0
    ) -> None:
        self._sections = {
            name: (dtype, torch.Size(shape)) for name, (dtype, shape) in sections.items()
        }
        self.begins: dict[Name, int] = {}
        self.end = round_up(begin, ALIGN_BYTES)
        for name, (dtype, shape) in self._sections.items():
            self.begins[name] = self.end
            self.end = round_up(self.end + shape.numel() * dtype.itemsize, ALIGN_BYTES)

    @torch.inference_mode(False)  # what is made once may be written outside of it
    def views(self, buffer: torch.Tensor) -> Views[Name]:
        """The sections of a buffer (uint8), in place."""
        views = {}
        for name, (dtype, shape) in self._sections.items():
            num_bytes = shape.numel() * dtype.itemsize
            views[name] = buffer[self.begins[name] :][:num_bytes].view(dtype).view(shape)
        return views

    def slots(self, buffer: torch.Tensor) -> list[Views[Name]]:
        """The views of a buffer that has the layout again and again."""
        return [self.views(part) for part in buffer.split(self.end)]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
