"""All-reduce between ranks of one process on one GPU: latency, and closeness to memory bandwidth.

    PYTHONPATH=python:benchmarks python3 -m gpu.local_all_reduce --sizes 64K,64M

Latency: a graph runs many all-reduces on the same tensors, each after the one before it; a time is
that of a replay divided by their number. "copy of 16 bytes" is the smallest work that a graph can
start. Bandwidth: a size is that of each rank's float32 tensor, S. N ranks' tensors must be read
once and written once, so an all-reduce takes at least 2·N·S over the copy rate; "of copy" is the
fraction of that limit that an entry reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count, product

from torch import Tensor

import rota
import tiles
from arguments import FLOAT32_BYTES
from gpu import bench
from gpu.bench import Bench
from gpu.timing import Job
from protocol import Entry

RANKS = (2, 4)
ALGORITHMS = (
    "auto",
    "low_latency",
    "one_shot",
    "two_shot",
    "two_shot_in_place",
    "ordered_ring",
    "ring",
    "hierarchical",
)
GROUP_SIZE = 2  # for hierarchical
LATENCY = "all_reduce, one after another"
SMALL_ALGORITHMS = ("auto", "low_latency", "one_shot", "two_shot_in_place")
SMALL_BYTES = (8, 1 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10)


def benchmark(bench: Bench) -> None:
    """Measures every number of ranks, size and algorithm."""
    for num_ranks, num_bytes in product(RANKS, SMALL_BYTES[:: 5 if bench.is_small else 1]):
        sets = make_sets(bench, num_ranks, num_bytes, num_sets=1)
        jobs = [tiny_copy(bench)]
        for algorithm in SMALL_ALGORITHMS:
            jobs += bench.attempt(algorithm, partial(make_job, bench, algorithm, sets))
        bench.measure(jobs, LATENCY, num_bytes, ranks=num_ranks)
    for num_ranks, num_bytes in product(RANKS, bench.sizes):
        sets = make_sets(bench, num_ranks, num_bytes)
        moved_bytes = 2 * num_ranks * num_bytes
        jobs = bench.attempt("copy", partial(bench.copy_job, moved_bytes))
        for algorithm in ALGORITHMS[: -1 if num_ranks <= GROUP_SIZE else None]:
            make = partial(make_job, bench, algorithm, sets, moved_bytes)
            jobs += bench.attempt(f"{algorithm}, {num_ranks} ranks", make)
        bench.measure(jobs, "all_reduce", num_bytes, ranks=num_ranks)


def tiny_copy(bench: Bench) -> Job:
    """A copy of 16 bytes."""
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
    group: rota.LocalGroup | None = None,
    label: str | None = None,
) -> Job:
    """Times averages by one algorithm; their data stay random and finite however often they repeat.
    By default each job has its own group, since a group that timed out is useless to other jobs.
    """
    num_ranks = len(sets[0])
    group = group or rota.LocalGroup(num_ranks, bench.device)
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


if __name__ == "__main__":
    bench.main("local_all_reduce", __doc__, benchmark, "64K,1M,16M,64M,256M", "64K")
