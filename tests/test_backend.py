"""torch.distributed with backend "rota": the calls that DDP and user code make, mixed."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks


@on_ranks(2)
def test_backend_blocking_calls_keep_their_place_behind_async_ones(rank: Rank) -> None:
    """Blocking calls run in the caller's thread only when no async call is still queued."""
    rank.init()
    wrong = []
    for turn in range(200):
        first = torch.full((30_000,), float(turn))
        second = torch.full((7,), float(turn + rank.rank))
        third = first[:5].clone()
        work = dist.all_reduce(first, async_op=True)
        dist.broadcast(second, turn % 2)
        last = dist.all_reduce(third, async_op=True)
        if turn % 3:
            last.wait()
        dist.barrier()
        work.wait()
        got = (first[-1].item(), second[0].item(), third[0].item())
        if got != (2.0 * turn, float(turn + turn % 2), 2.0 * turn):
            wrong.append((turn, got))
    assert wrong == []


@on_ranks(2)
def test_communicators_in_two_threads_do_not_wait_for_each_other(rank: Rank) -> None:
    communicators = [rank.communicator(), rank.communicator()]
    tensors = [torch.full((70_000,), float(i + rank.rank)) for i in range(2)]

    def reduce_often(number: int) -> None:
        for _ in range(50):
            communicators[number].all_reduce(tensors[number], "max")
            tensors[number].add_(1.0)

    threads = [threading.Thread(target=reduce_often, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tensor[-1].item() for tensor in tensors] == [51.0, 52.0]


@on_ranks(2)
def test_backend_wait_with_timeout_gives_up_and_the_collective_goes_on(rank: Rank) -> None:
    rank.init()
    tensor = torch.ones(100_000)
    if rank.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        error = error_of(work.wait, timedelta(milliseconds=100))
        rank.say()
        work.wait()
        check_error(error, "Timeout", "100 ms")
    else:
        rank.await_word()
        dist.all_reduce(tensor)
    assert tensor[0].item() == 2.0


@on_ranks(2)
def test_backend_destroyed_group_can_be_made_again(rank: Rank) -> None:
    results = []
    for turn in range(3):
        rank.init()
        tensor = torch.full((2,), float(rank.rank + turn))
        work = dist.all_reduce(tensor, async_op=True)
        communicator = rank.communicator()
        communicator.all_reduce(again := torch.full((2,), 1.0))
        dist.destroy_process_group()  # waits for pending work
        work.wait()
        results += [tensor[0].item(), again[0].item()]
    assert results == [1.0, 2.0, 3.0, 2.0, 5.0, 2.0]


@pytest.mark.parametrize("same_store", [False, True], ids=["fresh_store", "same_store"])
@on_ranks(2)
def test_backend_numbers_of_a_world_do_not_outlive_it(rank: Rank, same_store: bool) -> None:
    """In the first world one rank makes a communicator over a subgroup of its own."""
    store = rank.make_store()
    dist.init_process_group("rota", store=store, rank=rank.rank, world_size=rank.world_size)
    group = dist.new_group([0])
    if rank.rank == 0:
        rota.Communicator(group).close()
    dist.destroy_process_group()
    if not same_store:
        store = rank.make_store(timeout_s=5.0)
    dist.init_process_group("rota", store=store, rank=rank.rank, world_size=rank.world_size)
    communicator = rota.Communicator(dist.new_group([0, 1]), timeout=timedelta(seconds=5))
    communicator.all_reduce(tensor := torch.ones(2))
    assert tensor[0].item() == 2.0


@on_ranks(2)
def test_backend_premul_sum_multiplies_each_contribution(rank: Rank) -> None:
    rank.init()
    for factor in (0.5, torch.tensor(0.5)):
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(tensor := torch.full((5,), 4.0 + rank.rank), op)
        assert tensor.tolist() == [4.5] * 5
        source = torch.full((5,), 4.0 + rank.rank)
        dist.reduce_scatter_tensor(part := torch.zeros(2), source[:4], op)
        assert part.tolist() == [4.5] * 2
        assert source.tolist() == [4.0 + rank.rank] * 5, "the input is not changed"
    work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), async_op=True)
    work.wait()
    assert tensor.tolist() == [18.0] * 5
