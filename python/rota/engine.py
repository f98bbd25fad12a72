"""What carries messages between hosts: a torch process group that can send and recv."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from rota.errors import TransportError

MakeEngine = Callable[[dist.Store, int, int], "dist._Backend"]


def _wait_for_all(store: dist.Store, world_size: int, timeout: timedelta) -> None:
    """Blocks until every rank has called it with this store."""
    end = time.monotonic() + timeout.total_seconds()
    num_there = store.add("connected", 1)
    while num_there < world_size:
        if time.monotonic() > end:
            raise TransportError(
                f"rota: {num_there} of {world_size} ranks have connected to the other hosts within "
                f"{timeout.total_seconds():.0f} s; is the network up, and GLOO_SOCKET_IFNAME right?"
            )
        time.sleep(0.002)
        num_there = store.add("connected", 0)


def engine_maker(given: dist.ProcessGroup | None, timeout: timedelta) -> MakeEngine:
    """Returns what makes, or hands over, the backend that carries messages between hosts.

    Args:
        given: the user's own group, of the same ranks in the same order. None: a Gloo group is made
            when ranks turn out to be on several hosts; GLOO_SOCKET_IFNAME chooses its interface.
        timeout: of the Gloo group's connections.
    """

    def make(store: dist.Store, rank: int, world_size: int) -> dist._Backend:
        if given is None:
            backend = dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
            # A rank that sends while a peer still connects may block the peer's connection.
            _wait_for_all(store, world_size, timeout)
            return backend
        if given.size() != world_size or given.rank() != rank:
            raise ValueError(
                f"rota: the engine is a group of {given.size()} ranks, in which this is rank "
                f"{given.rank()}; expected {world_size} ranks and rank {rank}: pass a group of the "
                f"same ranks in the same order"
            )
        return given._get_backend(torch.device("cpu"))

    return make
