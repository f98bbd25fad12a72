"""In a profiler, each collective is a range with the collective's name."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ranks import Rank, run_ranks


def _run_profiled(rank: Rank) -> Counter[str]:
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
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.barrier()
    return Counter(event.name for event in profiled.events())


def test_profiler_shows_each_collective_once() -> None:
    for names in run_ranks(2, _run_profiled):
        shown = {name: count for name, count in names.items() if name.startswith("rota:")}
        assert shown == {
            "rota:all_reduce": 4,
            "rota:reduce_bucket": 1,
            "rota:broadcast": 1,
            "rota:all_gather": 1,
            "rota:barrier": 2,
        }
