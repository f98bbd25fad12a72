"""All-reduce between ranks of one process on one GPU, as jobs to measure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

from torch import Tensor

import tiles
from arguments import FLOAT32_BYTES
from gpu.bench import Bench
from gpu.timing import Job
from protocol import Entry
from rota.gpu import LocalGroup

# Every other algorithm has ranks that wait for each other's flags.
WAITS_FOR_NOBODY = "two_shot_in_place"
GROUP_SIZE = 2  # for hierarchical


def tiny_copy(bench: Bench) -> Job:
    """A copy of 16 bytes, the smallest work that a graph can start."""
    source, copied = bench.random(4, 0), bench.random(4, 1)
    return Job(Entry("copy of 16 bytes", "torch", "copy_"), [partial(copied.copy_, source)])


def make_sets(
    bench: Bench, num_ranks: int, num_bytes: int, num_sets: int = 0
) -> list[list[Tensor]]:
    """Sets of the ranks' tensors: `num_sets`, or as many as exceed the cache."""
    num_elems = max(1, num_bytes // FLOAT32_BYTES)
    return [
        [bench.random(num_elems, seed * num_ranks + rank) for rank in range(num_ranks)]
        for seed in range(num_sets or bench.num_sets(num_ranks * num_bytes))
    ]


def make_job(
    bench: Bench,
    algorithm: str,
    sets: Sequence[list[Tensor]],
    moved_bytes: int = 0,
    group: LocalGroup | None = None,
    label: str | None = None,
) -> Job:
    """Times averages by one algorithm; their data stay random and finite however often they repeat.
    By default each job has its own group, since a group that timed out is useless to other jobs.
    """
    num_ranks = len(sets[0])
    group = group or LocalGroup(num_ranks, bench.device)
    group_size = GROUP_SIZE if algorithm == "hierarchical" else None
    all_reduce = partial(group.all_reduce, algorithm=algorithm, group_size=group_size)
    seeds = count()

    def check() -> int:
        seed = next(seeds)
        for rank, tensor in enumerate(sets[0]):
            tiles.fill_with_input(tensor, rank, num_ranks, seed)
        all_reduce(sets[0], "sum")
        num_wrong = sum(tiles.count_wrong(t, "all_reduce", num_ranks, seed) for t in sets[0])
        for tensor in sets[0]:
            tensor.normal_()
        return num_wrong

    entry = Entry(label or f"rota {algorithm}", "rota", "LocalGroup.all_reduce", algorithm)
    calls = [partial(all_reduce, tensors, "avg") for tensors in sets]
    return Job(entry, calls, moved_bytes, check, may_be_refused=True)
