"""Measures the row of csrc/schedule/tuning.h for this GPU's local ranks, as text to paste.

    PYTHONPATH=python:benchmarks COMMIT=name python3 -m gpu.sweep

For each number of ranks it measures free_chunk_bytes by free_threads of two_shot_in_place and
slot_bytes by num_channels of two_shot, both on tensors of 64 MiB, and the sizes up to which
low_latency and one_shot are the fastest. Links between GPUs are not measured here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import date, timedelta
from functools import partial
from itertools import islice, product
from typing import Any, Final

import torch

import rota
from gpu import bench
from gpu.bench import Bench
from gpu.local_all_reduce import RANKS, make_job, make_sets
from rota import _C

TOPOLOGY: Final = "local"
FREE_CHUNK_BYTES = (8 << 10, 16 << 10, 32 << 10, 64 << 10)
FREE_THREADS = (64, 128, 256, 512)
SLOT_BYTES = (32 << 10, 64 << 10, 128 << 10, 256 << 10)
CHANNEL_SHARES = (1, 2, 4)  # divisors of the number of resident channels
CROSSOVER_BYTES = tuple(1 << shift for shift in range(10, 23))
NOISE = 1.02
FIELDS = (
    "max_low_latency_bytes",
    "max_one_shot_bytes",
    "num_channels",
    "slot_bytes",
    "free_chunk_bytes",
    "free_threads",
)
CROSSOVER_ALGORITHMS = ("low_latency", "one_shot", "two_shot_in_place")


def benchmark(bench: Bench) -> None:
    """Makes one row of the table for each number of ranks."""
    gpu = torch.cuda.get_device_name(bench.device)
    for num_ranks in RANKS:
        tuning = _C.gpu_tuning(gpu, TOPOLOGY, num_ranks)
        free = product(FREE_CHUNK_BYTES, FREE_THREADS)
        fields = [{"free_chunk_bytes": chunk, "free_threads": num} for chunk, num in free]
        best = fastest(bench, num_ranks, "two_shot_in_place", fields)
        most = rota.LocalGroup(num_ranks, bench.device).num_channels
        slots = product(SLOT_BYTES, (max(1, most // share) for share in CHANNEL_SHARES))
        fields = [{"slot_bytes": slot, "num_channels": num} for slot, num in slots]
        best |= fastest(bench, num_ranks, "two_shot", fields)
        best |= crossovers(bench, num_ranks)
        for field, value in best.items():
            setattr(tuning, field, value)
        bench.keep({"op": "tuning", "ranks": num_ranks, "text": cpp_row(tuning, gpu, num_ranks)})


def fastest(
    bench: Bench, num_ranks: int, algorithm: str, choices: Iterable[dict[str, int]]
) -> dict[str, int]:
    """Measures an all-reduce with each choice; returns the fastest correct one, {} if none is."""
    gpu = torch.cuda.get_device_name(bench.device)
    (num_bytes,) = bench.sizes
    sets = make_sets(bench, num_ranks, num_bytes)
    moved_bytes = 2 * num_ranks * num_bytes
    jobs = bench.attempt("copy", partial(bench.copy_job, moved_bytes))
    by_label = {}
    for choice in islice(choices, 2 if bench.is_small else None):
        label = ", ".join(f"{name} {value}" for name, value in choice.items())
        by_label[label] = choice

        def make(label: str = label, choice: dict[str, int] = choice) -> Any:
            tuning = _C.gpu_tuning(gpu, TOPOLOGY, num_ranks)
            for name, value in choice.items():
                setattr(tuning, name, value)
            timeout = timedelta(seconds=5)
            group = rota.LocalGroup(num_ranks, bench.device, timeout=timeout, tuning=tuning)
            return make_job(bench, algorithm, sets, moved_bytes, group, label)

        jobs += bench.attempt(label, make, may_be_refused=True)
    begin = len(bench.rows)
    bench.measure(jobs, f"sweep of {algorithm}", num_bytes, ranks=num_ranks)
    right = [row for row in bench.rows[begin:] if row["label"] in by_label and not row["num_wrong"]]
    return by_label[min(right, key=lambda row: row["p50_us"])["label"]] if right else {}


def crossovers(bench: Bench, num_ranks: int) -> dict[str, int]:
    """The largest sizes up to which low_latency, and then one_shot, are the fastest."""
    begin = len(bench.rows)
    for num_bytes in CROSSOVER_BYTES[:2] if bench.is_small else CROSSOVER_BYTES:
        sets = make_sets(bench, num_ranks, num_bytes, num_sets=1)
        jobs = []
        for algorithm in CROSSOVER_ALGORITHMS:
            make = partial(make_job, bench, algorithm, sets)
            jobs += bench.attempt(algorithm, make)
        bench.measure(jobs, "crossover", num_bytes, ranks=num_ranks)
    times_us: dict[int, dict[str, float]] = {}
    for row in bench.rows[begin:]:
        if row["label"] == f"rota {row['algorithm']}" and not row["num_wrong"]:
            times_us.setdefault(row["num_bytes"], {})[row["algorithm"]] = row["p50_us"]
    low, one, two = CROSSOVER_ALGORITHMS
    return {
        "max_low_latency_bytes": last_win(times_us, low, (one, two)),
        "max_one_shot_bytes": num_ranks * last_win(times_us, one, (two,)),  # of all ranks together
    }


def last_win(times_us: dict[int, dict[str, float]], who: str, rivals: Iterable[str]) -> int:
    """The largest size up to which `who` is as fast as all rivals, within noise; 0 if none is."""
    last = 0
    for num_bytes, times in sorted(times_us.items()):
        at_most = NOISE * min(
            (times[rival] for rival in rivals if rival in times), default=math.inf
        )
        if times.get(who, math.inf) > at_most:
            break
        last = num_bytes
    return last


def cpp_row(tuning: _C.GpuTuning, gpu: str, num_ranks: int) -> str:
    """A TuningRow of csrc/schedule/tuning.h as C++ text, with its provenance."""
    commit = os.environ.get("COMMIT", "unknown commit")
    fields = [f".{name} = {getattr(tuning, name)}" for name in FIELDS]
    fields.append(f'.provenance = "{gpu}, {date.today()}, {commit}, make gpu STAGES=sweep"')
    return f'{{"{gpu}", Topology::kLocal, {num_ranks}, {{{", ".join(fields)}}}}},'


if __name__ == "__main__":
    bench.main("sweep", __doc__, benchmark, "64M", "64K")
