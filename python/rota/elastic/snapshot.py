"""A copy of a state that stays as it is while the state goes on changing."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from rota.checkpoint.contents import put_together


class Snapshot:
    """The state that was taken last. Its memory serves the next one, too."""

    def __init__(self) -> None:
        self._rest = b""
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, state: object) -> None:
        """Copies a state, in one pass over its tensors, which are found wherever pickle finds them.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: a value cannot be pickled.
        """
        pickler = _Pickler(file := io.BytesIO())
        pickler.dump(state)
        copies = []
        # The next take() writes to the copies, maybe outside of inference mode.
        with torch.inference_mode(False):
            for i, tensor in enumerate(pickler.tensors):
                if i < len(self._copies) and _fits(self._copies[i], tensor):
                    copies.append(self._copies[i].copy_(tensor))
                else:
                    copies.append(tensor.detach().clone())
        self._copies = copies
        self._rest = file.getvalue()

    def state(self) -> Any:
        """The state, with tensors of its own."""
        return put_together(self._rest, [copy.clone() for copy in self._copies])


def _fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the copy's memory can take the tensor; false for sparse and quantized ones, which
    have other memory from one state to the next."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return (
        is_plain
        and tensor.layout == copy.layout == torch.strided
        and (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)
    )


class _Pickler(pickle.Pickler):
    """Leaves tensors out and keeps them in a list, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        index = self._index_of.setdefault(id(obj), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(obj)  # which keeps it alive, so nothing else gets its id
        return index
