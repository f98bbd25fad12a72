"""One-sided access between two processes: rota.Window beside a memcpy in one process.

    python benchmarks/windows.py
    python benchmarks/windows.py --sizes 4K,64M --repeats 9

In each repeat all calls take turns, each alone. "memcpy" is torch's copy_ with one thread, between
tensors of rank 0; "view" the same into rank 1's window, in place. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import driver
from arguments import Parser, parse_bucket_sizes, parse_natural

try:
    import rota
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

MAX_CALLS = 20_000
BYTES_PER_TURN = 128 << 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rota"])


def microseconds_per_call(call: Callable[[], object], num_bytes: int) -> float:
    num_calls = max(2, min(MAX_CALLS, BYTES_PER_TURN // num_bytes))
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls * 1e6


def measure(window: rota.Window, num_bytes: int, repeats: int) -> dict[str, list[float]]:
    """The microseconds of each call, by repeat."""
    source = torch.ones(num_bytes // 4)
    target = torch.ones(num_bytes // 4)
    view = window.view(1)[: num_bytes // 4]
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "view": lambda: view.copy_(source),
        "put": lambda: window.put(source, 1),
        "get": lambda: window.get(target, 1),
        "accumulate": lambda: window.accumulate(source, 1),
    }
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(microseconds_per_call(call, num_bytes))
    return times


def rank_main(rank: int, store: str, sizes: list[int], repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("rota", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    window = rota.Window(max(sizes) // 4, dtype=torch.float32)
    if rank == 0:
        for num_bytes in sizes:
            pipe.send(measure(window, num_bytes, repeats))
        window.signal(1)
        pipe.recv()
    else:
        pipe.recv()  # asleep, so that rank 0 has the machine


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    run = driver.Run("windows", "windows", 2, args)
    table = Table(title="microseconds per call, p50 (part of memcpy's speed)")
    table.add_column("bytes", justify="right")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            pipe, rank_pipe = CONTEXT.Pipe()
            arguments = (rank, f"{folder}/store", args.sizes, args.repeats, rank_pipe)
            processes.append(CONTEXT.Process(target=rank_main, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(pipe)
        for num_bytes in args.sizes:
            times: dict[str, list[float]] = pipes[0].recv()
            p50 = {name: median(of_call) for name, of_call in times.items()}
            rows.append({"bytes": num_bytes, "p50_us": p50, "us": times})
            if len(table.columns) == 1:
                for name in p50:
                    table.add_column(name, justify="right")
            speeds = [f"{us:.2f} ({p50['memcpy'] / us:.2f})" for us in p50.values()]
            table.add_row(str(num_bytes), *speeds)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join()
    run.console.print(table)
    run.write_record({"calls": rows})
    return {"benchmark": "windows", "json": str(run.json_path)}


def main() -> int:
    """Returns the exit status."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--sizes", type=parse_bucket_sizes, default="4K,64K,1M,16M,64M", help="default: %(default)s"
    )
    add("--repeats", type=parse_natural(1), default=9, help="default: %(default)s")
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
