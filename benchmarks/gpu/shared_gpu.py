"""Two processes that share one GPU: rota's all-reduce between them, and their time slices.

    PYTHONPATH=python:benchmarks python3 -m gpu.shared_gpu --sizes 8K,1M,64M

The GPU switches between processes in time slices, and a rank that waits for another waits for that
rank's slice, so the all-reduce's times show that it works but not how fast it is. A slice is
measured as the time for which one busy process keeps another busy process off the GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rota
import tiles
from arguments import FLOAT32_BYTES
from gpu import bench
from gpu.bench import Bench

RANKS = 2
LIMIT_S = 30.0
SLICE_CALLS = 2000  # queued by each process for each sample


def work(rank: int, folder: str, sizes: Sequence[int], num_samples: int) -> None:
    """One rank; rank 0 writes the rows to the folder."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    communicator = rota.Communicator()
    communicator.connect_device(torch.device("cuda", 0))
    rows = [all_reduces(communicator, num_bytes, num_samples) for num_bytes in sizes]
    rows.append(time_slices(num_samples * SLICE_CALLS))
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()  # a peer may still read this rank's memory
    # Skips finalizers: a library's leftover threads must not delay the other rank.
    os._exit(0)


def all_reduces(
    communicator: rota.Communicator, num_bytes: int, num_samples: int
) -> dict[str, Any]:
    """Measures one size and returns its row."""
    source = torch.empty(num_bytes // FLOAT32_BYTES)
    tiles.fill_with_input(source, dist.get_rank(), RANKS, seed=num_bytes)
    tensor = source.cuda()
    communicator.all_reduce(tensor)
    num_wrong = tiles.count_wrong(tensor.cpu(), "all_reduce", RANKS, seed=num_bytes)
    times_us = []
    for _ in range(num_samples):
        tensor.copy_(source)
        dist.barrier()
        start_ns = perf_counter_ns()
        communicator.all_reduce(tensor)
        torch.cuda.synchronize()
        times_us.append((perf_counter_ns() - start_ns) / 1e3)
    label = f"rota.Communicator, {communicator.peer_access}"
    row = {"label": label, "op": "all_reduce between processes", "num_bytes": num_bytes}
    return of_both(row, num_wrong, times_us)


def time_slices(num_calls: int) -> dict[str, Any]:
    """Both ranks queue short kernels between events; long gaps are the other rank's slices."""
    source, copied = torch.randn(1 << 16, device="cuda"), torch.empty(1 << 16, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls)]
    dist.barrier()
    for event in events:
        torch.add(source, 0, out=copied)
        event.record()
    torch.cuda.synchronize()
    gaps_us = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    slices_us = [gap for gap in gaps_us if gap > max(100.0, 20 * float(np.median(gaps_us)))]
    row = {"label": "kept off the GPU by the other", "op": "time slices of two processes"}
    return of_both(row, 0, slices_us or gaps_us)


def of_both(row: dict[str, Any], num_wrong: int, times_us: Sequence[float]) -> dict[str, Any]:
    """The row with the slower rank's time of each sample."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (num_wrong, times_us))
    times = [max(both) for both in zip(*(times for _, times in found), strict=False)]
    p50_us, p99_us = np.percentile(times, [50, 99], method="inverted_cdf").round(1).tolist()
    row |= {"p50_us": p50_us, "min_us": min(times), "p99_us": p99_us, "timed": "time slices"}
    return row | {"ranks": RANKS, "num_wrong": sum(wrong for wrong, _ in found)}


def benchmark(bench: Bench) -> None:
    """Raises a rank's exception, or TimeoutError; leaves no rank behind."""
    with tempfile.TemporaryDirectory(prefix="rota-gpu-") as folder:
        args = (folder, bench.sizes, 1 if bench.is_small else 10)
        context = mp.spawn(work, args, nprocs=RANKS, join=False)
        deadline = time.monotonic() + LIMIT_S * (3 if bench.is_small else 1)
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError("two processes were not done in time")
        for row in json.loads(Path(folder, "rows").read_text()):
            bench.keep(row)


if __name__ == "__main__":
    bench.main("shared_gpu", __doc__, benchmark, "8K,1M,64M", "1K,64K")
