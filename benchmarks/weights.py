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

If an entry's weights are not the trainer's, they count as wrong. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import driver
from arguments import Parser, parse_list, parse_natural, parse_size
from ranks import RankError
from rota.weights import WeightStore

try:
    import rota
    from rota import _C
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

# Gloo otherwise resolves the host's name; the network must not be measured.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
TIMEOUT = timedelta(seconds=120)
MATRIX_BYTES = 32 << 20
TARGET = 1.5  # times the copies
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rota"])
PEERS = ["gloo", "rpc"]

Move = Callable[[int], list[torch.Tensor]]  # one turn; returns what this process has then

# What torch's RPC has delivered to this process.
_delivered: list[torch.Tensor] = []


def deliver(weights: list[torch.Tensor]) -> None:
    """Called on a reader by the trainer, through RPC."""
    _delivered[:] = weights


class Process:
    """One of the processes: rank 0 is the trainer, the others are readers."""

    def __init__(self, args: argparse.Namespace, folder: Path, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
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
        self.moves: dict[str, Move] = {"copies": self.make_copies(), "rota": self.make_rota()}
        if "gloo" in args.peers:
            self.moves["gloo"] = self.broadcast
        if "rpc" in args.peers:
            self.moves["rpc"] = self.make_rpc(folder)

    def turn(self, entry: str, number: int) -> tuple[float, float, bool]:
        """Start and end of this process's part, and whether its weights are right."""
        if self.rank == 0:
            for weights in self.weights:
                weights.fill_(number % 100)
        dist.barrier()
        begin = time.perf_counter()
        got = self.moves[entry](number)
        end = time.perf_counter()
        return begin, end, all(bool((x == number % 100).all()) for x in got)

    def make_copies(self) -> Move:
        """The trainer's shared memory, and one word that says which turn is in it."""
        lengths = [len(weights) for weights in self.weights]
        if self.rank == 0:
            shared = rota.empty(sum(lengths), dtype=torch.bfloat16)
            exposed = _C.ExposedTensor(shared, 1, others_may_write=False)
            self._store.set("copies", exposed.address)

            def copy_in(number: int) -> list[torch.Tensor]:
                for to, weights in zip(shared.split(lengths), self.weights, strict=True):
                    to.copy_(weights)
                exposed.publish(0, number)
                return self.weights

            return copy_in
        opened = _C.OpenedTensor(self._store.get("copies").decode(), "the trainer", TIMEOUT)
        source = opened.bytes.view(torch.bfloat16).split(lengths)

        def copy_out(number: int) -> list[torch.Tensor]:
            opened.wait(0, number, TIMEOUT)
            for weights, shared in zip(self.weights, source, strict=True):
                weights.copy_(shared)
            return self.weights

        return copy_out

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
        from torch.distributed import rpc

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
                return self.weights
            dist.barrier()  # with the trainer, below
            return list(_delivered)

        def send_and_meet(number: int) -> list[torch.Tensor]:
            got = send(number)
            if self.rank == 0:
                dist.barrier()
            return got

        return send_and_meet


def process_main(args: argparse.Namespace, folder: Path, rank: int, pipe: Connection) -> None:
    """Takes turns until the parent kills it."""
    try:
        process = Process(args, folder, rank)
        pipe.send("ready")
        while True:
            pipe.send(process.turn(*pipe.recv()))
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
        pipe.recv()


@dataclass
class Row:
    """One entry; times in ms, of each turn."""

    entry: str
    times_ms: list[float]
    trainer_ms: list[float]  # the trainer's part
    num_wrong: int = 0

    @property
    def p50_ms(self) -> float:
        return median(self.times_ms)


class Processes:
    """All processes of a run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._timeout_s = args.timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(args.readers + 1):
            pipe, far_end = CONTEXT.Pipe()
            process = CONTEXT.Process(target=process_main, args=(args, folder, rank, far_end))
            process.daemon = True
            process.start()
            far_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def hear(self) -> list[Any]:
        """A note from each process."""
        notes = []
        for rank, pipe in enumerate(self._pipes):
            try:
                note = pipe.recv() if pipe.poll(self._timeout_s) else f"rank {rank} is stuck"
            except EOFError:
                note = f"rank {rank} died"
            if isinstance(note, str) and note != "ready":
                raise RankError(note)
            notes.append(note)
        return notes

    def turn(self, entry: str, number: int) -> list[tuple[float, float, bool]]:
        for pipe in self._pipes:
            pipe.send((entry, number))
        return self.hear()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure(run: driver.Run, args: argparse.Namespace) -> list[Row]:
    """Lets the entries take turns."""
    entries = ["copies", "rota", *args.peers]
    rows = {entry: Row(entry, [], []) for entry in entries}
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        processes = Processes(args, Path(folder))
        try:
            processes.hear()
            number = 0
            # Two turns to warm up: rota's readers fill two sets of tensors in turn.
            for turn in range(-2, args.turns):
                for entry in entries:
                    number += 1
                    parts = processes.turn(entry, number)
                    row = rows[entry]
                    row.num_wrong += sum(not is_right for _, _, is_right in parts)
                    if turn >= 0:
                        begin = parts[0][0]
                        row.times_ms.append((max(end for _, end, _ in parts) - begin) * 1e3)
                        row.trainer_ms.append((parts[0][1] - begin) * 1e3)
        finally:
            processes.kill()
    return list(rows.values())


def print_table(run: driver.Run, rows: list[Row], num_bytes: int) -> None:
    table = Table(title=f"{num_bytes / 2**20:g} MiB of bfloat16")
    for heading in (
        "entry",
        "p50 ms",
        "min ms",
        "max ms",
        "trainer's part ms",
        "times the copies",
        "#wrong",
    ):
        table.add_column(heading, justify="left" if heading == "entry" else "right")
    for row in rows:
        table.add_row(
            row.entry,
            f"{row.p50_ms:.1f}",
            f"{min(row.times_ms):.1f}",
            f"{max(row.times_ms):.1f}",
            f"{median(row.trainer_ms):.1f}",
            f"{row.p50_ms / rows[0].p50_ms:.2f}",
            str(row.num_wrong),
        )
    run.console.print(table)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    run = driver.Run("weights", "weights", args.readers + 1, args)
    rows = measure(run, args)
    print_table(run, rows, args.size)
    ratios = {row.entry: round(row.p50_ms / rows[0].p50_ms, 3) for row in rows}
    results = [
        {
            "entry": row.entry,
            "p50_ms": round(row.p50_ms, 2),
            "min_ms": round(min(row.times_ms), 2),
            "trainer_p50_ms": round(median(row.trainer_ms), 2),
            "times_ms": [round(x, 2) for x in row.times_ms],
            "num_wrong": row.num_wrong,
        }
        for row in rows
    ]
    run.write_record({"weights": results, "times_the_copies": ratios, "target": TARGET})
    return {
        "benchmark": "weights",
        "json": str(run.json_path),
        "num_wrong": sum(row.num_wrong for row in rows),
        "times_the_copies": ratios,
        "target": TARGET,
    }


def main() -> int:
    """Returns the exit status."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--size", type=parse_size, default="1G", help="of the weights (default: %(default)s)")
    add("--readers", type=parse_natural(1, 16), default=2, help="default: %(default)s")
    add("--turns", type=parse_natural(1), default=7, help="of each entry (default: %(default)s)")
    add("--peers", type=parse_list(PEERS), default="gloo,rpc", help="default: %(default)s")
    add(
        "--timeout",
        type=parse_natural(1),
        default=120,
        metavar="SECONDS",
        help="fail when one turn takes longer (default: %(default)s)",
    )
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
