"""Steps that several processes take together over a torch Store, without any group."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from rota.errors import Timeout, TransportError

POLL_S = 0.002  # few enough requests for a store on a server


def sides(texts: Sequence[str], verb: str) -> str | None:
    """Which ranks have which text, as "rank 0, 2 has x; rank 1 has y"; None if all have the same.

    Args:
        texts: of each rank.
        verb: between the ranks and their text.
    """
    ranks_of: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(str(rank))
    if len(ranks_of) == 1:
        return None
    return "; ".join(f"rank {', '.join(ranks)} {verb} {text}" for text, ranks in ranks_of.items())


# Of waits that may take long.
LAST_POLL_S = 0.05


def poll(is_done: Callable[[], bool], deadline: float) -> bool:
    """Blocks until `is_done` returns true; False at the deadline (time.monotonic)."""
    pause = POLL_S
    while not is_done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LAST_POLL_S)
    return True


class JointSteps:
    """Each step runs a function on every rank and gives every rank all results, or the failure.

    Args:
        store: the same for all ranks, used for nothing else.
        rank, world_size: this process among those that take the steps.
        timeout: of each step.
        what: the public name for errors, such as "rota.Window".
        check_peers: raises if a process is gone; called while others are awaited.
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
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._what = what
        self._check_peers = check_peers
        self._num_steps = 0

    def step(self, run: Callable[[], str]) -> list[str]:
        """Runs `run` and blocks until every rank has done so; returns all results by rank.

        Raises:
            Exception: what `run` raised here.
            rota.TransportError: it raised on another rank, which is named with the text.
            rota.Timeout: a rank did not take this step in time.
        """
        own_error: Exception | None = None
        result = ""
        try:
            result = run()
        except Exception as error:
            own_error = error
        card = {"result": result} if own_error is None else {"error": str(own_error)}
        step = self._num_steps
        self._num_steps += 1
        self._store.set(self._key(step, self._rank), json.dumps(card))
        if own_error is not None:
            raise own_error
        cards = [json.loads(self._wait_for(step, rank)) for rank in range(self._world_size)]
        for rank, other in enumerate(cards):
            if "error" in other:
                raise TransportError(
                    f"{self._what}: rank {self._rank}/{self._world_size}: rank {rank} failed: "
                    f"{other['error']}"
                )
        return [str(other["result"]) for other in cards]

    @staticmethod
    def _key(step: int, rank: int) -> str:
        return f"{step}/{rank}"

    # Polls instead of waiting in the store, so that Ctrl-C can interrupt it.
    def _wait_for(self, step: int, rank: int) -> bytes:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([self._key(step, rank)]):
            if self._check_peers is not None:
                self._check_peers()
            if time.monotonic() > deadline:
                missing = [
                    str(peer)
                    for peer in range(self._world_size)
                    if not self._store.check([self._key(step, peer)])
                ]
                raise Timeout(
                    f"{self._what}: rank {self._rank}/{self._world_size} waited "
                    f"{self._timeout.total_seconds():g} s for rank {', '.join(missing)}; every "
                    f"rank must make its part: is it alive?"
                )
            time.sleep(POLL_S)
        value: bytes = self._store.get(self._key(step, rank))
        return value
