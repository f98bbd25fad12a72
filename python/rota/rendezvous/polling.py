"""Waits that look again and again, instead of inside a store, where Ctrl-C could not end them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from rota.errors import Timeout

POLL_S = 0.002  # few enough requests for a store on a server
LAST_POLL_S = 0.05  # of waits that may take long
STALL_S = 1.0


class Pauses:
    """Between the looks of a wait until a deadline, in time.monotonic(); they grow to last_s."""

    def __init__(self, deadline: float, last_s: float) -> None:
        self._deadline = deadline
        self._last_s = last_s
        self._next_s = POLL_S

    def sleep(self) -> bool:
        """Sleeps for one pause; False, without it, once the deadline has passed."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(self._next_s, left_s))
        self._next_s = min(2 * self._next_s, self._last_s)
        return True


def poll(is_done: Callable[[], bool], deadline: float, last_s: float = LAST_POLL_S) -> bool:
    """Blocks until `is_done` returns true; False at the deadline. Arguments as of Pauses."""
    pauses = Pauses(deadline, last_s)
    while not is_done():
        if not pauses.sleep():
            return False
    return True


class NamedPauses:
    """Pauses of POLL_S in a wait that names, after a second, the processes that it waits for."""

    def __init__(self, what: str, timeout: timedelta) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._pauses = Pauses(self._begin + timeout.total_seconds(), POLL_S)
        self._has_warned = False

    def sleep(self, awaited: Sequence[str]) -> None:
        """Sleeps for one pause; rota.Timeout once the wait is over."""
        has_slept = self._pauses.sleep()
        waited_s = time.monotonic() - self._begin
        text = f"{self._what} has waited {waited_s:.3g} s for {', '.join(awaited) or 'the others'}"
        if not has_slept:
            raise Timeout(f"{text}; is it alive?")
        if waited_s > STALL_S and not self._has_warned:
            self._has_warned = True
            print(f"{text}; still waiting", file=sys.stderr, flush=True)


def known_ends(
    why_ended: Callable[[int], str] | None, ranks: Iterable[int], own_rank: int
) -> dict[int, str]:
    """How those of these ranks have ended that have, as far as that is known."""
    if why_ended is None:
        return {}
    ends = {rank: why_ended(rank) for rank in ranks if rank != own_rank}
    return {rank: end for rank, end in ends.items() if end}


class Ends:
    """How awaited ranks have ended. What is found at one look counts at the next: a rank may have
    done its part, which that look has not seen yet, before it ended."""

    def __init__(self, find: Callable[[Sequence[int]], Mapping[int, str]]) -> None:
        self._find = find
        self._found: Mapping[int, str] = {}

    def of(self, awaited: Sequence[int]) -> list[str]:
        found, self._found = self._found, self._find(awaited)
        return [found[rank] for rank in awaited if rank in found]
