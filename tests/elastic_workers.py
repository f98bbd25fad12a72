"""What members of a rota.elastic.Membership do in tests, and the store in which they meet."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rota
import rota.elastic
from ranks import Rank, Ranks, kill_self
from rota.elastic import Generation, Membership

STORE_TIMEOUT = timedelta(seconds=30)
PACE_S = 0.002  # leaves the cores to the ranks that are starting


def serve_store() -> dist.TCPStore:
    """A store in the test process, which outlives its ranks."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
    )


def store_of(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=STORE_TIMEOUT)


def check_sum(generation: Generation, device: str) -> None:
    """An all_reduce through torch.distributed gives what the generation's ranks put in."""
    tensor = torch.full((1000,), float(generation.rank + 1)).to(device)
    dist.all_reduce(tensor)
    expected = generation.world_size * (generation.world_size + 1) / 2
    assert tensor.cpu().unique().tolist() == [expected]


def pids_of(generation: Generation) -> list[int]:
    return [rota.elastic.Handle.parse(handle).pid for handle in generation.handles]


def serve(
    rank: Rank,
    port: int,
    num_members: int,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
) -> None:
    """A member that takes part until the key "stop" is set, and has the test hear of every change.

    Args:
        num_members: that make the first generation together; ranks from there on are newcomers,
            which join when they are told to.
        options: of the Membership.
        device: of the tensors that are summed.
    """
    store = store_of(port)
    is_newcomer = rank.rank >= num_members
    if is_newcomer:
        rank.hear()
    membership = Membership(store, **options or {})
    min_members = 1 if is_newcomer else num_members
    while True:
        generation = membership.next(min_members)
        pids = pids_of(generation)
        assert pids[generation.rank] == os.getpid()
        try:
            check_sum(generation, device)
            min_members = 1
            rank.tell(pids)
            while not generation.is_over(leave=store.check(["stop"])):
                time.sleep(PACE_S)
        except rota.PeerFailed:
            continue
        if store.check(["stop"]):
            return membership.leave()


def hear_until(ranks: Ranks, rank: int, pids: list[int]) -> None:
    """Waits until a rank is in a generation of these processes."""
    while ranks.hear(rank) != pids:
        pass


def all_hear(ranks: Ranks, members: list[int]) -> None:
    """Waits until these processes are in a generation of their own, in this order."""
    pids = [ranks.pid(member) for member in members]
    for member in members:
        hear_until(ranks, member, pids)


def first_order(ranks: Ranks, num_members: int) -> list[int]:
    """The processes of the first generation by rank, which is the order of their arrival."""
    pids, *_ = [ranks.hear(process) for process in range(num_members)]
    return sorted(range(num_members), key=lambda process: pids.index(ranks.pid(process)))


def change_members(
    store: dist.TCPStore,
    num_members: int,
    changes: Sequence[tuple[list[int], int]],
    member: Callable[..., object] = serve,
) -> list[int]:
    """Lets members die and join, and checks after each change who the members are, by rank.

    Args:
        changes: the ranks that die, and how many join.

    Returns:
        How many keys the store has after each change.
    """
    num_processes = num_members + sum(num_joining for _, num_joining in changes)
    newcomers = iter(range(num_members, num_processes))
    killed: list[int] = []
    num_keys = []
    with Ranks(num_processes, member, store.port, num_members) as ranks:
        order = first_order(ranks, num_members)
        for dying, num_joining in changes:
            dead = [order[place] for place in dying]
            for process in dead:
                ranks.kill(process)
            joining = list(itertools.islice(newcomers, num_joining))
            for process in joining:
                ranks.tell(process)
            killed += dead
            order = [process for process in order if process not in dead] + joining
            all_hear(ranks, order)
            num_keys.append(store.num_keys())
        store.set("stop", "")
        ranks.results(killed=killed)
    return num_keys


def first_generation(rank: Rank, port: int, **options: Any) -> tuple[Membership, Generation]:
    """A membership in which every process has its rank of the test, and its first generation."""
    membership = Membership(store_of(port), rank=rank.rank, **options)
    return membership, membership.next(min_members=rank.world_size)


def let_die(victim: int, generation: Generation, store: dist.Store) -> None:
    """The member of this rank dies when all others have come here: no call before fails."""
    if generation.rank == victim:
        others = (rank for rank in range(generation.world_size) if rank != victim)
        store.wait([f"{generation.uuid}/{rank}" for rank in others])
        kill_self()
    store.set(f"{generation.uuid}/{generation.rank}", "")
