"""Many groups in one process share descriptors and threads, and do not wait for each other."""

from __future__ import annotations

import resource
import time
from itertools import combinations

import torch
import torch.distributed as dist

import rota
from own_process import num_descriptors, num_threads
from ranks import Rank, on_ranks

WORLD_SIZE = 4
# Every set of at least two ranks, and the number of groups that each set makes.
MEMBERS = [ranks for size in (2, 3, 4) for ranks in combinations(range(WORLD_SIZE), size)]
NUM_ROUNDS = 5
# Descriptors that making a group needs temporarily, plus those held for peers.
SPARE_DESCRIPTORS = 32


def limit_descriptors() -> None:
    limit = num_descriptors() + SPARE_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@on_ranks(WORLD_SIZE)
def test_many_groups_keep_their_descriptors_and_threads_few(rank: Rank) -> None:
    rank.init()
    limit_descriptors()
    groups = []  # keeps them alive to the end
    descriptors, threads = [], []
    for _ in range(NUM_ROUNDS):
        for ranks in MEMBERS:
            group = dist.new_group(list(ranks), backend="rota")
            if rank.rank not in ranks:
                continue
            groups.append(group)
            tensor = torch.full((1000,), float(rank.rank))
            dist.all_reduce(tensor, group=group)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            assert tensor[-1].item() == sum(ranks) * len(ranks)
        dist.barrier()
        time.sleep(0.1)  # a listener closes a connection a moment after its answer has arrived
        descriptors.append(num_descriptors())
        threads.append(num_threads())
    assert len(set(descriptors)) == 1, descriptors
    # A group's thread may not be back in the pool yet when the next group needs one.
    assert threads[-1] <= threads[0] + 3, threads


@on_ranks(2)
def test_last_group_of_a_peer_closes_its_descriptors(rank: Rank) -> None:
    rank.init("gloo")
    rota.empty(0)  # the process keeps one descriptor of the heap
    dist.barrier()
    samples = []
    for _ in range(3):
        samples.append(num_descriptors())
        groups = [dist.new_group(backend="rota") for _ in range(3)]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        for group in groups:
            dist.destroy_process_group(group)
        del group, groups
    samples.append(num_descriptors())
    dist.barrier()
    assert len(set(samples)) == 1, samples


@on_ranks(WORLD_SIZE)
def test_groups_used_in_different_orders_on_different_ranks_finish(rank: Rank) -> None:
    """Each rank queues the same collectives, in the same order per group, but visits the groups in
    its own order, so that each rank's first collective waits for another rank's last."""
    rank.init()
    groups = [dist.new_group(backend="rota") for _ in range(WORLD_SIZE)]
    order = groups[rank.rank :] + groups[: rank.rank]
    tensors = {group: torch.full((50_000,), float(rank.rank)) for group in groups}
    for _ in range(20):
        works = [
            dist.all_reduce(tensors[group], op, group=group, async_op=True)
            for group in order
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        ]
        for work in works:
            work.wait()
        for tensor in tensors.values():
            tensor.div_(WORLD_SIZE)
    assert [tensor[-1].item() for tensor in tensors.values()] == [(WORLD_SIZE - 1) / 2] * WORLD_SIZE
