"""A peer that dies, leaves, hangs or aborts: an error on every survivor, never a hang."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from checkpoints import wait_until_ended
from ranks import Rank, Ranks, check_error, error_of, kill_self, on_ranks
from rota.checkpoint import Checkpoint
from rota.weights import WeightStore

FOREVER = 10**9
# After so many collectives the victim is surely inside one.
WARM_UP = 20


def reduce_until_error(rank: Rank, num_elems: int, algorithm: str, dead: int) -> None:
    options = {}
    if algorithm == "two_level":
        os.environ["ROTA_NUMA_NODE"] = str(rank.rank // 2)
        options = {"group_size": 2}
    communicator = rank.communicator()
    tensor = torch.zeros(num_elems)
    for _ in range(WARM_UP):
        communicator.all_reduce(tensor, "sum", algorithm, **options)
    rank.tell()

    def loop() -> None:
        for _ in range(FOREVER):
            communicator.all_reduce(tensor, "sum", algorithm, **options)

    died = f"rank {dead} (pid {rank.pid_of(dead)}) has died"
    first = error_of(loop)
    assert first[1].startswith(f"rota.all_reduce: rank {rank.rank}/{rank.world_size}"), first
    check_error(first, "PeerFailed", died, "epoch", "step", "restart")
    for call in (lambda: communicator.all_reduce(tensor), communicator.barrier):
        check_error(error_of(call), "PeerFailed", "the group is dead", died)


@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("num_elems", [5, 3_000_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("world_size", "algorithm"),
    [
        *itertools.product((2, 3), ("one_shot", "two_shot", "ordered_ring", "ring")),
        (4, "two_level"),
    ],
)
def test_peer_killed_during_all_reduce_raises_peer_failed(
    world_size: int, algorithm: str, num_elems: int, victim: str
) -> None:
    dead = 0 if victim == "first" else world_size - 1
    with Ranks(world_size, reduce_until_error, num_elems, algorithm, dead) as ranks:
        ranks.results_without(dead)


USES = ("communicator", "broadcast", "all_gather", "barrier", "dist", "dist.barrier", "work")


@pytest.mark.parametrize("use", [*USES, "future", "then"])
@on_ranks(3, killed=[2])
def test_peer_killed_before_it_enters_raises_peer_failed(rank: Rank, use: str) -> None:
    rank.init()
    communicator = rota.Communicator()
    tensor = torch.ones(100_000)
    dist.barrier()
    if rank.rank == 2:
        time.sleep(0.1)  # the others wait for it
        kill_self()
    calls: dict[str, Callable[[], object]] = {
        "communicator": lambda: communicator.all_reduce(tensor),
        "broadcast": lambda: communicator.broadcast(tensor, rank.world_size - 1),
        "all_gather": lambda: communicator.all_gather(tensor.repeat(rank.world_size), tensor),
        "barrier": communicator.barrier,
        "dist": lambda: dist.all_reduce(tensor),
        "dist.barrier": dist.barrier,
        "work": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "future": lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
        "then": lambda: (
            dist.all_reduce(tensor, async_op=True)
            .get_future()
            .then(lambda done: done.value())
            .wait()
        ),
    }
    for fact in (f"rank 2 (pid {rank.pid_of(2)}) has died", "the group is dead"):
        kind, text = error_of(calls[use])
        if use == "then" and kind == "RuntimeError":
            # torch's, with the text of an exception that passes a Python callback
            kind, text = "PeerFailed", text.partition("PeerFailed")[2]
        check_error((kind, text), "PeerFailed", fact)


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ("close", ["has left the group", "before it closes"]),
        ("del", ["has left the group"]),
        ("abort", ["failed", "the data ran out"]),
    ],
)
@on_ranks(2)
def test_peer_that_leaves_raises_peer_failed(rank: Rank, how: str, facts: list[str]) -> None:
    communicator = rank.communicator()
    communicator.barrier()
    if rank.rank == 1:
        if how == "close":
            communicator.close()
        elif how == "del":
            del communicator
            gc.collect()
        elif how == "abort":
            communicator.abort("the data ran out")
            assert "the data ran out" in error_of(communicator.barrier)[1]
        rank.await_word()  # still alive
        return
    error = error_of(communicator.all_reduce, torch.ones(3))
    rank.say()
    peer = f"rank 1 (pid {rank.pid_of(1)})"
    check_error(error, "PeerFailed", peer, "rota.all_reduce: rank 0/2", *facts)


@on_ranks(3)
def test_timeout_names_the_peer_and_the_late_peer_learns_of_it(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=0.5)
    communicator.barrier()
    if rank.rank == 1:
        rank.await_word("rank 0 has waited")
        rank.await_word("rank 2 has waited")
    first = error_of(communicator.all_reduce, torch.ones(3))
    rank.say(f"rank {rank.rank} has waited")
    later = error_of(communicator.barrier)
    if rank.rank == 1:
        # It finds all contributions and may finish; its next call reports the failure.
        check_error(later, "Timeout", "failed", "waited", "for rank 1")
        return
    late = f"rank 1 (pid {rank.pid_of(1)})"
    check_error(
        first, "Timeout", f"rank {rank.rank}/3", "waited", "ms for", late, "is rank 1 alive?"
    )
    check_error(later, "Timeout", "the group is dead")


def be_late(rank: Rank) -> float:
    communicator = rank.communicator()
    communicator.barrier()
    if rank.rank == 2:
        rank.hear()
    tensor = torch.full((100_000,), float(rank.rank))
    communicator.all_reduce(tensor)
    communicator.barrier()
    return tensor[0].item()


def test_slow_peer_is_named_once_on_stderr_and_then_awaited() -> None:
    with Ranks(3, be_late) as ranks:
        ranks.wait_for_stderr(0)
        ranks.wait_for_stderr(1)
        time.sleep(1.2)  # long enough for an unwanted second line
        ranks.tell(2)
        assert ranks.results() == [3.0] * 3
        pid = ranks.pid(2)
        lines = [ranks.stderr(rank).splitlines() for rank in range(3)]
    assert [len(of_rank) for of_rank in lines] == [1, 1, 0]
    for rank in (0, 1):
        for fact in (f"rota.all_reduce: rank {rank}/3", f"rank 2 (pid {pid})", "epoch", "waited"):
            assert fact in lines[rank][0]


@pytest.mark.parametrize(
    ("what", "num_hosts"),
    [
        *itertools.product(("new_group", "Communicator", "Window"), (1, 2)),
        *(("publish", 1), ("load", 1), ("save", 1)),
    ],
)
@on_ranks(3, killed=[1, 2])
def test_who_waits_to_make_something_with_a_dead_rank_is_told(
    rank: Rank, what: str, num_hosts: int
) -> None:
    os.environ["ROTA_HOST_ID"] = f"host{rank.rank % num_hosts}"
    rank.init(timeout_s=600)
    if rank.rank > 0:
        rank.say(f"{rank.rank} is there")
        kill_self()
    for other in (1, 2):
        rank.await_word(f"{other} is there")
        wait_until_ended(rank.pid_of(other))
    store, state = rank.make_store(), {"a": torch.ones(2)}

    def checkpoint() -> Checkpoint:
        return Checkpoint(dist.group.WORLD, job=f"dead {os.getppid()}", linger=timedelta(0))

    makers: dict[str, Callable[[], object]] = {
        "publish": lambda: WeightStore(store, group=dist.group.WORLD).publish(1, state),
        "load": lambda: checkpoint().load(),
        "save": lambda: checkpoint().save(1, state),
        "Communicator": rota.Communicator,
        "Window": lambda: rota.Window(3),
        "new_group": lambda: dist.barrier(dist.new_group([0, 1], backend="rota")),
    }
    error, text = error_of(makers[what])
    dead = "has died" in text or "no sign of life" in text
    assert error == "PeerFailed" and dead, f"{error}: {text}"


@on_ranks(3, killed=[2])
def test_survivors_of_a_dead_group_can_make_a_new_one(rank: Rank) -> None:
    rank.init()
    communicator = rota.Communicator()
    if rank.rank == 2:
        kill_self()
    check_error(error_of(communicator.all_reduce, torch.ones(3)), "PeerFailed")
    dist.destroy_process_group()
    rank.world_size = 2
    rank.init()
    tensor = torch.ones(100_000)
    rota.Communicator().all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor[-1].item() == 4.0
