"""The cost of a subgroup: time to make it and for its first use, shared memory, descriptors.

    python benchmarks/groups.py
    python benchmarks/groups.py --groups 500 --ranks 8 --backends rota

Every rank makes subgroups of all ranks with dist.new_group, then all-reduces four bytes in each,
and keeps them all, like jobs with many device meshes. If a backend fails, its row ends with the
reason. Backend "fake" is torch's own share: it makes nothing and moves nothing. The last line of
the output is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from rich.table import Table

import driver
from arguments import Parser, parse_list, parse_natural

try:
    import rota  # noqa: F401
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

# Gloo otherwise resolves the host's name; the network must not be measured.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
TIMEOUT = timedelta(seconds=60)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rota"])


@dataclass
class Held:
    """Descriptors of a process, and the host's shared memory."""

    descriptors: int
    shared_kib: int

    @classmethod
    def now(cls) -> Held:
        """The current values for this process; the host's memory includes all programs."""
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return cls(len(os.listdir("/proc/self/fd")), int(lines["Shmem"].split()[0]))


@dataclass
class Row:
    """One backend with one number of ranks; lists have the slowest rank's time of each group.

    Where ranks outnumber the cores, each waits for its turn now and then, and the slowest of a
    group is often one that did; so the means are of one rank, the slowest over all groups.
    """

    backend: str
    ranks: int
    groups: int
    make_ms: list[float]
    first_use_ms: list[float]
    make_mean_ms: float
    first_use_mean_ms: float
    descriptors: int  # of one rank, for all groups
    made_kib: int  # of shared memory on the host, for all groups
    used_kib: int
    failure: str | None = None


def timed(call: Callable[[], object]) -> float:
    """The milliseconds that `call` takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def rank_main(
    args: argparse.Namespace, backend: str, rank: int, num_ranks: int, port: int, pipe: Connection
) -> None:
    """One rank: sends its times, and Held at the start, with all groups made, and after use."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # one-time setup happens here
    groups: list[dist.ProcessGroup] = []
    try:
        held = [Held.now()]
        make_ms = [
            timed(lambda: groups.append(dist.new_group(backend=backend, timeout=TIMEOUT)))
            for _ in range(args.groups)
        ]
        dist.barrier()
        held.append(Held.now())
        dist.barrier()
        first_use_ms = [timed(partial(dist.all_reduce, tensor, group=group)) for group in groups]
        dist.barrier()
        held.append(Held.now())
        pipe.send((make_ms, first_use_ms, held))
    except Exception as error:
        pipe.send(f"after {len(groups)} groups: {str(error).splitlines()[0]}")
    pipe.recv()  # no rank ends while others still measure


def measure(args: argparse.Namespace, backend: str, num_ranks: int) -> Row:
    """Starts new ranks; ends them as soon as one fails, since the others would wait for it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(num_ranks):
        pipe, rank_pipe = CONTEXT.Pipe()
        arguments = (args, backend, rank, num_ranks, server.port, rank_pipe)
        processes.append(CONTEXT.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        rank_pipe.close()
        pipes.append(pipe)
    replies: dict[Connection, Any] = {}
    failure = None
    try:
        while len(replies) < num_ranks and failure is None:
            awaited = [pipe for pipe in pipes if pipe not in replies]
            ready = wait(awaited)
            for pipe in awaited:
                if pipe in ready:
                    replies[pipe] = pipe.recv()
            failure = next((reply for reply in replies.values() if isinstance(reply, str)), None)
    except EOFError:
        failure = "a rank died"
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failure is not None:
        return Row(backend, num_ranks, args.groups, [], [], 0, 0, 0, 0, 0, failure)
    make_ms, first_use_ms, held = zip(*(replies[pipe] for pipe in pipes), strict=True)
    start, made, used = held[0]
    return Row(
        backend,
        num_ranks,
        args.groups,
        [max(times) for times in zip(*make_ms, strict=True)],
        [max(times) for times in zip(*first_use_ms, strict=True)],
        max(map(mean, make_ms)),
        max(map(mean, first_use_ms)),
        used.descriptors - start.descriptors,
        made.shared_kib - start.shared_kib,
        used.shared_kib - start.shared_kib,
    )


def print_table(run: driver.Run, rows: list[Row]) -> None:
    """Prints all costs per subgroup; memory is that of all ranks together."""
    table = Table(title="one subgroup", caption="descriptors: of one rank; memory: of the host")
    for heading in ("backend", "ranks", "groups"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for heading in ("make ms p50", "mean", "first use ms p50", "mean"):
        table.add_column(heading, justify="right")
    for heading in ("made KiB", "used KiB", "descriptors"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row.backend, str(row.ranks), str(row.groups)]
        if row.failure is None:
            cells += [f"{median(row.make_ms):.2f}", f"{row.make_mean_ms:.2f}"]
            cells += [f"{median(row.first_use_ms):.2f}", f"{row.first_use_mean_ms:.2f}"]
            cells += [f"{kib / row.groups:.0f}" for kib in (row.made_kib, row.used_kib)]
            cells.append(f"{row.descriptors / row.groups:.2f}")
        else:
            run.note(f"{row.backend}, {row.ranks} ranks, failed {row.failure}")
        table.add_row(*cells)
    run.console.print(table)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    run = driver.Run("groups", "groups", max(args.ranks), args)
    rows = [
        measure(args, backend, num_ranks) for num_ranks in args.ranks for backend in args.backends
    ]
    print_table(run, rows)
    run.write_record({"subgroups": [asdict(row) for row in rows]})
    return {
        "benchmark": "groups",
        "json": str(run.json_path),
        "num_failed": sum(row.failure is not None for row in rows),
    }


def parse_ranks(text: str) -> list[int]:
    """An argparse type: numbers of ranks, separated by commas."""
    return [parse_natural(2, 64)(number) for number in text.split(",")]


def main() -> int:
    """Returns the exit status: 0 even if a backend failed, which is a valid result."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=parse_ranks, default="4,8", help="default: %(default)s")
    add("--groups", type=parse_natural(1), default=50, help="default: %(default)s")
    add(
        "--backends",
        type=parse_list(["rota", "gloo", "fake"]),
        default="rota,gloo",
        help="default: %(default)s",
    )
    add(
        "--descriptors",
        type=parse_natural(64),
        default=1024,
        help="the limit of each rank, as `ulimit -n` sets it (default: %(default)s)",
    )
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
