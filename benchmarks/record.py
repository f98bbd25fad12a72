"""One run of a benchmark: its facts at the start, its record and its last line at the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

import machine
import report
from host_network import NotAvailable
from interleave import Measurement
from workers import RankError

RESULTS = machine.REPOSITORY / "benchmarks" / "results"
# Arguments that are paths on this machine; not recorded.
PATHS = ("json", "png", "mpi_root", "before")
# Load of an idle machine; above this, a note says that other programs were running.
QUIET_CORES = 0.1


class Run:
    """A context manager; failures of ranks end the process with one line.

    Args:
        benchmark: the script's name.
        num_ranks: the largest number of ranks that work at once.
        name: what is measured, as part of the record's file name.

    Example:
        >>> with Run("groups", 8, args) as run:
        ...     report.print_table(run.console, "one subgroup", ("backend", "ms"), cells)
        ...     run.finish({"subgroups": rows})
    """

    def __init__(
        self, benchmark: str, num_ranks: int, args: argparse.Namespace, name: str = ""
    ) -> None:
        console = Console()
        # A pipe has 80 columns by default, too few for the tables.
        self.console = Console(width=max(console.width, 140), highlight=False)
        self.benchmark = benchmark
        self._args = args
        self._started = datetime.now(timezone.utc)
        self._machine = machine.describe()
        self.git_commit = machine.git_commit()
        self._notes: list[str] = []
        stem = f"{self._started:%Y%m%dT%H%M%SZ}-{name or benchmark}-{num_ranks}ranks"
        self.json_path: Path = args.json or RESULTS / f"{stem}.json"
        self._note_load("before")
        # If ranks outnumber cores, they also wait for cores, so busbw says nothing about a link.
        self.busbw_ranks: int | None = num_ranks
        if num_ranks > machine.num_cores():
            self.busbw_ranks = None
            self.note(
                f"{num_ranks} ranks on {machine.num_cores()} cores: ranks outnumber the cores, so "
                "times are of scheduling too, and no bandwidth can be claimed"
            )

    def __enter__(self) -> Run:
        # Turns the signal into an exception, so that the ranks are ended on the way out.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RankError):
            sys.exit(f"error: {error}")
        if isinstance(error, NotAvailable):
            sys.exit(f"error: no hosts can be simulated: {error}")
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)

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
        libraries: dict[str, Any],
        mpis: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        **summary: Any,
    ) -> None:
        """Prints the tables of measurements, and finishes with them and with `more` results."""
        ratios = report.speedups(measurements, mpis)
        rows = [report.row(result, self.busbw_ranks) for result in measurements]
        report.print_measurements(self.console, rows, ratios)
        num_wrong = sum(result.num_wrong or 0 for result in measurements)
        results = {"libraries": libraries, "measurements": rows, "speedups": ratios, **(more or {})}
        self.finish(results, num_wrong=num_wrong, speedups=ratios, **summary)

    def finish(self, results: dict[str, Any], **summary: Any) -> None:
        """Writes `results` with everything needed to judge or repeat them, and prints the summary,
        for programs, as the last line. Exits with 1 if the summary's num_wrong is not 0."""
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
        print(json.dumps({"benchmark": self.benchmark, "json": str(self.json_path)} | summary))
        if summary.get("num_wrong"):
            sys.exit(1)
