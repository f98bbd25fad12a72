"""One writer's versions for any number of readers, which it never waits for.

The versions 1, 2, ... take two slots in turn: number n lies in slot n % NUM_SLOTS. Two words of the
writer's exposed memory say how far it is:

| word | at rest | meaning |
|---|---|---|
| BEGUN | 0 | the last version whose slot the writer has begun to write |
| DONE | 0 | the last that is whole |

A reader copies version DONE first and looks at BEGUN afterwards: less than n + NUM_SLOTS means that
nothing of it was overwritten. If the writer dies, the last whole version is still in its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from rota import _C
from rota.shared.aligned import AlignedLayout, Name, Views
from rota.shared.memory import empty

NUM_SLOTS = 2
BEGUN, DONE, FIRST_FREE_WORD = range(3)
Slot = TypeVar("Slot")


def expose_slots(
    layout: AlignedLayout[Name], num_words: int = FIRST_FREE_WORD
) -> tuple[_C.ExposedTensor, list[Views[Name]]]:
    """Memory of NUM_SLOTS slots, which others can read, and views of them."""
    memory = empty(NUM_SLOTS * layout.end, dtype=torch.uint8)
    exposed = _C.ExposedTensor(memory, num_words, others_may_write=False)
    return exposed, layout.slots(memory)


class DoubleBuffer(Generic[Slot]):
    """The writer's side: exposed memory, and views of its slots."""

    def __init__(self, exposed: _C.ExposedTensor, slots: Sequence[Slot]) -> None:
        self.exposed = exposed
        self._slots = slots

    def begin(self, number: int) -> Slot:
        """Takes the slot of the oldest version for this one."""
        self.exposed.publish(BEGUN, number)
        # No later store may overtake the one above: it is ordered before this load, which is
        # ordered before what follows (csrc/base/flag.h).
        self.exposed.load(BEGUN)
        return self._slots[number % NUM_SLOTS]

    def finish(self, number: int) -> None:
        """Shows the version, which is whole, to readers."""
        self.exposed.publish(DONE, number)


class OpenedDoubleBuffer(Generic[Slot]):
    """A reader's side; the writer's memory stays mapped when its process has ended."""

    def __init__(self, opened: _C.OpenedTensor, slots: Sequence[Slot]) -> None:
        self.opened = opened
        self._slots = slots

    @property
    def num_done(self) -> int:
        """The newest version that is whole."""
        return self.opened.load(DONE)

    def slot(self, number: int) -> Slot:
        return self._slots[number % NUM_SLOTS]

    def is_overwritten(self, number: int) -> bool:
        """Whether a later version may be in the version's slot."""
        return self.opened.load(BEGUN) >= number + NUM_SLOTS
