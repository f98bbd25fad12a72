"""Channels, slots and packets of the all-reduces whose ranks wait for each other, on one GPU.

For 2, 4 and 8 local ranks: two_shot and ring with slots of several lengths and several numbers of
channels, and the message sizes at which low_latency's packets, one_shot and two_shot are each the
fastest. The numbers of csrc/schedule/tuning.h that no row of it has measured; ranks of one GPU show
what a multiprocessor can do, and not what a link can.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from itertools import islice, product

import torch

from gpu import bench
from gpu.bench import Bench
from gpu.local_ranks import make_job, make_sets
from gpu.timing import Job
from rota import _C
from rota.gpu import LocalGroup

RANKS = (2, 4, 8)
SLOT_BYTES = (32 << 10, 64 << 10, 128 << 10, 256 << 10)
CHANNEL_SHARES = (1, 2, 4)  # divisors of the number of resident channels
CROSSOVER_BYTES = tuple(1 << shift for shift in range(10, 22, 2))
CROSSOVER_ALGORITHMS = ("low_latency", "one_shot", "two_shot")
TIMEOUT = timedelta(seconds=5)


def benchmark(bench: Bench) -> None:
    for num_ranks in RANKS[:1] if bench.is_small else RANKS:
        for algorithm in ("two_shot", "ring"):
            slots_and_channels(bench, num_ranks, algorithm)
        crossovers(bench, num_ranks)


def slots_and_channels(bench: Bench, num_ranks: int, algorithm: str) -> None:
    """All-reduces with slots of every length in every number of channels."""
    (num_bytes,) = bench.sizes
    sets = make_sets(bench, num_ranks, num_bytes)
    moved_bytes = 2 * num_ranks * num_bytes
    jobs = bench.attempt("copy", partial(bench.copy_job, moved_bytes))
    gpu = torch.cuda.get_device_name(bench.device)
    most = LocalGroup(num_ranks, bench.device).num_channels

    def make(slot_bytes: int, num_channels: int, label: str) -> Job:
        tuning = _C.gpu_tuning(gpu, "local", num_ranks)
        tuning.slot_bytes, tuning.num_channels = slot_bytes, num_channels
        group = LocalGroup(num_ranks, bench.device, timeout=TIMEOUT, tuning=tuning)
        return make_job(bench, algorithm, sets, moved_bytes, group, label)

    choices = product(SLOT_BYTES, CHANNEL_SHARES)
    for slot_bytes, share in islice(choices, 2 if bench.is_small else None):
        num_channels = max(1, most // share)
        label = f"slots of {slot_bytes >> 10} KiB in {num_channels} channels"
        jobs += bench.attempt(label, partial(make, slot_bytes, num_channels, label))
    bench.measure(jobs, f"sweep of {algorithm}", num_bytes, ranks=num_ranks)


def crossovers(bench: Bench, num_ranks: int) -> None:
    for num_bytes in CROSSOVER_BYTES[:2] if bench.is_small else CROSSOVER_BYTES:
        sets = make_sets(bench, num_ranks, num_bytes, num_sets=1)
        jobs = []
        for algorithm in CROSSOVER_ALGORITHMS:
            jobs += bench.attempt(algorithm, partial(make_job, bench, algorithm, sets))
        bench.measure(jobs, "crossover", num_bytes, ranks=num_ranks)


if __name__ == "__main__":
    bench.main("sweep", __doc__, benchmark, "64M", "64K", bench.LOCAL_RANKS)
