"""The methods of c10d.Backend beside its collectives, which backends forget."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import rota
from ranks import Rank, check_error, error_of, on_ranks

CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(CPU)


@on_ranks(2)
def test_pg_options_set_wire_dtype_and_slots(rank: Rank) -> None:
    options = rota.BackendOptions(slot_bytes=8192, wire_dtype=torch.bfloat16)
    rank.init(pg_options=options)
    backend = backend_of()
    assert backend.options.slot_bytes == 8192
    assert backend.options.wire_dtype is torch.bfloat16
    assert backend.options is not options, "two groups may be made with one object"
    dist.all_reduce(tensor := torch.full((70_000,), 1 + 2**-9))  # rounds to 1 in bfloat16
    dist.all_reduce(short := torch.ones(3, dtype=torch.float16))  # not wider: is not rounded
    dist.all_reduce(integers := torch.ones(3, dtype=torch.int64))
    assert short.tolist() == integers.tolist() == [2.0] * 3
    assert dist.new_group(pg_options=rota.BackendOptions()) is not None
    assert tensor[0].item() == 2.0


@on_ranks(1)
def test_pg_options_of_another_backend_raise_type_error(rank: Rank) -> None:
    error = error_of(rank.init, pg_options=object())
    check_error(error, "TypeError", "rota.BackendOptions")


@on_ranks(3)
def test_split_makes_a_group_of_the_members(rank: Rank) -> None:
    rank.init()
    results = []
    for number, members in enumerate(([0, 2], [1, 2, 0])):
        group = dist.group.WORLD.split_group(members, group_name=f"split{number}")
        if rank.rank not in members:
            assert group is None
            continue
        backend = backend_of(group)
        work = backend.allreduce([tensor := torch.ones(3)])
        work.wait()
        assert backend.rank() == sorted(members).index(rank.rank)
        results.append(tensor[0].item())
    dist.barrier()
    assert results == [[2.0, 3.0], [3.0], [2.0, 3.0]][rank.rank]


@on_ranks(2)
def test_coalesced_calls_become_one_work(rank: Rank) -> None:
    rank.init()
    peer = 1 - rank.rank
    sent = [torch.full((size,), float(rank.rank)) for size in (3, 100_000)]
    received = [torch.empty_like(tensor) for tensor in sent]
    # Both ranks list their sends first, and the long one does not fit the slots.
    operations = [dist.P2POp(dist.isend, tensor, peer) for tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor in received]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == 1, "coalesced calls have one work"
    works[0].wait()
    assert works[0].is_completed()
    assert [tensor[-1].item() for tensor in received] == [float(peer)] * 2

    backend = backend_of()
    backend._start_coalescing()
    assert "end that one first" in error_of(backend._start_coalescing)[1]
    dist.all_reduce(tensor := torch.ones(3), async_op=True)
    dist.broadcast(other := torch.full((3,), float(rank.rank)), 1, async_op=True)
    work = backend._end_coalescing()
    values = work.get_future().wait()
    assert torch.equal(torch.stack(list(values)), torch.stack([tensor, other]))
    assert tensor[0] == 2 and other[0] == 1
    assert "without startCoalescing" in error_of(backend._end_coalescing)[1]


@on_ranks(2)
def test_coalesced_wait_ends_with_its_timeout_and_the_calls_go_on(rank: Rank) -> None:
    rank.init()
    if rank.rank == 0:
        backend = backend_of()
        backend._start_coalescing()
        dist.irecv(first := torch.zeros(3), 1)
        dist.irecv(torch.zeros(3), 1)
        work = backend._end_coalescing()
        error = error_of(work.wait, timedelta(milliseconds=50))
        assert not work.is_completed()
    dist.barrier()
    if rank.rank == 0:
        work.wait()
        assert first.tolist() == [1.0] * 3
        check_error(error, "Timeout", "gave up")
    else:
        dist.send(torch.ones(3), 0)
        dist.send(torch.ones(3), 0)


@on_ranks(2)
def test_sequence_number_counts_calls(rank: Rank) -> None:
    rank.init()
    backend = backend_of()
    backend._set_sequence_number_for_group()
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    assert backend._get_sequence_number_for_group() - before == 2


@on_ranks(3)
def test_monitored_barrier_names_all_that_have_not_come(rank: Rank) -> None:
    rank.init()
    backend = backend_of()
    assert backend.get_error().name == "SUCCESS"
    if rank.rank != 0:
        rank.await_word()
        return
    backend.set_timeout(timedelta(seconds=1000))  # the call's own is shorter
    error = error_of(backend.monitored_barrier, timedelta(milliseconds=100), True)
    rank.say()
    assert backend.get_error().name == "TIMEOUT"
    check_error(error, "Timeout", "rank 1", "rank 2")


@on_ranks(2)
def test_set_timeout_applies_to_later_calls(rank: Rank) -> None:
    rank.init()
    backend_of().set_timeout(timedelta(milliseconds=100))
    if rank.rank == 1:
        rank.await_word()
        return
    error = error_of(dist.barrier)
    rank.say()
    check_error(error, "Timeout")


def calls_with_timeout(
    backend: Any, rank: int, timeout: timedelta
) -> dict[str, Callable[[], dist.Work]]:
    """Every collective with a timeout of its own, between two ranks; rank 0 is the root."""

    def options(make: Callable[[], Any]) -> Any:
        result = make()
        result.timeout = timeout
        return result

    def tensor(length: int = 4) -> torch.Tensor:
        return torch.ones(length)

    def pair() -> list[torch.Tensor]:
        return [tensor(), tensor()]

    sparse = torch.ones(4).to_sparse()
    root_has_two = [pair()] if rank == 0 else []
    gather, scatter = options(c10d.GatherOptions), options(c10d.ScatterOptions)
    all_gather = options(c10d.AllgatherOptions)
    all_reduce = options(c10d.AllreduceOptions)
    all_to_all = options(c10d.AllToAllOptions)
    reduce_scatter = options(c10d.ReduceScatterOptions)
    return {
        "all_reduce": lambda: backend.allreduce([tensor()], all_reduce),
        "all_gather-sparse": lambda: backend.allreduce([sparse], all_reduce),
        "broadcast": lambda: backend.broadcast([tensor()], options(c10d.BroadcastOptions)),
        "reduce": lambda: backend.reduce([tensor()], options(c10d.ReduceOptions)),
        "all_gather": lambda: backend.allgather([pair()], [tensor()], all_gather),
        "all_gather-single": lambda: backend._allgather_base(tensor(8), tensor(), all_gather),
        "gather": lambda: backend.gather(root_has_two, [tensor()], gather),
        "scatter": lambda: backend.scatter([tensor()], root_has_two, scatter),
        "reduce_scatter": lambda: backend.reduce_scatter([tensor()], [pair()], reduce_scatter),
        "reduce_scatter-single": lambda: backend._reduce_scatter_base(
            tensor(), tensor(8), reduce_scatter
        ),
        "all_to_all": lambda: backend.alltoall(pair(), pair(), all_to_all),
        "all_to_all-single": lambda: backend.alltoall_base(tensor(), tensor(), [], [], all_to_all),
        "barrier": lambda: backend.barrier(options(c10d.BarrierOptions)),
    }


SHORT = timedelta(milliseconds=150)
LONG = timedelta(seconds=1000)


@on_ranks(2)
def test_timeout_of_a_call_names_who_was_awaited(rank: Rank) -> None:
    rank.init()
    errors: dict[str, tuple[str, str]] = {}
    for name in calls_with_timeout(None, rank.rank, SHORT):
        # A timeout ends a group. This one lives as long as the test unless the call's own counts.
        backend = backend_of(dist.new_group(timeout=LONG))
        call = calls_with_timeout(backend, rank.rank, SHORT)[name]
        dist.barrier()
        if rank.rank == 0:
            errors[name] = error_of(lambda: call().wait())  # noqa: B023
            assert backend.options._timeout == LONG
    dist.barrier()
    assert len(errors) == (13 if rank.rank == 0 else 0)
    for name, error in errors.items():
        check_error(error, "Timeout", name.partition("-")[0], "for rank 1 (pid ")


@on_ranks(2)
def test_timeout_of_a_queued_call_applies_to_its_own_waits_only(rank: Rank) -> None:
    """Rank 1 comes late to the first call, and to the second one never."""
    rank.init()
    backend = backend_of()
    tensor = torch.ones(4)
    short = c10d.AllreduceOptions()
    short.timeout = SHORT
    if rank.rank == 1:
        rank.await_word("queued")
        time.sleep(3 * SHORT.total_seconds())
    first = backend.allreduce([tensor], c10d.AllreduceOptions())
    if rank.rank == 0:
        second = backend.allreduce([torch.ones(4)], short)
        rank.say("queued")
    first.wait()
    assert tensor[0].item() == 2.0
    if rank.rank == 1:
        rank.await_word("over")
        return
    error = error_of(second.wait)
    rank.say("over")
    check_error(error, "Timeout")


@on_ranks(2)
def test_timeout_of_a_call_may_be_longer_than_that_of_the_group(rank: Rank) -> None:
    rank.init()
    backend = backend_of()
    backend.set_timeout(SHORT)
    options = c10d.AllreduceOptions()
    options.timeout = LONG
    options.asyncOp = False
    if rank.rank == 0:
        rank.say()
    else:
        rank.await_word()
        time.sleep(3 * SHORT.total_seconds())
    backend.allreduce([tensor := torch.ones(4)], options).wait()
    assert tensor[0].item() == 2.0


@on_ranks(2)
def test_timeout_of_the_first_call_bounds_its_connecting(rank: Rank) -> None:
    rank.init()
    if rank.rank == 1:
        rank.await_word()
        return
    backend = backend_of(dist.new_group(timeout=LONG, use_local_synchronization=True))
    options = c10d.AllreduceOptions()
    options.timeout = SHORT
    error = error_of(lambda: backend.allreduce([torch.ones(4)], options).wait())
    rank.say()
    check_error(error, "TransportError", "still waits for rank 1")


@on_ranks(2)
def test_sparse_all_reduce_of_other_sizes_is_a_mismatch(rank: Rank) -> None:
    rank.init()
    for tensor, *facts in (
        (torch.eye(3 + rank.rank).to_sparse(), "of [3, 3] with sparse_dim 2", "of [4, 4] with"),
        (
            torch.ones(3, 2).to_sparse(sparse_dim=2 - rank.rank),
            *(f"of [3, 2] with sparse_dim {dim}" for dim in (1, 2)),
        ),
    ):
        check_error(error_of(dist.all_reduce, tensor), "Mismatch", *facts)
        dist.all_reduce(after := torch.ones(1))
        assert after.item() == 2.0
