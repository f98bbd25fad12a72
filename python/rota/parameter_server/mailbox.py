"""A worker's pushes to ParameterServer: two slots in turn, which the servers read in place.

Knows how each number of a push is rounded; setup.py knows where it lies. Must not know when a push
may be written or read: server.py waits for a free slot, shard.py for a push.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from rota import _C, _torch
from rota.parameter_server.setup import PushLayout
from rota.shared.double_buffer import NUM_SLOTS, expose_slots

# Words of a mailbox; server.py has the table.
PUSHED, LEFT, LOOKED, ASKED, NUM_WORDS = range(5)


class Mailbox:
    """The worker's side; error_feedback adds each rounding error to the next push."""

    def __init__(self, layout: PushLayout, error_feedback: bool) -> None:
        self._layout = layout
        self.exposed, self._slots = expose_slots(layout.slot, NUM_WORDS)
        self.clock = 0  # pushes so far
        self._num_asked = 0
        shares = layout.shares
        # What is rounded: float32 copies of the gradients, where no slot holds them.
        is_rounded = layout.wire.dtype is not None
        self._staged = [share.zeros() for share in shares if is_rounded]
        self._residuals = [share.zeros() for share in shares if error_feedback]
        servers = range(len(shares))
        self._views = [
            layout.by_number(self._staged or [slot["values", server] for server in servers])
            for slot in self._slots
        ]
        self._base_views = [
            layout.by_number([slot["base", server] for server in servers])
            for slot in self._slots
            if layout.keeps_base
        ]

    @torch.no_grad()
    def write(
        self,
        values: Sequence[torch.Tensor | None],
        bases: Sequence[torch.Tensor],
        versions: Sequence[int],
    ) -> None:
        """Fills the next slot, which nobody reads any more, and publishes it.

        values, by number, are zeroes for None; bases, the parameters that they were computed from,
        are used if the layout keeps them; versions are those of each shard as last pulled.
        """
        index = self.clock % NUM_SLOTS
        slot = self._slots[index]
        views = self._views[index]
        given = [(v, value) for v, value in zip(views, values, strict=True) if value is not None]
        if given:
            _torch.copy_each([view for view, _ in given], [value for _, value in given])
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
        for server in range(len(self._staged)):
            self._encode(server, slot["values", server])
        if self._base_views:
            _torch.copy_each(self._base_views[index], list(bases))
        pulled = slot["versions", 0]
        pulled.copy_(torch.tensor(versions, dtype=pulled.dtype, device="cpu"))
        self.clock += 1
        self.exposed.publish(PUSHED, self.clock)

    def _encode(self, server: int, encoded: torch.Tensor) -> None:
        values, wire = self._staged[server], self._layout.wire
        if self._residuals:
            values += self._residuals[server]
        wire.encode(encoded, values)
        if self._residuals:
            residual = self._residuals[server]
            wire.decode(residual, encoded)
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
        return self._layout.by_number(self._residuals) if self._residuals else []

    def leave(self) -> None:
        """Tells the servers that no push follows."""
        self.exposed.publish(LEFT, 1)
        self.exposed.close()


class OpenedMailbox:
    """A worker's mailbox as a server sees it, in place; it outlives the worker."""

    def __init__(self, opened: _C.OpenedTensor, layout: PushLayout) -> None:
        self.opened = opened
        self._layout = layout
        self._slots = layout.slot.slots(opened.bytes)

    @property
    def num_pushed(self) -> int:
        return self.opened.load(PUSHED)

    @property
    def has_left(self) -> bool:
        return self.opened.load(LEFT) != 0

    def version(self, clock: int, server: int) -> int:
        """The version of the server's shard that push number `clock` was computed from."""
        return int(self._slots[clock % NUM_SLOTS]["versions", 0][server])

    def values(self, clock: int, server: int, scratch: torch.Tensor) -> torch.Tensor:
        """A push's float32 numbers for one server: in place, or decoded into `scratch`."""
        values = self._slots[clock % NUM_SLOTS]["values", server]
        if self._layout.wire.dtype is None:
            return values.view(torch.float32)
        self._layout.wire.decode(scratch, values)
        return scratch

    def base(self, clock: int, server: int) -> torch.Tensor:
        return self._slots[clock % NUM_SLOTS]["base", server]
