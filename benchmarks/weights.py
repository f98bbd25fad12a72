"""Time from publish() to the last pull() of a model's weights, beside the copies it must make.

    python benchmarks/weights.py
    python benchmarks/weights.py --size 256M --peers gloo --turns 9

One trainer and some readers, each a process with one thread; the weights are bfloat16 matrices of
32 MiB. In each turn every entry moves the same weights once, and its time runs from the trainer's
start to the end of the last reader:

copies  what cannot be avoided: the trainer copies its weights to shared memory, and then all
        readers copy them from there at the same time; plain torch copies
rota    WeightStore: publish() and pull()
gloo    dist.broadcast of one matrix after the other
rpc     torch.distributed.rpc: the trainer sends the weights to all readers at once

If an entry's weights are not the trainer's, they count as wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # sends tensors by their shared memory
from torch.distributed import rpc

from arguments import Parser, parse_list, parse_natural, parse_size
from record import Run
from report import Columns, print_columns
from rota.weights import WeightStore
from workers import Workers, serve

TIMEOUT = timedelta(seconds=120)
MATRIX_BYTES = 32 << 20
TARGET = 1.5  # times the copies
PEERS = ["gloo", "rpc"]

Move = Callable[[int], list[torch.Tensor]]  # one turn; returns what this process has then

# What torch's RPC has delivered to this process.
_delivered: list[torch.Tensor] = []


def deliver(weights: list[torch.Tensor]) -> None:
    """Called on a reader by the trainer, through RPC."""
    _delivered[:] = weights


class Process:
    """One of the processes: rank 0 is the trainer, the others are readers."""

    def __init__(
        self, args: argparse.Namespace, folder: Path, rank: int, shared: torch.Tensor
    ) -> None:
        self.rank = rank
        self._shared = shared
        self.num_readers = args.readers
        self._store = dist.FileStore(str(folder / "store"), args.readers + 1)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", self._store),
            rank=rank,
            world_size=args.readers + 1,
            timeout=TIMEOUT,
        )
        lengths = [MATRIX_BYTES] * (args.size // MATRIX_BYTES)
        if args.size % MATRIX_BYTES:
            lengths.append(args.size % MATRIX_BYTES)
        self.weights = [torch.zeros(num_bytes // 2, dtype=torch.bfloat16) for num_bytes in lengths]
        self.moves: dict[str, Move] = {"copies": self.copy, "rota": self.make_rota()}
        if "gloo" in args.peers:
            self.moves["gloo"] = self.broadcast
        if "rpc" in args.peers:
            self.moves["rpc"] = self.make_rpc(folder)

    def turn(self, what: tuple[str, int]) -> tuple[float, float, bool]:
        """Start and end of this process's part, and whether its weights are right."""
        entry, number = what
        if self.rank == 0:
            for weights in self.weights:
                weights.fill_(number % 100)
        dist.barrier()
        begin = time.perf_counter()
        got = self.moves[entry](number)
        end = time.perf_counter()
        return begin, end, all(bool((x == number % 100).all()) for x in got)

    def copy(self, number: int) -> list[torch.Tensor]:
        """The trainer copies its weights to shared memory, and then the readers from there."""
        shared = self._shared.split([len(weights) for weights in self.weights])
        if self.rank == 0:
            for to, weights in zip(shared, self.weights, strict=True):
                to.copy_(weights)
        dist.barrier()
        if self.rank > 0:
            for weights, to in zip(self.weights, shared, strict=True):
                weights.copy_(to)
        return self.weights

    def make_rota(self) -> Move:
        if self.rank == 0:
            trainer = WeightStore(self._store, rank=0, timeout=TIMEOUT)
            named = {str(i): weights for i, weights in enumerate(self.weights)}

            def publish(number: int) -> list[torch.Tensor]:
                trainer.publish(number, named)
                return self.weights

            return publish
        reader = WeightStore(self._store, timeout=TIMEOUT)
        return lambda number: list(reader.pull(at_least=number)[1].values())

    def broadcast(self, number: int) -> list[torch.Tensor]:
        for weights in self.weights:
            dist.broadcast(weights, 0)
        return self.weights

    def make_rpc(self, folder: Path) -> Move:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder / 'rpc'}", rpc_timeout=TIMEOUT.total_seconds()
        )
        rpc.init_rpc(
            f"rank{self.rank}",
            rank=self.rank,
            world_size=self.num_readers + 1,
            rpc_backend_options=options,
        )

        def send(number: int) -> list[torch.Tensor]:
            if self.rank == 0:
                futures = [
                    rpc.rpc_async(f"rank{reader}", deliver, (self.weights,))
                    for reader in range(1, self.num_readers + 1)
                ]
                for future in futures:
                    future.wait()
            dist.barrier()
            return self.weights if self.rank == 0 else list(_delivered)

        return send


def process_main(
    pipe: Connection, args: argparse.Namespace, folder: Path, rank: int, shared: torch.Tensor
) -> None:
    process = Process(args, folder, rank, shared)
    pipe.send("ready")
    serve(pipe, process.turn)


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--size", type=parse_size, default="1G", help="of the weights")
    parser.add("--readers", type=parse_natural(1, 16), default=2)
    parser.add("--turns", type=parse_natural(1), default=7, help="of each entry")
    parser.add("--peers", type=parse_list(PEERS), default="gloo,rpc")
    limit = "fail when one turn takes longer"
    parser.add("--timeout", type=parse_natural(1), default=120, metavar="SECONDS", help=limit)
    parser.add_json()
    args = parser.parse_args()

    entries = ["copies", "rota", *args.peers]
    times_ms: dict[str, list[float]] = {entry: [] for entry in entries}
    trainer_ms: dict[str, list[float]] = {entry: [] for entry in entries}
    num_wrong = dict.fromkeys(entries, 0)
    with Run("weights", args.readers + 1, args) as run, Workers(args.timeout) as processes:
        shared = torch.empty(args.size // 2, dtype=torch.bfloat16).share_memory_()
        for rank in range(args.readers + 1):
            processes.fork(process_main, args, processes.folder, rank, shared)
        processes.recv_all()
        number = 0
        # Two turns to warm up: rota's readers fill two sets of tensors in turn.
        for turn in range(-2, args.turns):
            for entry in entries:
                number += 1
                parts = processes.ask((entry, number))
                num_wrong[entry] += sum(not is_right for _, _, is_right in parts)
                if turn >= 0:
                    begin = parts[0][0]
                    times_ms[entry].append((max(end for _, end, _ in parts) - begin) * 1e3)
                    trainer_ms[entry].append((parts[0][1] - begin) * 1e3)
        copies_ms = median(times_ms["copies"])
        ratios = {entry: round(median(ms) / copies_ms, 3) for entry, ms in times_ms.items()}
        rows: list[dict[str, Any]] = [
            {
                "entry": entry,
                "p50_ms": round(median(ms), 2),
                "min_ms": round(min(ms), 2),
                "trainer_p50_ms": round(median(trainer_ms[entry]), 2),
                "times_ms": [round(x, 2) for x in ms],
                "num_wrong": num_wrong[entry],
            }
            for entry, ms in times_ms.items()
        ]
        columns: Columns = {
            "entry": "{entry}",
            "p50 ms": "{p50_ms:.1f}",
            "min ms": "{min_ms:.1f}",
            "max ms": lambda row: f"{max(row['times_ms']):.1f}",
            "trainer's part ms": "{trainer_p50_ms:.1f}",
            "times the copies": lambda row: f"{ratios[row['entry']]:.2f}",
            "#wrong": "{num_wrong}",
        }
        print_columns(run.console, f"{args.size / 2**20:g} MiB of bfloat16", rows, columns)
        summary: dict[str, Any] = {"times_the_copies": ratios, "target": TARGET}
        run.finish({"weights": rows, **summary}, num_wrong=sum(num_wrong.values()), **summary)


if __name__ == "__main__":
    main()
