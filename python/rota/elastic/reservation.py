"""Memory for the state of a job, made by a process that is going to join it."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from rota.elastic.arena import Arena
from rota.elastic.membership import Membership
from rota.errors import Timeout, TransportError

LAYOUT = "layout"  # the lengths of the kept storages, and where rank 0 has them
# For a handshake with a process that does not wait for it, and may be stopped.
_TIMEOUT = timedelta(seconds=1)


class Reservation:
    """Reserves and maps the memory for a copy of the job's state, in a thread of its own.

    Most of a transfer's time is the kernel's, which makes pages, and maps them and those of rank 0.
    With this, it does so while the process makes its model, and no other rank waits for it. Make
    one right after the membership, and hand it to `State.take`. Making one does not wait.

    Args:
        membership: of this process, which has not joined yet.
    """

    def __init__(self, membership: Membership) -> None:
        note = membership.read_note(LAYOUT)
        if note is None:
            self._arena = None
            return
        thread = ThreadPoolExecutor(1, thread_name_prefix="rota.elastic.Reservation")
        self._arena = thread.submit(_reserve, *json.loads(note))
        thread.shutdown(wait=False)

    def arena(self) -> Arena | None:
        """The memory, once; None if the job had no state. Blocks and raises as State.take()."""
        future, self._arena = self._arena, None
        return future.result() if future is not None else None


def _reserve(lengths: list[int], address: str) -> Arena:
    arena = Arena(lengths)
    with contextlib.suppress(TransportError, Timeout):  # rank 0 is gone, or on another host
        arena.prepare(address, "rank 0", _TIMEOUT)
    return arena
