"""A worker's pushes to ParameterServer: two slots in turn, which the servers read in place.

Knows where each number of a push lies, and how it is rounded. Must not know when a push may be
written or read: server.py waits for a free slot, shard.py for a push.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from rota import _C
from rota.memory import empty, round_up

NUM_SLOTS = 2
# Words of a mailbox; server.py has the table.
PUSHED, LEFT, LOOKED, ASKED = range(4)
NUM_WORDS = 4

ALIGN_BYTES = 64  # a cache line, and the longest vector
_ALIGN_ELEMS = ALIGN_BYTES // 4


class Wire(NamedTuple):
    """What pushes are rounded to; None: they stay float32."""

    dtype: torch.dtype | None
    block_scaling: bool

    def num_bytes(self, num_elems: int) -> int:
        if self.dtype is None:
            return 4 * num_elems
        return _C.encoded_bytes(num_elems, self.dtype, self.block_scaling)


class Section(NamedTuple):
    """The part of a push that one server reads: the numbers of its parameters, one after another.

    Each parameter starts at a cache line; the gaps are zeroes.
    """

    parameters: tuple[int, ...]  # by number, ascending
    starts: tuple[int, ...]  # in elements, of each
    num_elems: int
    first_byte: int  # in the slot
    num_bytes: int
    first_base_byte: int  # of the parameters that the push was computed from, where kept

    def views(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Its parameters' parts of `flat` (num_elems), contiguous, in their shapes."""
        return [
            flat[start : start + shapes[number].numel()].view(shapes[number])
            for number, start in zip(self.parameters, self.starts, strict=True)
        ]


def assign(num_elems: Sequence[int], num_servers: int) -> list[tuple[int, ...]]:
    """The numbers of each server's parameters: the largest first, to the server with the fewest
    elements, as ZeroRedundancyOptimizer does."""
    loads = [0] * num_servers
    shares: list[list[int]] = [[] for _ in range(num_servers)]
    for number in sorted(range(len(num_elems)), key=lambda number: -num_elems[number]):
        server = loads.index(min(loads))
        loads[server] += num_elems[number]
        shares[server].append(number)
    return [tuple(sorted(share)) for share in shares]


class PushLayout:
    """Where the parts of a push lie in a slot; the same on all ranks.

    Args:
        shapes: of the parameters, by number.
        num_servers: each gets some of them.
        wire: what the numbers are rounded to.
        keeps_base: whether a push also holds the parameters that it was computed from, in float32.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], num_servers: int, wire: Wire, keeps_base: bool
    ) -> None:
        self.shapes = list(shapes)
        self.wire = wire
        self.keeps_base = keeps_base
        self.header_elems = num_servers  # int64: the version of each shard last pulled
        self.sections: list[Section] = []
        end = round_up(8 * self.header_elems, ALIGN_BYTES)
        for numbers in assign([shape.numel() for shape in shapes], num_servers):
            starts, num_elems = [], 0
            for number in numbers:
                starts.append(num_elems)
                num_elems += round_up(shapes[number].numel(), _ALIGN_ELEMS)
            num_bytes = wire.num_bytes(num_elems)
            base = end + round_up(num_bytes, ALIGN_BYTES)
            self.sections.append(Section(numbers, tuple(starts), num_elems, end, num_bytes, base))
            end = base + (4 * num_elems if keeps_base else 0)
        self.slot_bytes = max(end, ALIGN_BYTES)

    def slots(self, memory: torch.Tensor) -> list[_Slot]:
        """The slots of a mailbox, in place. memory: uint8, NUM_SLOTS * slot_bytes."""
        return [_Slot(part, self) for part in memory.split(self.slot_bytes)]


class _Slot:
    """One push, in place."""

    def __init__(self, memory: torch.Tensor, layout: PushLayout) -> None:
        self.versions = memory[: 8 * layout.header_elems].view(torch.int64)
        self.encoded = [  # uint8
            memory[s.first_byte : s.first_byte + s.num_bytes] for s in layout.sections
        ]
        # float32, where the wire is
        self.values = [part.view(torch.float32) for part in self.encoded if not layout.wire.dtype]
        self.bases = [
            memory[s.first_base_byte : s.first_base_byte + 4 * s.num_elems].view(torch.float32)
            for s in layout.sections
            if layout.keeps_base
        ]


class Mailbox:
    """The worker's side.

    Args:
        layout: of a push.
        error_feedback: add each rounding error to the next push (Seide et al. 2014).
    """

    def __init__(self, layout: PushLayout, error_feedback: bool) -> None:
        self._layout = layout
        memory = empty(NUM_SLOTS * layout.slot_bytes, dtype=torch.uint8)
        self.exposed = _C.ExposedTensor(memory, NUM_WORDS, others_may_write=False)
        self.clock = 0  # pushes so far
        self._num_asked = 0
        self._slots = layout.slots(memory)
        sections = layout.sections
        # What is rounded: float32 copies of the gradients, where no slot holds them.
        self._staged: list[torch.Tensor] = []
        self._residuals: list[torch.Tensor] = []
        if layout.wire.dtype is not None:
            self._staged = [
                torch.zeros(s.num_elems, dtype=torch.float32, device="cpu") for s in sections
            ]
        if error_feedback:
            self._residuals = [
                torch.zeros(s.num_elems, dtype=torch.float32, device="cpu") for s in sections
            ]
        self._views = [self._by_number(slot.values or self._staged) for slot in self._slots]
        self._base_views = [self._by_number(slot.bases) for slot in self._slots if slot.bases]

    def _by_number(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        for section, flat in zip(self._layout.sections, flats, strict=True):
            parts = section.views(flat, self._layout.shapes)
            views |= dict(zip(section.parameters, parts, strict=True))
        return [views[number] for number in range(len(views))]

    @torch.no_grad()
    def write(
        self,
        values: Sequence[torch.Tensor | None],
        bases: Sequence[torch.Tensor],
        versions: Sequence[int],
    ) -> None:
        """Fills the next slot, which nobody reads any more, and publishes it.

        Args:
            values: by number; zeroes for None.
            bases: the parameters that they were computed from; used if the layout keeps them.
            versions: of each shard, last pulled.
        """
        index = self.clock % NUM_SLOTS
        slot = self._slots[index]
        views = self._views[index]
        given = [(v, value) for v, value in zip(views, values, strict=True) if value is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [value for _, value in given])
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
        for server in range(len(self._staged)):
            self._encode(server, slot.encoded[server])
        if self._base_views:
            torch._foreach_copy_(self._base_views[index], list(bases))
        slot.versions.copy_(torch.tensor(versions, dtype=slot.versions.dtype, device="cpu"))
        self.clock += 1
        self.exposed.publish(PUSHED, self.clock)

    def _encode(self, server: int, encoded: torch.Tensor) -> None:
        dtype, block_scaling = self._layout.wire
        assert dtype is not None
        values = self._staged[server]
        if self._residuals:
            values += self._residuals[server]
        _C.encode(encoded, values, dtype, block_scaling)
        if self._residuals:
            residual = self._residuals[server]
            _C.decode(residual, encoded, dtype, block_scaling)
            torch.sub(values, residual, out=residual)
            # An Inf is pushed once, and must not stay in all pushes after it.
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    # ---- saving and restoring

    @contextlib.contextmanager
    def asking(self) -> Iterator[int]:
        """Asks all servers for saves, which they keep until the block ends; yields the number of
        the question."""
        self.exposed.publish(ASKED, self._num_asked + 1)
        try:
            yield self._num_asked + 1
        finally:
            self._num_asked += 2
            self.exposed.publish(ASKED, self._num_asked)

    def residuals(self) -> list[torch.Tensor]:
        """What error feedback owes, by number, in place; empty without it."""
        return self._by_number(self._residuals) if self._residuals else []

    def leave(self) -> None:
        """Tells the servers that no push follows."""
        self.exposed.publish(LEFT, 1)
        self.exposed.close()


class OpenedMailbox:
    """A worker's mailbox as a server sees it, in place; it outlives the worker."""

    def __init__(self, opened: _C.OpenedTensor, layout: PushLayout) -> None:
        self._opened = opened
        self._layout = layout
        self._slots = layout.slots(opened.bytes)

    @property
    def num_pushed(self) -> int:
        return self._opened.load(PUSHED)

    @property
    def num_asked(self) -> int:
        """Odd while the worker waits for saves, or reads them."""
        return self._opened.load(ASKED)

    @property
    def has_left(self) -> bool:
        return self._opened.load(LEFT) != 0

    @property
    def is_open(self) -> bool:
        """Whether the worker runs and has not left. Costs a few µs."""
        return self._opened.is_open

    def version(self, clock: int, server: int) -> int:
        """The version of the server's shard that push number `clock` was computed from."""
        return int(self._slots[clock % NUM_SLOTS].versions[server])

    def values(self, clock: int, server: int, scratch: torch.Tensor) -> torch.Tensor:
        """A push's float32 numbers for one server: in place, or decoded into `scratch`."""
        slot = self._slots[clock % NUM_SLOTS]
        dtype, block_scaling = self._layout.wire
        if dtype is None:
            return slot.values[server]
        _C.decode(scratch, slot.encoded[server], dtype, block_scaling)
        return scratch

    def base(self, clock: int, server: int) -> torch.Tensor:
        """The server's parameters that the push was computed from, float32."""
        return self._slots[clock % NUM_SLOTS].bases[server]
