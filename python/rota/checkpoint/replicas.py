"""Versions on their way from host to host, over the engine between hosts (engine.py).

Each rank sends its state to one rank of the next host; hosts are in the order of their first ranks.
The first message is the number of bytes, FAILED if there are none; then come the bytes behind the
head, and last the head, which makes them a version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rota.checkpoint.contents import WHAT
from rota.checkpoint.session import RankClaim
from rota.checkpoint.version import DATA_BEGIN, Memory, Version
from rota.errors import PeerFailed, TransportError
from rota.shared.buckets import BUCKET_BYTES

FAILED = -1
LENGTH_TAG, DATA_TAG, HEAD_TAG = range(3)

# Given an owner and a number of bytes; returns the memory that takes its version.
MakeRoom = Callable[[int, int], Memory]


def replica_holders(claims: Sequence[RankClaim]) -> dict[int, int]:
    """Which rank holds the replica of each; empty if all ranks are on one host."""
    ranks: dict[str, list[int]] = {}
    for claim in claims:
        ranks.setdefault(claim.host, []).append(claim.rank)
    hosts = list(ranks.values())
    if len(hosts) == 1:
        return {}
    return {
        rank: following[index % len(following)]
        for here, following in zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        for index, rank in enumerate(here)
    }


@dataclass(frozen=True)
class Exchange:
    """Versions that leave and come at the same time, over an engine that connects all ranks."""

    engine: Any  # a backend of c10d; torch's stubs lack send and recv
    who: Callable[[int], str]
    timeout: timedelta

    def run(
        self,
        sends: dict[int, Version | None],
        sources: dict[int, int],
        make_room: MakeRoom,
    ) -> None:
        """Sends versions, by receiver, and receives others from their sources, by owner. Blocks.

        A version that this rank has failed to make is None.
        """
        lengths = {owner: torch.zeros(1, dtype=torch.int64, device="cpu") for owner in sources}
        works = [
            (source, self.engine.recv([lengths[owner]], source, LENGTH_TAG))
            for owner, source in sources.items()
        ]
        for receiver, version in sends.items():
            num_bytes = FAILED if version is None else version.num_bytes
            length = torch.tensor([num_bytes], dtype=torch.int64, device="cpu")
            works.append((receiver, self.engine.send([length], receiver, LENGTH_TAG)))
        self._wait(works)
        failed = [owner for owner, length in lengths.items() if int(length) == FAILED]
        rooms: dict[int, Memory] = {}
        heads: dict[int, torch.Tensor] = {}
        problem: TransportError | None = None
        works = []
        for owner, source in sources.items():
            if owner in failed:
                continue
            num_bytes = int(lengths[owner])
            heads[owner] = torch.empty(DATA_BEGIN, dtype=torch.uint8, device="cpu")
            try:
                rooms[owner] = make_room(owner, num_bytes)
                rooms[owner].clear_head()
                body = list(rooms[owner].bytes[DATA_BEGIN:num_bytes].split(BUCKET_BYTES))
            except TransportError as error:
                problem = problem or error
                body = _nowhere(num_bytes - DATA_BEGIN)
            works += [(source, self.engine.recv([part], source, DATA_TAG)) for part in body]
            works.append((source, self.engine.recv([heads[owner]], source, HEAD_TAG)))
        for receiver, version in sends.items():
            if version is not None:
                content = version.memory.bytes[: version.num_bytes]
                head, body = content[:DATA_BEGIN], content[DATA_BEGIN:].split(BUCKET_BYTES)
                works += [(receiver, self.engine.send([part], receiver, DATA_TAG)) for part in body]
                works.append((receiver, self.engine.send([head], receiver, HEAD_TAG)))
        self._wait(works)
        for owner, room in rooms.items():
            room.bytes[:DATA_BEGIN].copy_(heads[owner])
        if failed:
            raise TransportError(
                f"{WHAT}: {', '.join(map(self.who, failed))} failed to save, so there is no "
                f"replica of it here"
            )
        if problem is not None:
            raise problem

    def _wait(self, works: Sequence[tuple[int, dist.Work]]) -> None:
        for peer, work in works:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise PeerFailed(
                    f"{WHAT}: the connection to {self.who(peer)} on another host is lost "
                    f"({error}); when all ranks are back, load()"
                ) from error


# What others send to this rank must be taken, even if there is no room: they wait for it.
def _nowhere(num_bytes: int) -> list[torch.Tensor]:
    scratch = torch.empty(min(num_bytes, BUCKET_BYTES), dtype=torch.uint8, device="cpu")
    return [scratch[: num_bytes - at] for at in range(0, num_bytes, BUCKET_BYTES)]
