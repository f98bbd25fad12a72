"""Round trips of one message between two ranks: rota's send and recv compared with Gloo's.

    python benchmarks/send_recv.py --sizes 4,4K,64K,1M,16M

A round trip is a send and a recv on each rank. rota.Communicator, and dist.send and dist.recv on
both backends, take turns, so that changes of the machine affect all of them. Received messages are
checked once per size. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import driver
from arguments import Parser, parse_natural, parse_size

try:
    import rota
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

# Gloo otherwise resolves the host's name; the network must not be measured.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
ENTRIES = ("rota.Communicator", "dist on rota", "dist on gloo")
TARGET_S = 0.1  # duration of one turn
Calls = dict[str, tuple[Callable[..., object], Callable[..., object]]]


def round_trips(
    calls: tuple[Callable[..., object], Callable[..., object]],
    rank: int,
    tensor: torch.Tensor,
    num_trips: int,
) -> float:
    """Microseconds per round trip, the mean of num_trips."""
    send, recv = calls
    began = time.perf_counter()
    for _ in range(num_trips):
        if rank == 0:
            send(tensor, 1)
            recv(tensor, 1)
        else:
            recv(tensor, 0)
            send(tensor, 0)
    return (time.perf_counter() - began) / num_trips * 1e6


def measure(rank: int, calls: Calls, num_bytes: int, num_turns: int) -> dict[str, list[float]]:
    tensor = torch.full((num_bytes,), rank + 1, dtype=torch.uint8)
    num_trips = {}
    for entry, call in calls.items():
        tensor.fill_(rank + 1)
        seconds = round_trips(call, rank, tensor, 3) / 1e6
        # Rank 0's message has come back.
        if not bool((tensor == 1).all()):
            raise RuntimeError(f"{entry}: another message of {num_bytes} bytes has come")
        counts: list[object] = [max(3, min(5000, int(TARGET_S / seconds)))]
        dist.broadcast_object_list(counts, 0, group=dist.group.WORLD)
        num_trips[entry] = int(str(counts[0]))
    times: dict[str, list[float]] = {entry: [] for entry in calls}
    for _ in range(num_turns):
        for entry, call in calls.items():
            dist.barrier()
            times[entry].append(round_trips(call, rank, tensor, num_trips[entry]))
    return times


def run_rank(rank: int, folder: str, sizes: list[int], num_turns: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    on_rota = dist.new_group(backend="rota")
    communicator = rota.Communicator()
    calls: Calls = {
        "rota.Communicator": (communicator.send, communicator.recv),
        "dist on rota": (
            lambda tensor, peer: dist.send(tensor, peer, group=on_rota),
            lambda tensor, peer: dist.recv(tensor, peer, group=on_rota),
        ),
        "dist on gloo": (dist.send, dist.recv),
    }
    pipe.send([measure(rank, calls, size, num_turns) for size in sizes])
    dist.barrier()


def run_pair(sizes: list[int], num_turns: int) -> list[list[dict[str, list[float]]]]:
    """For each rank and size: the times of each entry's turns."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            pipe, far_end = context.Pipe()
            arguments = (rank, folder, sizes, num_turns, far_end)
            process = context.Process(target=run_rank, args=arguments)
            process.start()
            far_end.close()
            pipes.append(pipe)
            processes.append(process)
        try:
            of_ranks = [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError("a rank failed; what it said stands above") from None
        finally:
            for process in processes:
                process.join()
    return of_ranks


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    run = driver.Run("send_recv", "send_recv", 2, args)
    of_ranks = run_pair(args.sizes, args.turns)
    table = Table(title="round trip, µs (p50, and as a multiple of rota.Communicator)")
    for heading in ("bytes", *ENTRIES):
        table.add_column(heading, justify="right")
    rows = []
    for number, size in enumerate(args.sizes):
        # A round trip's time is that of the slower rank.
        p50 = {
            entry: median(map(max, zip(*(times[number][entry] for times in of_ranks), strict=True)))
            for entry in ENTRIES
        }
        fastest = p50["rota.Communicator"]
        cells = [f"{p50[entry]:.1f} ({p50[entry] / fastest:.1f}x)" for entry in ENTRIES]
        table.add_row(str(size), *cells)
        rows.append({"bytes": size, "p50_us": p50})
    run.console.print(table)
    run.write_record({"round_trips": rows})
    return {"benchmark": "send_recv", "json": str(run.json_path), "round_trips": rows}


def parse_sizes(text: str) -> list[int]:
    """An argparse type: bytes of "4K,1M"."""
    return [parse_size(size) for size in text.split(",")]


def main() -> int:
    """Returns the exit status: 0 if everything was measured and every message was correct."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--sizes", type=parse_sizes, default="4,4K,64K,1M,16M", help="default: %(default)s")
    add("--turns", type=parse_natural(1), default=15, help="of each entry (default: %(default)s)")
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
