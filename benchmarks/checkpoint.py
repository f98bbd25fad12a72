"""Saving a rank's state to memory that outlives it, and restoring it in a new process.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --size 256M --turns 9

In each turn a new process takes the place of the one before, which was killed: it restores the
state into tensors that it has already touched, as those of a model are, then saves it, and kills
itself. All entries take turns, each on one thread:

memcpy      torch's copy_ from tensors to tensors; what the others are compared with
open        rota.checkpoint.Checkpoint(), which finds the keeper
save        save(), into memory that is mapped
load        load(), once the new process has mapped the memory: Checkpoint() starts that in a thread
first load  load() at once after Checkpoint(), which has to wait for that
torch       torch.save and torch.load of a file
dcp         torch.distributed.checkpoint's save, which waits for the disk, and load

If a restored state is not the one that was saved, it counts as wrong.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rota.checkpoint
from arguments import Parser, parse_natural, parse_size
from record import Run
from report import print_table
from workers import Workers

TENSOR_BYTES = 32 << 20
NUM_SAVES = 3  # the first two map the memory
TARGET = 0.8  # of memcpy's speed, for save and load
TIMEOUT_S = 300
ENTRIES = {
    "memcpy": "memcpy",
    "save": "save()",
    "load": "load()",
    "first_load": "load() at once",
    "open": "Checkpoint()",
    "torch_save": "torch.save",
    "torch_load": "torch.load",
    "dcp_save": "dcp.save",
    "dcp_load": "dcp.load",
}


def tensors_of(num_bytes: int, value: float) -> dict[str, torch.Tensor]:
    whole, rest = divmod(num_bytes, TENSOR_BYTES)
    lengths = [TENSOR_BYTES] * whole + [rest] * (rest > 0)
    return {str(i): torch.full((length // 4,), value) for i, length in enumerate(lengths)}


class Turn:
    """What one process measures; times in ms by entry."""

    def __init__(self) -> None:
        self.times_ms: dict[str, float] = {}
        self.num_wrong = 0

    def time(self, entry: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.times_ms[entry] = (time.perf_counter() - start) * 1e3
        return result

    def check(self, state: dict[str, torch.Tensor], value: float) -> None:
        self.num_wrong += not all(bool((tensor == value).all()) for tensor in state.values())


def take_turn(
    pipe: Connection, number: int, job: str, args: argparse.Namespace, folder: Path
) -> Turn:
    """Restores what turn number - 1 has saved, and saves its own."""
    turn = Turn()
    state = tensors_of(args.size, float(number))
    target = tensors_of(args.size, -1.0)
    store = dist.FileStore(str(folder / f"store{number}"), 1)
    checkpoint = turn.time(
        "open", lambda: rota.checkpoint.Checkpoint(store, rank=0, world_size=1, job=job)
    )
    for entry in ("first_load", "load") if number > 0 else ():
        found = turn.time(entry, functools.partial(checkpoint.load, target))
        turn.check(target, number - 1.0)
        turn.num_wrong += found[0] != NUM_SAVES * number - 1
        for tensor in target.values():
            tensor.fill_(-1.0)

    def memcpy() -> None:
        for to, source in zip(target.values(), state.values(), strict=True):
            to.copy_(source)

    for save in range(NUM_SAVES):  # the last time of each counts
        turn.time("memcpy", memcpy)
        step = NUM_SAVES * number + save
        turn.time("save", functools.partial(checkpoint.save, step, state))
    if not args.no_disk:
        measure_disk(turn, state, target, number, folder)
    return turn


def measure_disk(
    turn: Turn,
    state: dict[str, torch.Tensor],
    target: dict[str, torch.Tensor],
    number: int,
    folder: Path,
) -> None:
    file, dcp_folder = folder / "torch.pt", folder / "dcp"
    turn.time("torch_save", lambda: torch.save(state, file))
    turn.check(turn.time("torch_load", lambda: torch.load(file)), float(number))
    file.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turn.time("dcp_save", lambda: dcp.save(state, checkpoint_id=dcp_folder, no_dist=True))
        turn.time("dcp_load", lambda: dcp.load(target, checkpoint_id=dcp_folder, no_dist=True))
    turn.check(target, float(number))


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--size", type=parse_size, default="1G", help="of the state")
    parser.add("--turns", type=parse_natural(1), default=7)
    parser.add("--no-disk", action="store_true", help="only memory")
    parser.add_json()
    args = parser.parse_args()

    with Run("checkpoint", 1, args) as run, Workers(TIMEOUT_S) as processes:
        job = f"benchmark-{uuid4().hex}"
        turns = []
        try:
            for number in range(args.turns + 1):  # the first has nothing to restore
                processes.fork(take_turn, number, job, args, processes.folder)
                turns.append(processes.recv(number))
                processes.kill(number)
        finally:  # lets the keeper end
            rota.checkpoint.Checkpoint(dist.HashStore(), rank=0, world_size=1, job=job).close()
        times = {
            entry: [turn.times_ms[entry] for turn in turns[1:]]
            for entry in ENTRIES
            if entry in turns[1].times_ms
        }
        memcpy_ms = median(times["memcpy"])
        ratios = {entry: round(memcpy_ms / median(ms), 3) for entry, ms in times.items()}
        print_table(
            run.console,
            f"{args.size / 2**20:g} MiB of float32",
            ("entry", "p50 ms", "min ms", "max ms", "of memcpy's speed"),
            [
                (
                    ENTRIES[entry],
                    *(f"{of(ms):.1f}" for of in (median, min, max)),
                    f"{ratios[entry]:.2f}",
                )
                for entry, ms in times.items()
            ],
        )
        checked = {"num_wrong": sum(turn.num_wrong for turn in turns), "target": TARGET}
        summary: dict[str, Any] = {"of_memcpys_speed": ratios, **checked}
        run.finish({"ms": times, **summary}, **summary)


if __name__ == "__main__":
    main()
