"""Errors in a coalescing block, which torch's manager does not end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from ranks import Rank, check_error, error_of, on_ranks

CPU = torch.device("cpu")


def check_alive(rank: Rank) -> None:
    """Sums run, waited for or not, and so does a batch."""
    peer = 1 - rank.rank
    for _ in range(2):
        dist.all_reduce(total := torch.full((3,), rank.rank + 1.0))
        assert total.tolist() == [3.0] * 3
        dist.all_reduce(total, async_op=True).wait()
        assert total.tolist() == [6.0] * 3
        dist.all_gather_into_tensor(gathered := torch.zeros(2), torch.tensor([float(rank.rank)]))
        assert gathered.tolist() == [0.0, 1.0]
        output = torch.zeros(2)
        ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank.rank)), peer)]
        ops.append(dist.P2POp(dist.irecv, output, peer))
        for one in dist.batch_isend_irecv(ops):
            one.wait()
        assert output.eq(peer).all()


@on_ranks(2)
def test_refused_message_of_a_batch_raises_at_its_end_and_the_group_goes_on(rank: Rank) -> None:
    """Only rank 0 errs, and only in one message of each batch: the others arrive."""
    rank.init()
    peer = 1 - rank.rank
    fine, bad = torch.full((4,), rank.rank + 5.0), torch.ones(1).expand(4)
    for wrong, fact in (
        (lambda: dist.P2POp(dist.isend, fine, peer, tag=-1), "tag is -1"),
        (lambda: dist.P2POp(dist.irecv, bad, peer, tag=1), "rota.recv"),
    ):
        output = torch.zeros(4)
        ops = [wrong()] if rank.rank == 0 else []
        ops += [dist.P2POp(dist.isend, fine, peer), dist.P2POp(dist.irecv, output, peer)]
        error = error_of(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)])  # noqa: B023
        dist.barrier()
        if rank.rank == 0:
            check_error(error, "ValueError", fact)
        else:
            check_error(error, "nothing")
            assert output.eq(5).all()
        check_alive(rank)


class Stop(Exception):
    """The user's own."""


@on_ranks(2)
def test_block_that_an_exception_leaves_is_at_its_end(rank: Rank) -> None:
    rank.init()
    errors: list[tuple[str, str]] = []
    after: list[int] = []

    def block(call: Callable[[], object]) -> None:
        with _coalescing_manager(device=CPU, async_ops=True) as manager:
            dist.broadcast(torch.ones(3), 0)
            call()
            after.append(1)
        manager.wait()

    def stop() -> None:
        raise Stop

    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast(torch.ones(1).expand(3), 0),  # refused by rota, on both ranks
        lambda: dist.all_gather([torch.zeros(1)], torch.zeros(1)),
        lambda: dist.reduce(torch.ones(2), 0, op=dist.ReduceOp.BAND),
        stop,
        lambda: dist.broadcast("not a tensor", 0),  # by torch
        lambda: (
            dist.all_reduce(torch.ones(2), async_op=True) and stop()
        ),  # once torch has listed it
    ]
    for call in calls:
        errors.append(error_of(block, call))
        assert len(after) == min(len(errors), 3), "rota's own errors come at the end"
        check_alive(rank)
    kinds = [kind for kind, _ in errors]
    assert kinds[:3] == ["ValueError", "ValueError", "TypeError"], errors
    assert kinds[3] == "Stop" and "nothing" not in kinds[4:], errors


@on_ranks(2)
def test_other_threads_calls_are_no_part_of_a_block(rank: Rank) -> None:
    rank.init()
    backend = dist.group.WORLD._get_backend(CPU)
    ones, inputs = torch.ones(3), torch.zeros(3)

    def call_beside() -> None:
        for _ in range(2):
            backend.broadcast([ones], dist.BroadcastOptions()).wait()
        error = error_of(lambda: backend.broadcast([ones.expand(2, 3)], dist.BroadcastOptions()))
        check_error(error, "ValueError", "rota.broadcast")
        check_error(error_of(backend._end_coalescing), "RuntimeError", "without startCoalescing")
        backend._start_coalescing()
        backend.allreduce([ones], dist.AllreduceOptions())
        backend._end_coalescing().wait()

    for _ in range(2):
        backend._start_coalescing()
        backend.broadcast([inputs], dist.BroadcastOptions())
        with ThreadPoolExecutor(1) as beside:
            beside.submit(call_beside).result()
        backend._end_coalescing().wait()
    assert ones.tolist() == [4.0] * 3


@on_ranks(2)
def test_batch_whose_messages_share_memory_is_refused_before_any_starts(rank: Rank) -> None:
    rank.init()
    peer = 1 - rank.rank
    x = torch.arange(8.0) + 8 * rank.rank

    def run(*messages: tuple[Callable[..., object], torch.Tensor, int]) -> None:
        ops = [dist.P2POp(op, tensor, to) for op, tensor, to in messages]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for batch in (
        ((dist.isend, x, peer), (dist.irecv, x, peer)),
        ((dist.irecv, x[:4], peer), (dist.irecv, x[3:7], peer)),
        ((dist.isend, x[:4], rank.rank), (dist.irecv, x[2:6], rank.rank)),
    ):
        check_error(error_of(run, *batch), "ValueError", "share memory; give each its own")
        check_alive(rank)
    assert x.equal(torch.arange(8.0) + 8 * rank.rank)
    run((dist.isend, x[::2], peer), (dist.irecv, x[1::2], peer))
    assert x[1::2].equal(torch.arange(0.0, 8.0, 2) + 8 * peer)
    run((dist.isend, x[:4], peer), (dist.isend, x[:4], peer))
    for _ in range(2):
        dist.recv(torch.zeros(4), peer)
    run((dist.isend, x[:4], rank.rank), (dist.irecv, x[4:], rank.rank))
    assert x[:4].equal(x[4:])
