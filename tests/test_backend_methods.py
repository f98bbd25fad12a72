"""The methods of c10d.Backend beside its collectives, which backends forget."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, Ranks, run_ranks
from test_bad_input import error_of

CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(CPU)  # type: ignore[union-attr]


def use_options(rank: Rank) -> float:
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
    return tensor[0].item()


def test_pg_options_set_wire_dtype_and_slots() -> None:
    assert run_ranks(2, use_options) == [2.0, 2.0]


def pass_wrong_options(rank: Rank) -> tuple[str, str]:
    return error_of(lambda: rank.init(pg_options=object()))


def test_pg_options_of_another_backend_raise_type_error() -> None:
    error, text = run_ranks(1, pass_wrong_options)[0]
    assert error == "TypeError"
    assert "rota.BackendOptions" in text


def split(rank: Rank) -> list[float]:
    rank.init()
    results = []
    for number, members in enumerate(([0, 2], [1, 2, 0])):
        group = dist.group.WORLD.split_group(members, group_name=f"split{number}")  # type: ignore[union-attr]
        if rank.rank not in members:
            assert group is None
            continue
        backend = backend_of(group)
        work = backend.allreduce([tensor := torch.ones(3)])
        work.wait()
        assert backend.rank() == sorted(members).index(rank.rank)
        results.append(tensor[0].item())
    dist.barrier()
    return results


def test_split_makes_a_group_of_the_members() -> None:
    assert run_ranks(3, split) == [[2.0, 3.0], [3.0], [2.0, 3.0]]


def coalesce(rank: Rank) -> None:
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


def test_coalesced_calls_become_one_work() -> None:
    run_ranks(2, coalesce)


def fail_coalesced(rank: Rank) -> tuple[str, str]:
    rank.init()
    error = ("", "")
    if rank.rank == 0:
        backend = backend_of()
        backend._start_coalescing()
        dist.irecv(first := torch.zeros(3), 1)
        dist.irecv(torch.zeros(3), 1)
        work = backend._end_coalescing()
        error = error_of(lambda: work.wait(timedelta(milliseconds=50)))
        assert not work.is_completed()
    dist.barrier()
    if rank.rank == 0:
        work.wait()
        assert first.tolist() == [1.0] * 3
    else:
        dist.send(torch.ones(3), 0)
        dist.send(torch.ones(3), 0)
    return error


def test_coalesced_wait_ends_with_its_timeout_and_the_calls_go_on() -> None:
    error, text = run_ranks(2, fail_coalesced)[0]
    assert error == "Timeout" and "gave up" in text


def count_calls(rank: Rank) -> list[int]:
    rank.init()
    backend = backend_of()
    backend._set_sequence_number_for_group()
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    return [before, backend._get_sequence_number_for_group() - before]


def test_sequence_number_counts_calls() -> None:
    assert [counted for _, counted in run_ranks(2, count_calls)] == [2, 2]


def come_late(rank: Rank) -> tuple[str, str]:
    rank.init()
    backend = backend_of()
    assert backend.get_error().name == "SUCCESS"
    if rank.rank != 0:
        rank.hear()
        return "", ""
    backend.set_timeout(timedelta(seconds=1000))  # the call's own is shorter
    error = error_of(lambda: backend.monitored_barrier(timedelta(milliseconds=100), True))
    assert backend.get_error().name == "TIMEOUT"
    rank.tell()
    return error


def test_monitored_barrier_names_all_that_have_not_come() -> None:
    with Ranks(3, come_late) as ranks:
        ranks.hear(0)
        for late in (1, 2):
            ranks.tell(late)
        error, text = ranks.results()[0]
    assert error == "Timeout"
    assert "rank 1" in text and "rank 2" in text


def shorten_timeout(rank: Rank) -> tuple[str, str]:
    rank.init()
    backend_of().set_timeout(timedelta(milliseconds=100))
    if rank.rank == 0:
        error = error_of(dist.barrier)
        rank.tell()
        return error
    rank.hear()
    return "", ""


def test_set_timeout_applies_to_later_calls() -> None:
    with Ranks(2, shorten_timeout) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        error, _ = ranks.results()[0]
    assert error == "Timeout"


def add_sparse(rank: Rank, async_op: bool) -> None:
    rank.init()
    n = rank.world_size
    for places in ([], [0], [3, 1, 3]):
        mine = [place + rank.rank for place in places]
        sparse = torch.sparse_coo_tensor(
            torch.tensor([mine, mine], dtype=torch.int64), torch.ones(len(mine), 2) * 3, (8, 8, 2)
        )
        expected = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[place + r for place in places]] * 2, dtype=torch.int64),
                torch.ones(len(places), 2) * 3,
                (8, 8, 2),
            ).to_dense()
            for r in range(n)
        )
        work = dist.all_reduce(sparse, async_op=async_op)
        if work is not None:
            work.wait()
        assert torch.equal(sparse.to_dense(), torch.as_tensor(expected))


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
def test_sparse_all_reduce_equals_dense(async_op: bool) -> None:
    run_ranks(3, add_sparse, async_op)


def add_sparse_of_other_sizes(rank: Rank) -> tuple[str, str, float]:
    rank.init()
    tensor = torch.eye(3 + rank.rank).to_sparse()
    error = error_of(lambda: dist.all_reduce(tensor))
    dist.all_reduce(after := torch.ones(1))
    return *error, after.item()


def test_sparse_all_reduce_of_other_sizes_is_a_mismatch() -> None:
    for error, text, after in run_ranks(2, add_sparse_of_other_sizes):
        assert (error, after) == ("Mismatch", 2.0), text
        assert "sparse" in text
