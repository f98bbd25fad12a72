"""One-sided access between two processes: rota.Window beside memcpy, or beside TCP.

    python benchmarks/windows.py
    python benchmarks/windows.py --sizes 4K,64M --repeats 9
    python benchmarks/windows.py --hosts --rate 1gbit

In each repeat all calls take turns, each alone. On one host "memcpy" is torch's copy_ with one
thread, between tensors of rank 0; "view" the same into rank 1's window, in place. With --hosts the
ranks are on two hosts, which network namespaces simulate (host_network.py) and which share this
machine's cores; "tcp" sends the bytes over a plain connection and waits for one byte in return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median
from timeit import timeit
from typing import Any

import torch
import torch.distributed as dist

import rota
from arguments import Parser, parse_bucket_sizes, parse_natural
from host_network import HostNetwork
from hosts import TcpRing, parse_rate
from record import Run
from report import print_table
from workers import Workers

Call = Callable[[], object]


# The most calls and bytes of a turn, which so takes about as long for every size.
ON_ONE_HOST = 20_000, 128 << 20
BETWEEN_HOSTS = 200, 32 << 20


def num_calls_of(num_bytes: int, max_calls: int, max_bytes: int) -> int:
    return max(2, min(max_calls, max_bytes // num_bytes))


def calls_of(window: rota.Window, num_bytes: int, ring: TcpRing | None) -> dict[str, Call]:
    """The calls of rank 0: what rota is compared with first. `ring` is between hosts."""
    source = torch.ones(num_bytes // 4)
    target = torch.ones(num_bytes // 4)
    calls: dict[str, Call] = {
        "put": lambda: window.put(source, 1),
        "get": lambda: window.get(target, 1),
        "accumulate": lambda: window.accumulate(source, 1),
    }
    if ring is None:
        view = window.view(1)[: num_bytes // 4]
        copies: dict[str, Call] = {
            "memcpy": lambda: target.copy_(source),
            "view": lambda: view.copy_(source),
        }
        return copies | calls

    def tcp() -> None:
        ring.move(to_send=num_bytes, to_recv=0)
        ring.move(to_send=0, to_recv=1)

    options: dict[str, Any] = {"wire_dtype": torch.float16, "block_scaling": False}
    calls["accumulate float16"] = lambda: window.accumulate(source, 1, **options)
    return {"tcp": tcp, **calls}


def measure(calls: Mapping[str, Call], num_calls: int, repeats: int) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(timeit(call, number=num_calls) / num_calls * 1e6)
    return times


def rank_main(
    pipe: Connection, rank: int, store: str | None, sizes: list[int], repeats: int
) -> None:
    """One of two ranks, on one host if they have the `store` of a file. There rank 1 is asleep
    after the start, so that rank 0 has the machine."""
    ring = None
    if store is None:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        ring = TcpRing(dist.group.WORLD, host=rank)
    else:
        dist.init_process_group("rota", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    window = rota.Window(max(sizes) // 4, dtype=torch.float32)
    for num_bytes in sizes:
        num_calls = num_calls_of(num_bytes, *(BETWEEN_HOSTS if ring else ON_ONE_HOST))
        if rank == 0:
            pipe.send(measure(calls_of(window, num_bytes, ring), num_calls, repeats))
        elif ring is not None:
            for _ in range(1 + repeats * num_calls):
                ring.move(to_send=0, to_recv=num_bytes)
                ring.move(to_send=1, to_recv=0)
    pipe.poll(None)  # with an open window


def parts_of_best(p50: Mapping[str, float]) -> dict[str, float]:
    """The part of memcpy's speed, or of TCP's goodput, that each call has in bytes on the wire."""
    best_us = next(iter(p50.values()))
    bytes_on_wire = {"accumulate float16": 0.5}
    return {name: bytes_on_wire.get(name, 1.0) * best_us / us for name, us in p50.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--sizes", type=parse_bucket_sizes, default="4K,64K,1M,16M,64M")
    parser.add("--repeats", type=parse_natural(1), default=9)
    parser.add("--hosts", action="store_true", help="ranks on two simulated hosts instead of one")
    rate = "of each host's link in each direction, or none"
    parser.add("--rate", type=parse_rate, default="1gbit", help=rate)
    parser.add_json()
    args = parser.parse_args()
    name = f"windows-hosts-1+1-{args.rate or 'unlimited'}" if args.hosts else "windows"

    with Run("windows", 2, args, name) as run, ExitStack() as stack:
        places: list[dict[str, Any]] = [{}, {}]
        if args.hosts:
            network = stack.enter_context(HostNetwork(2, args.rate))
            run.note(f"hosts are namespaces on one machine: {network.describe()}")
            places = network.places([1, 1])
        ranks = stack.enter_context(Workers(timeout_s=3600))
        store = None if args.hosts else str(ranks.folder / "store")
        for rank, place in enumerate(places):
            ranks.fork(rank_main, rank, store, args.sizes, args.repeats, **place)
        rows, lines = [], []
        for num_bytes in args.sizes:
            times: dict[str, list[float]] = ranks.recv(0)
            p50 = {name: median(of_call) for name, of_call in times.items()}
            parts = parts_of_best(p50)
            rows.append({"bytes": num_bytes, "p50_us": p50, "part": parts, "us": times})
            cells = [f"{us:.2f} ({parts[name]:.2f})" for name, us in p50.items()]
            lines.append([str(num_bytes), *cells])
        title = f"us per call, p50 (part of {'TCP' if args.hosts else 'memcpy'}'s speed)"
        print_table(run.console, title, ("bytes", *p50), lines)
        run.finish({"calls": rows})


if __name__ == "__main__":
    main()
