"""What torch shows of collectives: ranges in a profiler, TORCH_DISTRIBUTED_DEBUG, durations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ranks import Rank, error_of, on_ranks


@on_ranks(2)
def test_profiler_shows_each_call_of_a_communicator_once(rank: Rank) -> None:
    communicator = rank.communicator()
    tensor, both = torch.ones(10), torch.ones(20)
    stats = torch.zeros(2, dtype=torch.float64)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        communicator.all_reduce(tensor)
        communicator.all_reduce(tensor, async_op=True).wait()
        communicator.reduce_bucket(tensor, stats, wire_dtype=torch.float32, block_scaling=False)
        communicator.broadcast(tensor)
        communicator.all_gather(both, tensor)
        communicator.barrier()
    names = Counter(event.name for event in profiled.events())
    shown = {name: count for name, count in names.items() if name.startswith("rota:")}
    assert shown == {
        "rota:all_reduce": 2,
        "rota:reduce_bucket": 1,
        "rota:broadcast": 1,
        "rota:all_gather": 1,
        "rota:barrier": 1,
    }


NUM_ELEMS = 6
Call = Callable[[Rank, bool], dist.Work | None]


def _send_or_recv(rank: Rank, is_async: bool) -> dist.Work | None:
    tensor = torch.ones(NUM_ELEMS)
    if is_async:
        return dist.isend(tensor, 1) if rank.rank == 0 else dist.irecv(tensor, 0)
    if rank.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return None


def _row(num_tensors: int = 2) -> list[torch.Tensor]:
    return [torch.ones(NUM_ELEMS) for _ in range(num_tensors)]


def _of_root(rank: Rank) -> list[torch.Tensor] | None:
    return _row() if rank.rank == 0 else None


# Each operation of torch.distributed: its name in a profiler, the lengths of the tensors that it
# writes on rank 0, and the call.
ONE, BOTH, WHOLE = [NUM_ELEMS], [NUM_ELEMS] * 2, [2 * NUM_ELEMS]
OPERATIONS: list[tuple[str, list[int], Call]] = [
    ("all_reduce", ONE, lambda rank, a: dist.all_reduce(*_row(1), async_op=a)),
    ("reduce", ONE, lambda rank, a: dist.reduce(*_row(1), 0, async_op=a)),
    ("broadcast", ONE, lambda rank, a: dist.broadcast(*_row(1), 0, async_op=a)),
    ("all_gather", BOTH, lambda rank, a: dist.all_gather(_row(), *_row(1), async_op=a)),
    (
        "all_gather",
        WHOLE,
        lambda rank, a: dist.all_gather_into_tensor(torch.ones(*WHOLE), *_row(1), async_op=a),
    ),
    ("reduce_scatter", ONE, lambda rank, a: dist.reduce_scatter(*_row(1), _row(), async_op=a)),
    (
        "reduce_scatter",
        ONE,
        lambda rank, a: dist.reduce_scatter_tensor(*_row(1), torch.ones(*WHOLE), async_op=a),
    ),
    ("gather", BOTH, lambda rank, a: dist.gather(*_row(1), _of_root(rank), async_op=a)),
    ("scatter", ONE, lambda rank, a: dist.scatter(*_row(1), _of_root(rank), async_op=a)),
    ("all_to_all", BOTH, lambda rank, a: dist.all_to_all(_row(), _row(), async_op=a)),
    (
        "all_to_all",
        WHOLE,
        lambda rank, a: dist.all_to_all_single(torch.ones(*WHOLE), torch.ones(*WHOLE), async_op=a),
    ),
    ("barrier", [], lambda rank, a: dist.barrier(async_op=a)),
    ("send", ONE, _send_or_recv),
]


def _call_each(rank: Rank, is_async: bool) -> None:
    for _, _, call in OPERATIONS:
        work = call(rank, is_async)
        if work is not None:
            work.wait()


@on_ranks(2)
def test_profiler_shows_every_operation_with_its_sizes(rank: Rank) -> None:
    rank.init()
    expected = [(f"rota:{name}", lengths) for name, lengths, _ in OPERATIONS]
    for is_async in (False, True):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            _call_each(rank, is_async)
        shown = [event for event in profiled.events() if event.name.startswith("rota:")]
        shown.sort(key=lambda event: event.time_range.start)
        lengths = [[n for shape in event.input_shapes for n in shape] for event in shown]
        found = [(event.name, own) for event, own in zip(shown, lengths, strict=True)]
        assert rank.rank != 0 or found == expected


@on_ranks(2)
def test_debug_level_detail_wraps_every_operation(rank: Rank) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    rank.init()
    _call_each(rank, is_async=False)
    _call_each(rank, is_async=True)
    dist.all_reduce_coalesced(_row())
    objects = [None, None]
    dist.all_gather_object(objects, rank.rank)
    assert objects == [0, 1]
    # The wrapper compares the calls before rota sees them.
    error = error_of(dist.all_reduce, torch.ones(3 + rank.rank))[1]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "_ProcessGroupWrapper"
    dist.destroy_process_group()
    assert "mismatch between collectives" in error


@on_ranks(2)
def test_work_duration_is_in_milliseconds_and_includes_waiting(rank: Rank) -> None:
    rank.init()
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    group._enable_collectives_timing()
    dist.barrier()
    begin = time.monotonic()
    if rank.rank == 1:
        time.sleep(0.3)
    works = [
        dist.all_reduce(torch.ones(5), async_op=True),
        dist.irecv(torch.ones(5), 1 - rank.rank),
        dist.isend(torch.ones(5), 1 - rank.rank),
    ]
    if rank.rank == 0:
        assert "not done" in error_of(works[0]._get_duration)[1]
    for work in works:
        work.wait()
    blocking = dist.AllreduceOptions()
    blocking.asyncOp = False
    works.append(backend.allreduce([torch.ones(5)], blocking))
    backend._start_coalescing()
    dist.all_reduce(torch.ones(5), async_op=True)
    works.append(backend._end_coalescing())
    works[-1].wait()
    elapsed_ms = 1000 * (time.monotonic() - begin)
    durations = [work._get_duration() for work in works]
    assert all(0 < duration <= elapsed_ms for duration in durations)
    assert (durations[0] > 250) == (rank.rank == 0)  # which waits for rank 1, which sleeps
