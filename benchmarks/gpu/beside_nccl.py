"""Every collective of rota beside NCCL's, by as many processes as there are GPUs.

Both go through torch.distributed on the current stream, take turns, and are checked at each size.
A sample is of many calls in a row, so that the host runs ahead; a time is that of one call on the
slowest rank. busbw is as nccl-tests defines it, and sizes are those of operations.py. On one GPU
there is nothing to run: NCCL takes one rank per GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rota
import tiles
from arguments import FLOAT32_BYTES
from gpu import bench
from gpu.bench import Bench
from gpu.timing import Body, sample_us
from operations import MESSAGES, OPERATIONS
from torch_worker import dist_call

MAX_RANKS = 8
NUM_TURNS, SAMPLES_PER_TURN = 3, 5
MIN_SAMPLE_US, MAX_CALLS = 3000.0, 200
LIMIT_S = 170.0

Row = dict[str, Any]


class Worker:
    """One rank: both groups, and what has been measured."""

    def __init__(self, sizes: Sequence[int], is_small: bool) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._sizes, self._is_small = sizes, is_small
        # A simulated GPU has no NCCL.
        backends = ("rota",) if is_small else ("rota", "nccl")
        self._groups = {name: dist.new_group(backend=name) for name in backends}
        self.rows: list[Row] = []

    def measure_all(self, path: Path) -> None:
        """Writes all rows anew after each operation, so that a run that is killed keeps them."""
        for op in OPERATIONS:
            if op == "barrier":
                continue
            for num_bytes in self._sizes:
                self.measure(op, num_bytes)
            if self.rank == 0:
                path.with_suffix(".new").write_text(json.dumps(self.rows))
                path.with_suffix(".new").rename(path)

    def measure(self, op: str, num_bytes: int) -> None:
        parts = OPERATIONS[op].num_parts(self.num_ranks)
        num_elems = max(1, num_bytes // FLOAT32_BYTES // parts) * parts
        calls, wrong = {}, {}
        for name, group in self._groups.items():
            calls[name], wrong[name] = self._checked_call(op, num_elems, group)
        batches = {name: self._batch(call) for name, call in calls.items()}
        times_us: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(1 if self._is_small else NUM_TURNS):
            for name in [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]:
                dist.barrier()
                times_us[name] += self._sample(calls[name], batches[name])
        for name in calls:
            slowest = [max(of_ranks) for of_ranks in zip(*gathered(times_us[name]), strict=True)]
            row = {"label": name, "backend": name, "op": op, "num_elems": num_elems}
            row |= {"num_bytes": num_elems * FLOAT32_BYTES, "num_wrong": sum(gathered(wrong[name]))}
            row |= {"ranks": self.num_ranks, "timed": f"stream, {batches[name]} calls"}
            self.rows.append({**row, "times_us": slowest})

    def _checked_call(self, op: str, num_elems: int, group: dist.ProcessGroup) -> tuple[Body, int]:
        """The call on zeros, and the number of wrong elements of a first one on known data."""
        operation = OPERATIONS[op]
        if op in MESSAGES and self.rank > 1:
            return (lambda: None), 0
        output = torch.zeros(operation.output_elems(num_elems, self.num_ranks), device="cuda")
        source = output
        if not operation.in_place:
            source = torch.zeros(operation.input_elems(num_elems, self.num_ranks), device="cuda")
        call = dist_call(op, output, source, group)
        num_parts = self.num_ranks if operation.input_parts else 1
        num_messages = 2 if op in MESSAGES else self.num_ranks
        tiles.fill_with_input(source, self.rank, num_messages, seed=num_elems, num_parts=num_parts)
        call()
        num_wrong = 0
        if self.rank == 0 or not operation.at_root:
            num_wrong = tiles.count_wrong(output, op, num_messages, seed=num_elems)
        source.zero_()
        output.zero_()
        return call, num_wrong

    def _batch(self, call: Body) -> int:
        """Calls in a sample, the same on all ranks."""
        trial_us = max(gathered(min(sample_us(call, 2 if self._is_small else 5))))
        return 1 if self._is_small else max(1, min(MAX_CALLS, round(MIN_SAMPLE_US / trial_us)))

    def _sample(self, call: Body, batch: int) -> list[float]:
        def in_a_row() -> None:
            for _ in range(batch):
                call()

        num_samples = 1 if self._is_small else SAMPLES_PER_TURN
        return [us / batch for us in sample_us(in_a_row, num_samples)]


def gathered(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def work(rank: int, folder: str, num_ranks: int, sizes: Sequence[int], is_small: bool) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    communicator = rota.Communicator()
    communicator.connect_device(torch.device("cuda", rank))
    if rank == 0:
        Path(folder, "peer_access").write_text(str(communicator.peer_access))
    Worker(sizes, is_small).measure_all(Path(folder, "rows"))
    dist.barrier()  # a peer may still read this rank's memory
    # Skips finalizers: a library's leftover threads must not delay the other ranks.
    os._exit(0)


def benchmark(bench: Bench) -> None:
    """Raises a rank's exception, or TimeoutError; leaves no rank behind, and keeps all rows."""
    num_ranks = min(MAX_RANKS, torch.cuda.device_count())
    if num_ranks < 2:
        raise ValueError("there is one GPU, and NCCL takes one rank per GPU")
    bench.mode = f"{num_ranks} processes, a GPU each"
    with tempfile.TemporaryDirectory(prefix="rota-gpu-") as folder:
        args = (folder, num_ranks, bench.sizes, bench.is_small)
        context = mp.spawn(work, args, nprocs=num_ranks, join=False)
        deadline = time.monotonic() + LIMIT_S * (3 if bench.is_small else 1)
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{num_ranks} processes were not done in time")
        finally:
            for process in context.processes:
                process.kill()
            keep_rows(bench, Path(folder))


def keep_rows(bench: Bench, folder: Path) -> None:
    if (path := folder / "peer_access").exists():
        bench.note(f"rota's ranks reach each other's memory by {path.read_text()}")
    rows = json.loads((folder / "rows").read_text()) if (folder / "rows").exists() else []
    for row in rows:
        times_us, op, ranks = row.pop("times_us"), OPERATIONS[row["op"]], row["ranks"]
        p50_us = sorted(times_us)[len(times_us) // 2]
        row["busbw_gb_per_s"] = round(op.busbw_factor(ranks) * row["num_bytes"] / p50_us / 1e3, 3)
        bench.keep_times(times_us, **row)


if __name__ == "__main__":
    bench.main("beside_nccl", __doc__, benchmark, "1K,32K,1M,16M,256M", "1K,64K")
