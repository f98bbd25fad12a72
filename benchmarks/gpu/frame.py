"""What every GPU benchmark shares: its command line, how a call is timed, rows, tables.

A call is timed on buffers that rotate and together exceed the L2 cache four times, inside a CUDA
graph that holds the calls of a whole sample, so that neither a cache nor the host's time to launch
is measured; where something cannot be captured, on the stream, which its row says. Entries are
measured in turns, so that a change of the clocks meets all of them. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import report
from arguments import FLOAT32_BYTES, Parser, parse_natural, parse_size
from gpu import target
from gpu.target import Body, Target
from interleave import Measurement, Plan
from protocol import Entry

# A sample is at least this long: events are 0.5 µs sharp, and the start of a graph takes some µs.
MIN_SAMPLE_US = 2000.0
MAX_CALLS = 256  # in one graph
MAX_SETS = 64  # of buffers, in rotation
L2_TIMES = 4  # what all sets together exceed
MAX_JOB_US = 1e6  # of samples, in all turns of one entry
LARGE_COPY_BYTES = 4 << 30  # read and written: what "the copy rate" of a GPU is usually told of

COPY = "copy of as many bytes"


@dataclass
class Job:
    """One entry at one size.

    Args:
        calls: the call, for each set of buffers.
        moved_bytes: what one call reads and writes of memory, counted, not measured; 0 where it
            does not matter.
        check: runs the call on known data, restores the set, and returns how many elements were
            wrong; None where there is nothing to check.
        in_graph: False for what asks the GPU and waits for the answer.
        may_be_refused: whether a ValueError means that rota does not take this size.
        more: what else stands in the row.
    """

    entry: Entry
    calls: Sequence[Body]
    moved_bytes: int
    check: Callable[[], int] | None = None
    in_graph: bool = True
    may_be_refused: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Prepared:
    job: Job
    measurement: Measurement
    run: Body  # one sample: measurement.batch calls
    num_samples: int  # a turn
    timed: str
    has_failed: bool = False


class Bench:
    """One run of one benchmark: where it runs, how much it measures, what it has found."""

    def __init__(self, name: str, args: argparse.Namespace, on: Target) -> None:
        self.name = name
        self.target = on
        self.sizes: list[int] = args.sizes
        self.plan = Plan(args.warmup, args.iters, args.repeats, check=True)
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.num_failed = 0
        console = Console()
        self.console = Console(width=max(console.width, 140), highlight=False)
        self._rows_path: Path | None = args.rows
        generator = torch.Generator().manual_seed(0)
        # A prime number, so that no piece or shard begins where another does.
        num_elems = 1021 if on.is_dry else 4_194_301
        self._numbers = torch.randn(num_elems, generator=generator)
        self._pools: dict[torch.dtype, Tensor] = {}
        self._large_copy: float | None = None

    # ---- data

    def fill(self, tensor: Tensor, seed: int) -> None:
        """Normal numbers, other ones for each seed; by copies alone."""
        pool = self._pools.get(tensor.dtype)
        if pool is None:
            pool = self._numbers.to(tensor.dtype).to(self.target.device)
            self._pools[tensor.dtype] = pool
        flat = tensor.view(-1)
        first = seed * 104_729 % pool.numel()
        begin = 0
        while begin < flat.numel():
            num_elems = min(pool.numel() - first, flat.numel() - begin)
            flat[begin : begin + num_elems].copy_(pool[first : first + num_elems])
            begin += num_elems
            first = 0

    def random(self, num_elems: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor of normal numbers."""
        tensor = torch.empty(num_elems, dtype=dtype, device=self.target.device)
        self.fill(tensor, seed)
        return tensor

    def num_sets(self, touched_bytes: int) -> int:
        """How many sets of buffers a call rotates through that touches so many bytes."""
        wanted = -(-L2_TIMES * self.target.l2_bytes // max(touched_bytes, 1))
        return min(max(2, wanted), MAX_SETS)

    @property
    def check_device(self) -> torch.device:
        """Where results are compared: where that is fast, and surely possible."""
        return torch.device("cpu") if self.target.is_dry else self.target.device

    # ---- what went wrong

    def note(self, text: str) -> None:
        """What a reader of the numbers has to know."""
        self.notes.append(text)
        self._write({"note": text})
        self.console.print(f"note: {text}", markup=False, soft_wrap=True)

    def fail(self, what: str, error: BaseException) -> None:
        """An entry that should have run and did not: noted, and the exit status will say so."""
        self.num_failed += 1
        self.note(f"{what} failed: {type(error).__name__}: {first_line(error)}")

    def attempt(self, what: str, make: Callable[[], Job]) -> list[Job]:
        """The job that `make` makes; none where it fails, which is noted."""
        try:
            return [make()]
        except Exception as error:
            self.fail(what, error)
            return []

    # ---- times

    def copy_job(self, moved_bytes: int) -> Job:
        """A device-to-device copy that reads and writes `moved_bytes` in all."""
        num_elems = max(1, moved_bytes // 2 // FLOAT32_BYTES)
        moved_bytes = 2 * FLOAT32_BYTES * num_elems
        sets = [
            (self.random(num_elems, seed), self.random(num_elems, seed + 1000))
            for seed in range(self.num_sets(moved_bytes))
        ]

        def check() -> int:
            source, copied = sets[0]
            same = source.to(self.check_device) == copied.to(self.check_device)
            return int((~same).sum())

        calls = [lambda s=source, c=copied: c.copy_(s) for source, copied in sets]
        calls[0]()
        entry = Entry(COPY, "torch", "Tensor.copy_")
        return Job(entry, calls, moved_bytes, check)

    def large_copy_rate(self) -> float:
        """Bytes read and written by a large copy, in a µs; measured once a run."""
        if self._large_copy is None:
            moved_bytes = 1 << 16 if self.target.is_dry else LARGE_COPY_BYTES
            job = self.copy_job(moved_bytes)
            prepared = self._prepare(job, "copy", job.moved_bytes)
            self._take_turn(prepared)
            self._large_copy = job.moved_bytes / prepared.measurement.p50_us
        return self._large_copy

    def measure(self, jobs: Sequence[Job], op: str, num_bytes: int, **shape: Any) -> None:
        """Measures all `jobs` in turns, and keeps a row of each.

        Args:
            op: what they do.
            num_bytes: the size that they belong to.
            shape: what else tells these rows from others of the size.
        """
        where = f"{op}, {_describe(num_bytes, shape)}"
        large_copy = self.large_copy_rate()
        prepared = []
        for job in jobs:
            try:
                prepared.append(self._prepare(job, op, num_bytes))
            except Exception as error:
                what = f"{job.entry.label}, {where}"
                if isinstance(error, ValueError) and job.may_be_refused:
                    self.note(f"{what}: refused: {first_line(error)}")
                else:
                    self.fail(what, error)
        for repeat in range(self.plan.repeats):
            first = repeat % max(1, len(prepared))
            for one in prepared[first:] + prepared[:first]:
                self._go_on(one, where, self._take_turn)
        for one in prepared:
            self._go_on(one, where, self._check_again)
        measured = [one for one in prepared if not one.has_failed]
        copies = [
            one.job.moved_bytes / one.measurement.p50_us
            for one in measured
            if one.job.entry.label == COPY
        ]
        for one in measured:
            rate = one.job.moved_bytes / one.measurement.p50_us
            self._keep(
                {
                    **report.row(one.measurement, None),
                    **shape,
                    "moved_bytes": one.job.moved_bytes or None,
                    "tb_per_s": round(rate / 1e6, 4) if rate else None,
                    "of_copy": round(rate / copies[0], 4) if rate and copies else None,
                    "of_large_copy": round(rate / large_copy, 4) if rate else None,
                    "timed": one.timed,
                    **one.job.more,
                }
            )

    def _prepare(self, job: Job, op: str, num_bytes: int) -> _Prepared:
        """Warms up, finds out how many calls make a sample, captures them."""
        num_wrong = job.check() if job.check is not None else None

        def rotate() -> None:
            for call in job.calls:
                call()

        rotate()
        self.target.synchronize()
        trial_us = max(min(self.target.clock.sample_us(rotate, 3)), 0.1)
        min_sample_us = 1.0 if self.target.is_dry else MIN_SAMPLE_US
        num_rotations = math.ceil(min_sample_us / trial_us)
        num_rotations = max(1, min(num_rotations, MAX_CALLS // len(job.calls)))

        def sample() -> None:
            for _ in range(num_rotations):
                rotate()

        run: Body = sample
        timed = "stream"
        if job.in_graph:
            try:
                run = self.target.capture(sample)
                timed = "graph"
            except Exception as error:
                self.note(
                    f"{job.entry.label}, {op}: timed on the stream, since its capture failed: "
                    f"{type(error).__name__}: {first_line(error)}"
                )
                self.target.synchronize()
        for _ in range(self.plan.num_warmups):
            run()
        self.target.synchronize()
        batch = num_rotations * len(job.calls)
        sample_us = trial_us * num_rotations
        affordable = int(MAX_JOB_US / self.plan.repeats / sample_us)
        num_samples = max(2, min(self.plan.num_samples, affordable))
        num_elems = num_bytes // FLOAT32_BYTES
        measurement = Measurement(job.entry, op, num_elems, num_bytes, batch, num_wrong=num_wrong)
        return _Prepared(job, measurement, run, num_samples, timed)

    def _go_on(self, one: _Prepared, where: str, step: Callable[[_Prepared], None]) -> None:
        """Does `step` with a job that has not failed yet; the others do not depend on it."""
        if one.has_failed:
            return
        try:
            step(one)
        except Exception as error:
            one.has_failed = True
            self.fail(f"{one.job.entry.label}, {where}", error)

    def _check_again(self, one: _Prepared) -> None:
        if one.job.check is not None:
            one.measurement.num_wrong = (one.measurement.num_wrong or 0) + one.job.check()

    def _take_turn(self, one: _Prepared) -> None:
        times_us = self.target.clock.sample_us(one.run, one.num_samples)
        one.measurement.times_us += [time_us / one.measurement.batch for time_us in times_us]

    # ---- what is kept

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        """At once, so that what was measured outlives a process that is stopped."""
        if self._rows_path is not None:
            with self._rows_path.open("a") as lines:
                lines.write(json.dumps({"benchmark": self.name, **row}) + "\n")

    def add_row(self, row: dict[str, Any]) -> None:
        """A row that was not measured by `measure`."""
        self._keep(row)

    def summary(self) -> dict[str, Any]:
        """For programs: the last line of the output."""
        return {
            "benchmark": self.name,
            "dry": self.target.is_dry,
            "clock": self.target.clock.name,
            "num_rows": len(self.rows),
            "num_wrong": sum(row.get("num_wrong") or 0 for row in self.rows),
            "num_failed": self.num_failed,
            "p50_us": {_key(row): row["p50_us"] for row in self.rows if "p50_us" in row},
        }


def _key(row: dict[str, Any]) -> str:
    parts = [row["label"], row["op"], row.get("shape"), row.get("ranks"), row["num_bytes"]]
    return " | ".join(str(part) for part in parts if part is not None)


def _describe(num_bytes: int, shape: dict[str, Any]) -> str:
    return ", ".join([f"{num_bytes} bytes", *(f"{key} {value}" for key, value in shape.items())])


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(error).strip() or "no text").splitlines()[0]


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row, in tables by what is done to which size."""
    for title, of_table in tables(rows).items():
        console.print(f"\n[bold]{escape(title)}[/bold]")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(HEADINGS[0], no_wrap=True)
        for name in HEADINGS[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in of_table:
            table.add_row(*(escape(cell) for cell in cells(row)))
        console.print(table)


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by the title of their table, in the order in which titles first come."""
    by_title: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_title.setdefault(table_title(row), []).append(row)
    return by_title


HEADINGS = (
    "entry",
    "p50 us",
    "min us",
    "p99 us",
    "TB/s",
    "of copy",
    "of large copy",
    "#wrong",
    "launches",
    "timed",
)


def table_title(row: dict[str, Any]) -> str:
    """Rows of one title stand in one table."""
    parts = [row["op"], report.format_bytes(row["num_bytes"])]
    if row.get("shape") is not None:
        parts.append(str(row["shape"]))
    if row.get("ranks") is not None:
        parts.append(f"{row['ranks']} ranks")
    return ", ".join(parts)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as HEADINGS say."""

    def percent(key: str) -> str:
        return "-" if row.get(key) is None else f"{100 * row[key]:.1f} %"

    rate = row.get("tb_per_s")
    num_wrong = row.get("num_wrong")
    return [
        row["label"],
        *(
            report.format_time(row[key]) if key in row else "-"
            for key in ("p50_us", "min_us", "p99_us")
        ),
        "-" if rate is None else f"{rate:.3f}",
        percent("of_copy"),
        percent("of_large_copy"),
        "-" if num_wrong is None else str(num_wrong),
        "-" if row.get("launches") is None else str(row["launches"]),
        row.get("timed", "-"),
    ]


def parse_sizes(text: str) -> list[int]:
    """An argparse type: bytes of "1K,64M"."""
    return [parse_size(size) for size in text.split(",")]


def parse_arguments(doc: str | None, sizes: str, dry_sizes: str) -> argparse.Namespace:
    """The command line of a benchmark; ends the process with one line when it makes no sense."""
    parser = Parser(doc)
    add = parser.add_argument
    add("--sizes", type=parse_sizes, help=f"default: {sizes}; in a dry run {dry_sizes}")
    target.add_arguments(parser)
    add("-n", "--iters", type=parse_natural(2), help="timed samples a turn (default: 10)")
    add("-w", "--warmup", type=parse_natural(1), help="untimed samples (default: 3)")
    add("--repeats", type=parse_natural(1), help="turns of each entry (default: 3)")
    add("--rows", type=Path, metavar="FILE", help="also append each row to FILE, as JSON")
    args = parser.parse_args()
    few = args.dry_run
    args.sizes = args.sizes or parse_sizes(dry_sizes if few else sizes)
    args.iters = args.iters or (2 if few else 10)
    args.warmup = args.warmup or (1 if few else 3)
    args.repeats = args.repeats or (1 if few else 3)
    return args


def main(name: str, args: argparse.Namespace, benchmark: Callable[[Bench], None]) -> int:
    """Runs `benchmark`, prints its tables and the line of JSON; returns the exit status."""
    try:
        bench = Bench(name, args, target.open_target(args))
    except Exception as error:
        print(f"error: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if bench.target.is_dry:
        torch.set_num_threads(1)  # what runs beside it in CI would rather have the core
        bench.console.print("dry run: no number below is a measurement")
    try:
        benchmark(bench)
    except Exception as error:
        bench.console.print_exception()
        bench.fail(name, error)
    print_rows(bench.console, bench.rows)
    summary = bench.summary()
    print(json.dumps(summary))
    return 1 if summary["num_wrong"] or bench.num_failed or not bench.rows else 0
