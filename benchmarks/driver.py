"""Shared by the benchmark scripts: starting and ending ranks, and publishing results."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

import interleave
import machine
import report
from arguments import FLOAT32_BYTES, plan_of
from host_network import NotAvailable
from interleave import Measurement
from protocol import Entry
from ranks import RankError, RankGroup

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# Arguments that are paths on this machine; not recorded.
PATHS = ("json", "png", "mpi_root", "before")
# Load of an idle machine; above this, a note says that other programs were running.
QUIET_CORES = 0.1


class Run:
    """One run of a benchmark: its facts at the start, and its results at the end.

    Args:
        benchmark: the script's name, for the record.
        name: what is measured, as part of a file name.
        num_ranks: the largest number of ranks that work at once.
        args: the command line.
    """

    def __init__(self, benchmark: str, name: str, num_ranks: int, args: argparse.Namespace) -> None:
        console = Console()
        # A pipe has 80 columns by default, too few for the tables.
        self.console = Console(width=max(console.width, 140), highlight=False)
        self.benchmark = benchmark
        self._num_ranks = num_ranks
        self._args = args
        self._started = datetime.now(timezone.utc)
        self._machine = machine.describe()
        self.git_commit = machine.git_commit()
        self._notes: list[str] = []
        stem = RESULTS / f"{self._started:%Y%m%dT%H%M%SZ}-{name}-{num_ranks}ranks"
        self.json_path: Path = args.json or stem.with_suffix(".json")
        self._note_load("before")
        num_cores = machine.num_cores()
        if num_ranks > num_cores:
            self.note(
                f"{num_ranks} ranks on {num_cores} cores: ranks outnumber the cores, so times are "
                "of scheduling too, and no bandwidth can be claimed"
            )

    def note(self, text: str) -> None:
        """Prints and records a note that readers of the numbers need."""
        self._notes.append(text)
        self.console.print(f"note: {text}", markup=False, soft_wrap=True)

    def _note_load(self, when: str) -> None:
        busy_cores = machine.busy_cores()
        if busy_cores > QUIET_CORES:
            self.note(
                f"{when} the run, other programs kept {busy_cores:.1f} of {machine.num_cores()} "
                "cores busy: ranks may have waited for them"
            )

    def subtitle(self) -> str:
        """Machine, torch, commit and day in one line."""
        facts = self._machine
        return (
            f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, "
            f"torch {facts['torch']}, commit {self.git_commit[:10]}, {self._started:%Y-%m-%d}"
        )

    def publish(
        self,
        measurements: Sequence[Measurement],
        groups: Sequence[RankGroup],
        mpis: Sequence[str],
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes the record, including `more`, and prints the tables; returns the summary for
        programs."""
        ratios = report.speedups(measurements, mpis)
        # If ranks outnumber cores, they also wait for cores, so busbw says nothing about a link.
        busbw_ranks = None if self._num_ranks > machine.num_cores() else self._num_ranks
        rows = [report.row(result, busbw_ranks) for result in measurements]
        self.write_record(
            {
                "libraries": {group.name: group.hellos[0].versions for group in groups},
                "measurements": rows,
                "speedups": [asdict(ratio) for ratio in ratios],
                **(more or {}),
            }
        )
        report.print_times(self.console, rows)
        report.print_speedups(self.console, ratios)
        return {
            "benchmark": self.benchmark,
            "json": str(self.json_path),
            "num_wrong": sum(result.num_wrong or 0 for result in measurements),
            "speedups": report.nested(ratios),
        }

    def write_record(self, results: dict[str, Any]) -> None:
        """Writes `results` with everything needed to judge or repeat them."""
        self._note_load("after")
        arguments = vars(self._args)
        record = {
            "benchmark": self.benchmark,
            "started": self._started.isoformat(timespec="seconds"),
            "git_commit": self.git_commit,
            "machine": self._machine,
            "arguments": {key: value for key, value in arguments.items() if key not in PATHS},
            "notes": self._notes,
        }
        report.write_json(self.json_path, record | results)


def torch_ranks(args: argparse.Namespace, backends: Sequence[str], run_dir: Path) -> RankGroup:
    """The torch ranks, which form one process group on this host."""
    command = [sys.executable, str(HERE / "torch_worker.py"), "--ranks", str(args.ranks)]
    command += ["--rendezvous", str(run_dir / "rendezvous"), "--backends", ",".join(backends)]
    commands = [[*command, "--rank", str(rank)] for rank in range(args.ranks)]
    # Loopback, to work without a network; one thread per rank, because ranks share the cores.
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return RankGroup("torch", args.ranks, commands, env, run_dir, args.timeout)


def drop_missing(run: Run, entries: Sequence[Entry], group: RankGroup) -> list[Entry]:
    """Returns the entries whose backend is available; notes why the others are not."""
    missing = group.hellos[0].missing
    for reason in missing.values():
        run.note(reason)
    return [entry for entry in entries if entry.backend not in missing]


@contextmanager
def running(groups: Sequence[RankGroup]) -> Iterator[None]:
    """Starts the groups; always ends their processes, even after a failed start."""
    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.kill)
            group.start()
        yield
        for group in groups:
            group.stop()


def measure_buckets(
    run: Run, args: argparse.Namespace, entries: Sequence[Entry], op: str
) -> tuple[list[Measurement], RankGroup]:
    """Starts torch ranks with rota and Gloo, and measures the entries on float32 buckets of every
    size in `args`; also returns the group of ranks, which has ended."""
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        group = torch_ranks(args, ["rota", "gloo"], Path(folder))
        with running([group]):
            present = drop_missing(run, entries, group)
            measurements = interleave.measure_sizes(
                present,
                group.ask,
                op,
                "float32",
                [num_bytes // FLOAT32_BYTES for num_bytes in args.sizes],
                FLOAT32_BYTES,
                plan_of(args),
            )
    return measurements, group


def exit_status(benchmark: Callable[[], dict[str, Any]]) -> int:
    """Runs `benchmark`, prints its summary as the last line, and returns the exit status."""
    # Turns the signal into an exception, so that the ranks are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = benchmark()
    except RankError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except NotAvailable as reason:
        print(f"error: no hosts can be simulated: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all ranks are ended", file=sys.stderr)
        return 130
    print(json.dumps(result))
    return 1 if result.get("num_wrong") else 0
