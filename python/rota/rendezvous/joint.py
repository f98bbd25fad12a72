"""Steps that several processes take together: all get the results, or the first error.

This is how ranks make something together: what fails on one of them, be it a bad argument, is an
error on all, which names the rank and its reason. Nobody waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rota import errors, timeouts
from rota.errors import PeerFailed, RotaError, Timeout, TransportError
from rota.rendezvous.groups import Ranks, end_watch, next_number, peer_check, store_of
from rota.rendezvous.polling import POLL_S, Ends, known_ends, poll

T = TypeVar("T")


class JointSteps:
    """What ranks do to make something together. A rank that fails tells the others, once.

    | key | writer | value |
    |---|---|---|
    | step/NUMBER | each rank, once it has run the step | a line: its rank and its result |
    | failure/NUMBER | the first rank that fails in the step, or before it | its rank, and why |

    The store is used for nothing else. check_peers, which raises if a process is gone, is called
    while others are awaited.
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
        self.number = 0  # of these that the ranks have made over their group before
        # Says how a rank has ended, if that is known; otherwise an empty text.
        self.why_ended: Callable[[int], str] | None = None
        self._what = what
        self._check_peers = check_peers
        self.num_steps = 0  # that this rank has taken
        self.has_told = False  # whether it has failed in one

    @classmethod
    def over(cls, pg: Ranks, what: str, name: str = "") -> JointSteps:
        """Steps for the next of these that all ranks of a group make, in the same order.

        Passes over those for which other ranks have waited in vain. This one may have failed before
        it counted, as in a call with an unknown argument, and the next try of all ranks must meet.
        `name` is for errors, if that is not "rota." and `what`.
        """
        name = name or f"rota.{what}"
        while True:
            number = next_number(pg, what)
            store = store_of(pg, f"{what}/{number}")
            timeout = timeouts.of_group(pg)
            steps = cls(store, pg.rank(), pg.size(), timeout, name, peer_check())
            failure = steps._failure()
            if failure is None or not failure[-1]:
                break
        steps.why_ended = end_watch(pg)
        steps.number = number
        return steps

    def take_timeout(self, timeout: object) -> timedelta:
        """The caller's timeout, which then is that of the steps; that of the group for None."""
        self.timeout = timeouts.checked_positive(timeout, self._what, self.timeout)
        return self.timeout

    def step(self, run: Callable[[], T], deadline: float | None = None) -> list[T]:
        """Runs `run` and blocks until every rank has done so; returns all results by rank.

        Results travel as JSON. Raises what `run` has raised here; what it has raised elsewhere,
        with the rank and the text, as rota.TransportError or as an error of rota's of its kind;
        rota.PeerFailed for a rank that has ended before it took this step; and rota.Timeout at the
        deadline, in time.monotonic() (None: the timeout after its begin).
        """
        with self.telling():
            card = json.dumps([self.rank, run()]) + "\n"
        self.publish(card)
        if deadline is None:
            deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            return self._wait_for_all(deadline)
        except BaseException as error:
            # Each rank finds by itself that another has ended.
            if self._tells_of_waits and not isinstance(error, PeerFailed):
                self._tell(error, in_vain=True)
            raise
        finally:
            self.num_steps += 1

    def publish(self, card: str) -> None:
        """Shows the others that this rank has run the step; tests kill a rank here."""
        # torch's stubs lack append().
        self.store.append(f"step/{self.num_steps}", card)  # type: ignore[attr-defined]

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
        is_waiting, begin = False, time.monotonic()

        def check() -> None:
            nonlocal is_waiting
            is_waiting = True
            self.check()

        try:
            yield check
        except BaseException as error:
            has_timed_out = time.monotonic() - begin >= self.timeout.total_seconds()
            if not is_waiting or has_timed_out or not isinstance(error, Exception):
                self._tell(error, in_vain=is_waiting)
            raise

    def _tell(self, error: BaseException, *, in_vain: bool = False) -> None:
        self.has_told = True
        kind = type(error) if isinstance(error, RotaError) else TransportError
        self.fail(_text_of(error), kind, in_vain=in_vain)

    def fail(
        self, reason: str, kind: type[RotaError] = TransportError, *, in_vain: bool = False
    ) -> None:
        """Tells the other ranks that this one has given up: they raise this kind of error.

        in_vain: it has waited for others: those that have not come pass over this attempt.
        """
        failure = json.dumps([self.rank, kind.__name__, reason, in_vain])
        with contextlib.suppress(RuntimeError):  # of the store, which would hide the reason
            self.store.compare_set(self._failure_key(), "", failure)

    def _failure_key(self) -> str:
        return f"failure/{self.num_steps}"

    def _failure(self) -> list[Any] | None:
        key = self._failure_key()
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def check(self) -> None:
        """Raises if a rank is gone or has given up. Costs a request to the store."""
        if self._check_peers is not None:
            self._check_peers()
        if failure := self._failure():
            rank, kind, reason, _ = failure
            raise getattr(errors, kind, TransportError)(
                f"{self._prefix()}: {self._name_of(rank)} failed: {reason}"
            )

    def check_all(self) -> None:
        """As check(), where every rank is needed: raises if one of them has ended."""
        self.check()
        self._raise_lost(self._ends_of(range(self.world_size)).values())

    def _raise_lost(self, ends: Iterable[str]) -> None:
        for end in ends:
            raise PeerFailed(f"{self._prefix()}: {end}")

    def _wait_for_all(self, deadline: float) -> list[Any]:
        ends = Ends(self._ends_of)
        results: dict[int, Any] = {}
        missing: list[int] = []

        def have_all() -> bool:
            nonlocal results, missing
            lines = self.store.get(f"step/{self.num_steps}").splitlines()
            results = dict(map(json.loads, lines))
            missing = [rank for rank in range(self.world_size) if rank not in results]
            if missing:
                self.check()
                self._raise_lost(ends.of(missing))
            return not missing

        if not poll(have_all, deadline, self._last_pause_s):
            raise Timeout(self._late(missing))
        return [results[rank] for rank in range(self.world_size)]

    # ---- what kinds of steps do differently

    _last_pause_s = POLL_S
    _tells_of_waits = True

    def _ends_of(self, ranks: Sequence[int]) -> dict[int, str]:
        return known_ends(self.why_ended, ranks, self.rank)

    def _prefix(self) -> str:
        return f"{self._what}: rank {self.rank}/{self.world_size}"

    def _name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def _late(self, missing: Sequence[int]) -> str:
        return (
            f"{self._prefix()} waited {self.timeout.total_seconds():g} s for rank "
            f"{', '.join(map(str, missing))}; every rank must make its part: is it alive?"
        )


def run_on_all(what: str, run: Callable[[], T]) -> list[T]:
    """Runs `run` on every rank of the default group, which carries all results; returns these.

    Results are pickled: it is for what is too large for a store. An error of `run` is raised here,
    and as rota.TransportError, with the rank, on the others.
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
