"""Steps that several processes take together: all get the results, or the first error.

This is how ranks make something together: what fails on one of them, be it a bad argument, is an
error on all, which names the rank and its reason. Nobody waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rota import errors, timeouts
from rota.errors import PeerFailed, RotaError, Timeout, TransportError
from rota.rendezvous.groups import Ranks, end_watch, next_number, peer_check, store_of
from rota.rendezvous.polling import POLL_S, Pauses

# In the store: the first rank that has given up, and why.
_FAILURE = "failure"

T = TypeVar("T")


class JointSteps:
    """What ranks do to make something together. A rank that fails tells the others, once.

    Args:
        store: the same for all ranks, used for nothing else.
        rank, world_size: this process among those that take the steps.
        timeout: of each step.
        what: the public name for errors, such as "rota.Window".
        check_peers: raises if a process is gone; called while others are awaited.

    Attributes:
        number: how many of these the ranks have made over their group before.
        why_ended: says how a rank has ended, if that is known; otherwise an empty text.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        what: str,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.number = 0
        self.why_ended: Callable[[int], str] | None = None
        self._what = what
        self._check_peers = check_peers
        self._num_steps = 0

    @classmethod
    def over(cls, pg: Ranks, what: str) -> JointSteps:
        """For the next of these that all ranks of a group make, in the same order.

        Args:
            what: its public name, such as "Window".
        """
        number = next_number(pg, what)
        store = store_of(pg, f"{what}/{number}")
        timeout = timeouts.of_group(pg)
        steps = cls(store, pg.rank(), pg.size(), timeout, f"rota.{what}", peer_check())
        steps.why_ended = end_watch(pg)
        steps.number = number
        return steps

    def take_timeout(self, timeout: object) -> timedelta:
        """The caller's timeout, which then is that of the steps; that of the group for None.

        Raises:
            TypeError: it is no timedelta.
        """
        if timeout is not None:
            self.timeout = timeouts.checked(timeout, self._what)
        return self.timeout

    def step(self, run: Callable[[], T]) -> list[T]:
        """Runs `run` and blocks until every rank has done so; returns all results by rank.

        Args:
            run: its result travels as JSON.

        Raises:
            Exception: what `run` raised here.
            rota.TransportError: it raised on another rank, which is named with the text; if that
                was an error of rota's, one of its kind.
            rota.PeerFailed: a rank has ended before it took this step.
            rota.Timeout: a rank did not take this step in time.
        """
        with self.telling():
            card = json.dumps([self.rank, run()]) + "\n"
        key = f"step/{self._num_steps}"
        self._num_steps += 1
        self.store.append(key, card)  # type: ignore[attr-defined]  # torch's stubs lack it
        return self._wait_for_all(key)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What is raised inside is told to the other ranks, whose next check() raises."""
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    @contextlib.contextmanager
    def publishing(self) -> Iterator[Callable[[], None]]:
        """As telling(), for what publishes this rank's part and then waits for the others itself.

        Gives what that calls while it waits, instead of check(). From then on the ranks fail
        together, of what they find out there.
        """
        is_waiting = False

        def check() -> None:
            nonlocal is_waiting
            is_waiting = True
            self.check()

        try:
            yield check
        except BaseException as error:
            if not is_waiting:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        kind = type(error) if isinstance(error, RotaError) else TransportError
        self.fail(_text_of(error), kind)

    def fail(self, reason: str, kind: type[RotaError] = TransportError) -> None:
        """Tells the other ranks that this one has given up.

        Args:
            kind: of the error that they raise.
        """
        with contextlib.suppress(RuntimeError):  # of the store, which would hide the reason
            self.store.compare_set(_FAILURE, "", json.dumps([self.rank, kind.__name__, reason]))

    def check(self) -> None:
        """Raises if a rank is gone or has given up. Costs a request to the store."""
        if self._check_peers is not None:
            self._check_peers()
        if self.store.check([_FAILURE]):
            rank, kind, reason = json.loads(self.store.get(_FAILURE))
            raise getattr(errors, kind, TransportError)(
                f"{self._what}: rank {self.rank}/{self.world_size}: rank {rank} failed: {reason}"
            )

    def check_all(self) -> None:
        """As check(), where every rank is needed: raises if one of them has ended."""
        self.check()
        for rank in range(self.world_size):
            self._raise_lost(self._end_of(rank))

    def _end_of(self, rank: int) -> str:
        return self.why_ended(rank) if self.why_ended is not None and rank != self.rank else ""

    def _raise_lost(self, end: str) -> None:
        if end:
            raise PeerFailed(f"{self._what}: rank {self.rank}/{self.world_size}: {end}")

    def _wait_for_all(self, key: str) -> list[Any]:
        ends: dict[int, str] = {}  # of ranks, from before the results were read
        pauses = Pauses(time.monotonic() + self.timeout.total_seconds(), POLL_S)
        while True:
            results: dict[int, Any] = dict(map(json.loads, self.store.get(key).splitlines()))
            missing = [rank for rank in range(self.world_size) if rank not in results]
            if not missing:
                return [results[rank] for rank in range(self.world_size)]
            self.check()
            for rank in missing:
                self._raise_lost(ends.get(rank, ""))
            # One may have done its part and ended since: the next turn tells.
            ends = {rank: self._end_of(rank) for rank in missing}
            if not pauses.sleep():
                raise Timeout(
                    f"{self._what}: rank {self.rank}/{self.world_size} waited "
                    f"{self.timeout.total_seconds():g} s for rank {', '.join(map(str, missing))}; "
                    f"every rank must make its part: is it alive?"
                )


def run_on_all(what: str, run: Callable[[], T]) -> list[T]:
    """Runs `run` on every rank of the default group, which carries all results; returns these.

    Args:
        what: the public name for errors, such as "rota.elastic.State".
        run: its result is pickled; for what is too large for a store.

    Raises:
        Exception: what `run` raised here.
        rota.TransportError: it raised on other ranks, which are named with their texts.
    """
    own_error: Exception | None = None
    result, text = None, ""
    try:
        result = run()
    except Exception as error:
        own_error, text = error, _text_of(error)
    replies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replies, (result, text))
    if own_error is not None:
        raise own_error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(replies) if text]
    if failed:
        raise TransportError(f"{what}: a rank could not take part: {'; '.join(failed)}")
    return [result for result, _ in replies]


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
