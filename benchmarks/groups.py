"""The cost of a subgroup: time to make it and for its first use, shared memory, descriptors.

    python benchmarks/groups.py
    python benchmarks/groups.py --groups 500 --ranks 8 --backends rota

Every rank makes subgroups of all ranks with dist.new_group, then all-reduces four bytes in each,
and keeps them all, like jobs with many device meshes. If a backend fails, its row ends with the
reason. Backend "fake" is torch's own share: it makes nothing and moves nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

import rota  # noqa: F401
from arguments import Parser, parse_each, parse_list, parse_natural
from record import Run
from report import print_table
from workers import RankError, Workers

TIMEOUT = timedelta(seconds=60)


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


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def rank_main(
    pipe: Connection, args: argparse.Namespace, backend: str, rank: int, num_ranks: int, port: int
) -> None:
    """Sends times by group, and what is held at the start, with all groups made, and after use."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # one-time setup happens here
    groups: list[dist.ProcessGroup] = []
    held = [Held.now()]
    try:
        make_ms = [
            timed(lambda: groups.append(dist.new_group(backend=backend, timeout=TIMEOUT)))
            for _ in range(args.groups)
        ]
    except Exception as error:
        raise RuntimeError(f"after {len(groups)} groups: {error}") from None
    dist.barrier()
    held.append(Held.now())
    dist.barrier()
    first_use_ms = [timed(partial(dist.all_reduce, tensor, group=group)) for group in groups]
    dist.barrier()
    held.append(Held.now())
    pipe.send((make_ms, first_use_ms, held))
    pipe.poll(None)  # with its groups, which others may still measure


def measure(args: argparse.Namespace, backend: str, num_ranks: int) -> dict[str, Any]:
    """Starts new ranks; ends them as soon as one fails, since the others would wait for it.

    Lists have the slowest rank's time of each group. Where ranks outnumber the cores, each waits
    for its turn now and then, and the slowest of a group is often one that did; so the means are of
    one rank, the slowest over all groups.
    """
    row: dict[str, Any] = {"backend": backend, "ranks": num_ranks, "groups": args.groups}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with Workers(timeout_s=3600) as ranks:
            for rank in range(num_ranks):
                ranks.fork(rank_main, args, backend, rank, num_ranks, server.port)
            notes = ranks.recv_all().values()
    except RankError as error:
        return row | {"make_ms": [], "first_use_ms": [], "failure": str(error).splitlines()[-1]}
    make_ms, first_use_ms, held = zip(*notes, strict=True)
    start, made, used = held[0]
    return row | {
        "make_ms": [max(times) for times in zip(*make_ms, strict=True)],
        "first_use_ms": [max(times) for times in zip(*first_use_ms, strict=True)],
        "make_mean_ms": max(map(mean, make_ms)),
        "first_use_mean_ms": max(map(mean, first_use_ms)),
        "descriptors": used.descriptors - start.descriptors,  # of one rank, for all groups
        "made_kib": made.shared_kib - start.shared_kib,  # on the host, for all groups
        "used_kib": used.shared_kib - start.shared_kib,
        "failure": None,
    }


def cells_of(row: dict[str, Any]) -> list[str]:
    """All costs per subgroup; memory is that of all ranks together."""
    cells = [row["backend"], str(row["ranks"]), str(row["groups"])]
    if row["failure"] is None:
        for name in ("make", "first_use"):
            cells += [f"{median(row[f'{name}_ms']):.2f}", f"{row[f'{name}_mean_ms']:.2f}"]
        cells += [f"{row[name] / row['groups']:.0f}" for name in ("made_kib", "used_kib")]
        cells.append(f"{row['descriptors'] / row['groups']:.2f}")
    return cells


def main() -> None:
    """Exits with 0 even if a backend failed, which is a valid result."""
    parser = Parser(__doc__)
    parser.add("--ranks", type=parse_each(parse_natural(2, 64)), default="4,8")
    parser.add("--groups", type=parse_natural(1), default=50)
    parser.add("--backends", type=parse_list(["rota", "gloo", "fake"]), default="rota,gloo")
    limit = "the limit of each rank, as `ulimit -n` sets it"
    parser.add("--descriptors", type=parse_natural(64), default=1024, help=limit)
    parser.add_json()
    args = parser.parse_args()

    with Run("groups", max(args.ranks), args) as run:
        rows = [
            measure(args, backend, num_ranks)
            for num_ranks in args.ranks
            for backend in args.backends
        ]
        for row in rows:
            if row["failure"] is not None:
                run.note(f"{row['backend']}, {row['ranks']} ranks, failed {row['failure']}")
        headings = ["backend", "ranks", "groups", "make ms p50", "mean", "first use ms p50", "mean"]
        headings += ["made KiB", "used KiB", "descriptors of a rank"]
        print_table(run.console, "one subgroup", headings, map(cells_of, rows))
        num_failed = sum(row["failure"] is not None for row in rows)
        run.finish({"subgroups": rows}, num_failed=num_failed)


if __name__ == "__main__":
    main()
