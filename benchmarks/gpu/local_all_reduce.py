"""All-reduce between ranks of one process that share a GPU, against the bound of its memory.

    PYTHONPATH=python:benchmarks python3 -m gpu.local_all_reduce --sizes 64K,64M

A size is that of each rank's float32 tensor, S. N ranks' tensors are read once and written once, so
no all-reduce takes less than 2·N·S over the copy rate: "of copy" is how near an entry comes. The
last line of the output is JSON.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import count

import torch

import tiles
from arguments import FLOAT32_BYTES
from gpu import frame
from gpu.frame import Bench, Job
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
GROUP_SIZE = 2  # of hierarchical
# Of one rank's tensor: longer messages are not what it is for.
MAX_LOW_LATENCY_BYTES = 1 << 20


def benchmark(bench: Bench) -> None:
    """Every number of ranks, every size, every algorithm."""
    for num_ranks in RANKS:
        for num_bytes in bench.sizes:
            measure(bench, num_ranks, num_bytes)


def measure(bench: Bench, num_ranks: int, num_bytes: int) -> None:
    """All algorithms at one size."""
    num_elems = num_bytes // FLOAT32_BYTES
    moved_bytes = 2 * num_ranks * num_bytes
    sets = [
        [bench.random(num_elems, seed * num_ranks + rank) for rank in range(num_ranks)]
        for seed in range(bench.num_sets(num_ranks * num_bytes))
    ]
    jobs = bench.attempt("copy", lambda: bench.copy_job(moved_bytes))
    for algorithm in ALGORITHMS:
        if algorithm == "low_latency" and num_bytes > MAX_LOW_LATENCY_BYTES:
            continue
        if algorithm == "hierarchical" and num_ranks <= GROUP_SIZE:
            continue
        make = partial(make_job, bench, algorithm, sets, moved_bytes)
        jobs += bench.attempt(f"{algorithm}, {num_ranks} ranks", make)
    bench.measure(jobs, "all_reduce", num_bytes, ranks=num_ranks)


def make_job(bench: Bench, algorithm: str, sets: list[list[torch.Tensor]], moved_bytes: int) -> Job:
    """One algorithm. What is timed is an average, which stays random and finite however often it is
    taken again. The group is the job's own: one that has timed out is of no use to other jobs.
    """
    num_ranks = len(sets[0])
    group = bench.target.local_group(num_ranks)
    group_size = GROUP_SIZE if algorithm == "hierarchical" else None
    all_reduce = partial(group.all_reduce, algorithm=algorithm, group_size=group_size)
    seeds = count()
    contribution = torch.empty(sets[0][0].numel(), device=bench.check_device)

    def check() -> int:
        seed = next(seeds)
        for rank, tensor in enumerate(sets[0]):
            tiles.fill_with_input(contribution, rank, num_ranks, seed)
            tensor.copy_(contribution)
        all_reduce(sets[0], "sum")
        bench.target.synchronize()
        num_wrong = 0
        for rank, tensor in enumerate(sets[0]):
            result = tensor.to(bench.check_device)
            num_wrong += tiles.count_wrong(result, "all_reduce", num_ranks, seed)
            bench.fill(tensor, rank)
        return num_wrong

    entry = Entry(f"rota {algorithm}", "rota", "LocalGroup.all_reduce", algorithm)
    calls = [partial(all_reduce, tensors, "avg") for tensors in sets]
    return Job(entry, calls, moved_bytes, check, may_be_refused=True)


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "1K,8K,64K,1M,16M,64M,256M", "1K,64K")
    return frame.main("local_all_reduce", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
