"""One-sided access between two processes: rota.Window beside memcpy, or beside TCP.

    python benchmarks/windows.py
    python benchmarks/windows.py --sizes 4K,64M --repeats 9
    python benchmarks/windows.py --hosts --rate 1gbit

In each repeat all calls take turns, each alone. On one host "memcpy" is torch's copy_ with one
thread, between tensors of rank 0; "view" the same into rank 1's window, in place. With --hosts the
ranks are on two hosts, which network namespaces simulate (host_network.py) and which share this
machine's cores; "tcp" sends the bytes over a plain connection and waits for one byte in return. The
last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import driver
from arguments import Parser, parse_bucket_sizes, parse_natural
from host_network import HostNetwork, enter_namespace, rank_environments
from hosts import parse_rate
from hosts_worker import TcpRing

try:
    import rota
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rota"])

Call = Callable[[], object]


@dataclass(frozen=True)
class Turns:
    """How many calls a turn has, so that it takes about as long for every size."""

    max_calls: int
    num_bytes: int

    def num_calls(self, num_bytes: int) -> int:
        return max(2, min(self.max_calls, self.num_bytes // num_bytes))


ON_ONE_HOST = Turns(max_calls=20_000, num_bytes=128 << 20)
BETWEEN_HOSTS = Turns(max_calls=200, num_bytes=32 << 20)


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a namespace, and the variables of its host."""

    namespace: str
    env: Mapping[str, str]


def microseconds_per_call(call: Call, num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls * 1e6


def calls_on_one_host(window: rota.Window, num_bytes: int) -> dict[str, Call]:
    source = torch.ones(num_bytes // 4)
    target = torch.ones(num_bytes // 4)
    view = window.view(1)[: num_bytes // 4]
    return {
        "memcpy": lambda: target.copy_(source),
        "view": lambda: view.copy_(source),
        "put": lambda: window.put(source, 1),
        "get": lambda: window.get(target, 1),
        "accumulate": lambda: window.accumulate(source, 1),
    }


def calls_between_hosts(window: rota.Window, ring: TcpRing, num_bytes: int) -> dict[str, Call]:
    source = torch.ones(num_bytes // 4)
    target = torch.ones(num_bytes // 4)

    def tcp() -> None:
        ring.move(to_send=num_bytes, to_recv=0)
        ring.move(to_send=0, to_recv=1)

    return {
        "tcp": tcp,
        "put": lambda: window.put(source, 1),
        "get": lambda: window.get(target, 1),
        "accumulate": lambda: window.accumulate(source, 1),
        "accumulate float16": lambda: window.accumulate(source, 1, wire_dtype=torch.float16),
    }


def answer_tcp(ring: TcpRing, num_bytes: int) -> None:
    """The other end of one "tcp" call."""
    ring.move(to_send=0, to_recv=num_bytes)
    ring.move(to_send=1, to_recv=0)


def measure(calls: Mapping[str, Call], num_calls: int, repeats: int) -> dict[str, list[float]]:
    """The microseconds of each call, by repeat."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(microseconds_per_call(call, num_calls))
    return times


def rank_main(rank: int, store: str, sizes: list[int], repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("rota", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    window = rota.Window(max(sizes) // 4, dtype=torch.float32)
    if rank == 0:
        for num_bytes in sizes:
            calls = calls_on_one_host(window, num_bytes)
            pipe.send(measure(calls, ON_ONE_HOST.num_calls(num_bytes), repeats))
    pipe.recv()  # rank 1 is asleep meanwhile, so that rank 0 has the machine


def rank_main_on_host(
    rank: int, place: Place, sizes: list[int], repeats: int, pipe: Connection
) -> None:
    enter_namespace(place.namespace)
    os.environ.update(place.env)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    ring = TcpRing(dist.group.WORLD, host=rank)
    window = rota.Window(max(sizes) // 4, dtype=torch.float32)
    for num_bytes in sizes:
        num_calls = BETWEEN_HOSTS.num_calls(num_bytes)
        if rank == 0:
            calls = calls_between_hosts(window, ring, num_bytes)
            pipe.send(measure(calls, num_calls, repeats))
        else:
            for _ in range(1 + repeats * num_calls):
                answer_tcp(ring, num_bytes)
    pipe.recv()


@contextmanager
def ranks(args: argparse.Namespace, run: driver.Run) -> Iterator[list[Connection]]:
    """Two ranks, on one host or on two; gives their pipes."""
    with tempfile.TemporaryDirectory() as folder:
        if not args.hosts:
            yield from start(partial(rank_main, store=f"{folder}/store"), [{}, {}], args)
            return
        with HostNetwork(2, args.rate) as network:
            run.note(f"hosts are namespaces on one machine: {network.describe()}")
            environments = rank_environments([1, 1], network.serve_store())
            places = [
                {"place": Place(host.path, env)}
                for host, env in zip(network.hosts, environments, strict=True)
            ]
            yield from start(rank_main_on_host, places, args)


def start(
    main: Callable[..., None], kwargs: list[dict[str, Any]], args: argparse.Namespace
) -> Iterator[list[Connection]]:
    pipes, processes = [], []
    for rank, own in enumerate(kwargs):
        pipe, rank_pipe = CONTEXT.Pipe()
        common = {"rank": rank, "sizes": args.sizes, "repeats": args.repeats, "pipe": rank_pipe}
        processes.append(CONTEXT.Process(target=main, kwargs={**common, **own}, daemon=True))
        processes[-1].start()
        rank_pipe.close()  # so that the end of the rank is the end of the pipe
        pipes.append(pipe)
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()


def parts_of_best(p50: Mapping[str, float]) -> dict[str, float]:
    """The part of memcpy's speed, or of TCP's goodput, that each call has in bytes on the wire."""
    best_us = next(iter(p50.values()))
    bytes_on_wire = {"accumulate float16": 0.5}
    return {name: bytes_on_wire.get(name, 1.0) * best_us / us for name, us in p50.items()}


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    name = f"windows-hosts-1+1-{args.rate or 'unlimited'}" if args.hosts else "windows"
    run = driver.Run("windows", name, 2, args)
    peer = "TCP's goodput" if args.hosts else "memcpy's speed"
    table = Table(title=f"microseconds per call, p50 (part of {peer})")
    table.add_column("bytes", justify="right")
    rows = []
    with ranks(args, run) as pipes:
        for num_bytes in args.sizes:
            times: dict[str, list[float]] = pipes[0].recv()
            p50 = {name: median(of_call) for name, of_call in times.items()}
            parts = parts_of_best(p50)
            rows.append({"bytes": num_bytes, "p50_us": p50, "part": parts, "us": times})
            if len(table.columns) == 1:
                for name in p50:
                    table.add_column(name, justify="right")
            cells = [f"{us:.2f} ({parts[name]:.2f})" for name, us in p50.items()]
            table.add_row(str(num_bytes), *cells)
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
    add("--hosts", action="store_true", help="ranks on two simulated hosts instead of one")
    add(
        "--rate",
        type=parse_rate,
        default="1gbit",
        help="of each host's link in each direction, or none (default: %(default)s)",
    )
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
