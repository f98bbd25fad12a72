"""torch.distributed with backend "rota": the calls that DDP and user code make, mixed."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import rota
from oracle import exact, exact_inputs, name_of
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_backend_all_reduce_every_op_equals_oracle(rank: Rank) -> None:
    rank.init()
    wrong = []
    for op, reduce_op in REDUCE_OPS.items():
        dtype = torch.int32 if op.startswith("b") else torch.float32
        for size in (5, 100_000):
            inputs = exact_inputs(rank.world_size, size, dtype, op)
            tensor = inputs[rank.rank].clone()
            dist.all_reduce(tensor, reduce_op)
            if not torch.equal(tensor, exact(inputs, op)):
                wrong.append(f"{op} {size}")
    assert wrong == []


def use_futures(rank: Rank) -> list[Any]:
    rank.init()
    tensor = torch.full((1000,), float(rank.rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    value = future.wait()
    return [
        isinstance(value, list) and len(value) == 1,
        value[0].data_ptr() == tensor.data_ptr(),
        doubled.wait()[0].item(),
        work.wait(),
        work.is_completed(),
        work.is_success(),
        work.get_future().wait()[0][0].item(),  # also works after the work is done
        [result[0].item() for result in work.result()],
    ]


def test_backend_async_all_reduce_future_holds_the_list_of_tensors() -> None:
    expected = [True, True, 6.0, True, True, True, 3.0, [3.0]]
    assert run_ranks(2, use_futures) == [expected] * 2


def copy_through_c10d(rank: Rank) -> list[list[float]]:
    rank.init()
    own = float(rank.rank)
    results = []

    tensor = torch.full((3,), own)
    dist.broadcast(tensor, 1)
    results.append(tensor.tolist())

    outputs = [torch.empty(2) for _ in range(rank.world_size)]
    dist.all_gather(outputs, torch.full((2,), own))
    results.append(torch.cat(outputs).tolist())

    output = torch.empty(rank.world_size * 2)
    dist.all_gather_into_tensor(output, torch.full((2,), own))
    results.append(output.tolist())

    stacked = torch.empty(rank.world_size, 2)
    dist.all_gather_into_tensor(stacked, torch.full((2,), own))
    results.append(stacked.flatten().tolist())
    dist.barrier()
    return results


def test_backend_copies_reach_every_rank() -> None:
    gathered = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert run_ranks(3, copy_through_c10d) == [[[1.0] * 3, gathered, gathered, gathered]] * 3


def run_every_call_async(rank: Rank) -> list[list[float]]:
    rank.init()
    own = float(rank.rank)
    reduced, sent = torch.full((2,), own), torch.full((2,), own)
    outputs = [torch.empty(1) for _ in range(rank.world_size)]
    whole = torch.empty(rank.world_size)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.broadcast(sent, 0, async_op=True),
        dist.all_gather(outputs, torch.full((1,), own), async_op=True),
        dist.all_gather_into_tensor(whole, torch.full((1,), own), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    return [reduced.tolist(), sent.tolist(), torch.cat(outputs).tolist(), whole.tolist()]


def test_backend_async_calls_may_be_waited_for_in_any_order() -> None:
    expected = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert run_ranks(2, run_every_call_async) == [expected] * 2


def exchange_objects(rank: Rank) -> list[Any]:
    rank.init()
    gathered: list[Any] = [None] * rank.world_size
    dist.all_gather_object(gathered, {"rank": rank.rank, "text": "x" * 100_000 * rank.rank})
    objects = ["from 2", {"a": 1}] if rank.rank == 2 else [None, None]
    dist.broadcast_object_list(objects, src=2)
    return [[(entry["rank"], len(entry["text"])) for entry in gathered], objects]


def test_backend_objects_reach_every_rank() -> None:
    expected = [[(0, 0), (1, 100_000), (2, 200_000)], ["from 2", {"a": 1}]]
    assert run_ranks(3, exchange_objects) == [expected] * 3


def coalesce(rank: Rank, async_ops: bool) -> list[list[float]]:
    rank.init()
    own = float(rank.rank + 1)
    tensors = [torch.full((size,), own * size) for size in (1, 3, 50_000)]
    with _coalescing_manager(async_ops=async_ops) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if async_ops:
        manager.wait()
    outputs = [torch.empty(rank.world_size * size) for size in (1, 3)]
    with _coalescing_manager(async_ops=async_ops) as manager:
        for output in outputs:
            part = torch.full((len(output) // rank.world_size,), own)
            dist.all_gather_into_tensor(output, part)
    if async_ops:
        manager.wait()
    return [*([t[0].item(), t[-1].item()] for t in tensors), *(t.tolist() for t in outputs)]


@pytest.mark.parametrize("async_ops", [False, True], ids=["blocking", "async"])
def test_backend_coalesced_calls_equal_single_ones(async_ops: bool) -> None:
    sums = [[3.0, 3.0], [9.0, 9.0], [150_000.0, 150_000.0]]
    expected = [*sums, [1.0, 2.0], [1.0] * 3 + [2.0] * 3]
    assert run_ranks(2, coalesce, async_ops) == [expected] * 2


@on_ranks(2)
def test_backend_all_reduce_coalesced_equals_single_calls(rank: Rank) -> None:
    rank.init()
    own = float(rank.rank + 1)
    tensors = [torch.full((1,), own), torch.full((2,), own)]
    dist.all_reduce_coalesced(tensors)
    result = [tensor.tolist() for tensor in tensors]
    assert result == [[3.0], [3.0, 3.0]]


def gather_old_coalesced(rank: Rank, sizes: list[int]) -> list[list[list[float]]]:
    """torch's documentation: the outputs are listed by rank, each with one tensor per input."""
    rank.init()
    inputs = [torch.full((size,), 10.0 * rank.rank + i) for i, size in enumerate(sizes)]
    outputs = [[torch.empty(size) for size in sizes] for _ in range(rank.world_size)]
    dist.all_gather_coalesced(outputs, inputs)
    return [[tensor.tolist() for tensor in row] for row in outputs]


@pytest.mark.parametrize("sizes", [[1, 1], [1, 2], [2, 1, 3]], ids=str)
def test_backend_all_gather_coalesced_fills_outputs_by_rank(sizes: list[int]) -> None:
    expected = [[[10.0 * r + i] * size for i, size in enumerate(sizes)] for r in range(2)]
    assert run_ranks(2, gather_old_coalesced, sizes) == [expected] * 2


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


def use_subgroups(rank: Rank) -> list[Any]:
    rank.init()
    pair = dist.new_group([0, 2], backend="rota")
    everyone = dist.new_group(backend="rota")
    tensor = torch.full((2,), float(rank.rank + 1))
    if rank.rank != 1:
        dist.all_reduce(tensor, group=pair)
        sent = torch.full((1,), float(rank.rank))
        dist.broadcast(sent, 2, group=pair)
        root = sent.item()
    else:
        root = None
    total = torch.full((1,), float(rank.rank + 1))
    dist.all_reduce(total, group=everyone)
    dist.barrier()
    dist.destroy_process_group(everyone)
    dist.all_reduce(total)  # the default group still works
    return [tensor.tolist(), root, total.item()]


def test_backend_subgroups_reduce_among_their_members_only() -> None:
    pair = [[4.0, 4.0], 2.0, 18.0]
    assert run_ranks(3, use_subgroups) == [pair, [[2.0, 2.0], None, 18.0], pair]


@on_ranks(2)
def test_backend_several_groups_do_not_order_each_other(rank: Rank) -> None:
    """Each busy group has a progress thread; their async calls overlap."""
    rank.init()
    groups = [dist.new_group(backend="rota") for _ in range(3)]
    tensors = [torch.full((50_000,), float(i + rank.rank)) for i in range(3)]
    works = [
        dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        for i in ([0, 1, 2] if rank.rank == 0 else [2, 1, 0])
    ]
    for work in works:
        work.wait()
    result = [tensor[-1].item() for tensor in tensors]
    assert result == [1.0, 3.0, 5.0]


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
    result = [tensor[-1].item() for tensor in tensors]
    assert result == [51.0, 52.0]


def wait_with_timeout(rank: Rank) -> tuple[tuple[str, str], float]:
    rank.init()
    tensor = torch.ones(100_000)
    error = ("", "")
    if rank.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        error = error_of(lambda: work.wait(timedelta(milliseconds=100)))
        rank.tell()
        work.wait()
    else:
        rank.hear()
        dist.all_reduce(tensor)
    return error, tensor[0].item()


def test_backend_wait_with_timeout_gives_up_and_the_collective_goes_on() -> None:
    with Ranks(2, wait_with_timeout) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        ((error, text), total), (_, peer_total) = ranks.results()
    assert error == "Timeout", text
    assert "100 ms" in text
    assert total == peer_total == 2.0


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


@on_ranks(2)
def test_backend_can_be_made_again_over_the_same_store(rank: Rank) -> None:
    """Like torchrun, whose agent keeps one store for all groups."""
    store = rank.make_store()
    totals = []
    for _ in range(2):
        dist.init_process_group("rota", store=store, rank=rank.rank, world_size=rank.world_size)
        dist.all_reduce(tensor := torch.ones(2))
        group = dist.new_group(backend="rota")
        dist.all_reduce(tensor, group=group)
        totals.append(tensor[0].item())
        dist.destroy_process_group()
    assert totals == [4.0, 4.0]


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
    result = tensor[0].item()
    assert result == 2.0


@on_ranks(2)
def test_backend_use_after_destroy_raises_rota_error(rank: Rank) -> None:
    rank.init()
    group = dist.new_group(backend="rota")
    backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    error = error_of(lambda: backend.allreduce([torch.ones(1)]))
    check_error(error, "RotaError", "closed", "make a new one")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8], ids=name_of)
@on_ranks(2)
def test_backend_all_reduce_dtypes_equal_sums(rank: Rank, dtype: torch.dtype) -> None:
    rank.init()
    tensor = torch.ones(70_000, dtype=dtype)
    dist.all_reduce(tensor)
    result = [tensor[0].item(), tensor[-1].item()]
    assert result == [2.0, 2.0]
