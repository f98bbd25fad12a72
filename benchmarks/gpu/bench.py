"""Shared by the GPU benchmarks: command line, data, rows.

Entries take turns, so that clock changes affect all of them. The first entry is measured again
under a second label: their ratio is the noise of the run. A failing job does not affect the others.
Rows are written as soon as they are measured, so they survive if the process is killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

import report
from arguments import FLOAT32_BYTES, Parser, parse_each, parse_size
from gpu import tables
from gpu.clocks import Clocks
from gpu.timing import Body, Job, Sampler, num_sets
from protocol import Entry

T = TypeVar("T")
COPY = "copy of as many bytes"
# From here on a graph's memcpy node reaches 0.81 of the rate of a kernel (H100; H200: 0.65), which
# is no ceiling; below, the two rates are alike. benchmarks/results/h100-80gb-hbm3-20261126T000309Z.
KERNEL_COPIES_BYTES = 1 << 30
AGAIN = ", again"
# Fields of a row: which ranks ran where.
ONE_RANK = "one rank"
LOCAL_RANKS = "local ranks of one process, in one launch"


class Bench:
    """One run of one benchmark on the first GPU."""

    def __init__(
        self,
        name: str,
        sizes: list[int],
        is_small: bool,
        rows_path: Path | None,
        mode: str = ONE_RANK,
    ) -> None:
        self.name = name
        self.mode = mode
        self.sizes = sizes
        self.is_small = is_small
        self.rows: list[dict[str, Any]] = []
        self.num_failed = 0
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._rows_path = rows_path
        self._clocks = Clocks()
        self.console = Console(width=160, highlight=False)

    def random(self, num_elems: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(num_elems, generator=generator, device=self.device)

    def num_sets(self, touched_bytes: int) -> int:
        return num_sets(touched_bytes, self.is_small)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)
        self._write({"note": text})

    def attempt(self, what: str, make: Callable[[], T], may_be_refused: bool = False) -> list[T]:
        """A list with the result of `make`; if it fails, an empty list, and a note is recorded."""
        try:
            return [make()]
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {first_line(error)}"
            if may_be_refused and isinstance(error, ValueError):
                self.note(f"refused: {text}")
            else:
                self.num_failed += 1
                self.note(f"failed: {text}")
            return []

    def copy_job(self, moved_bytes: int) -> Job:
        """A device-to-device copy in a graph that reads and writes `moved_bytes` in all."""
        is_kernel = moved_bytes >= KERNEL_COPIES_BYTES
        num_elems = max(1, moved_bytes // 2 // FLOAT32_BYTES)
        pairs = [
            (self.random(num_elems, seed), self.random(num_elems, seed + 1000))
            for seed in range(self.num_sets(moved_bytes))
        ]
        calls: list[Body] = [
            partial(torch.add, source, 0, out=copied)
            if is_kernel
            else partial(copied.copy_, source)
            for source, copied in pairs
        ]
        return Job(
            Entry(COPY, "torch", "torch.add" if is_kernel else "Tensor.copy_"),
            calls,
            2 * FLOAT32_BYTES * num_elems,
            partial(check_copy, *pairs[0], calls[0]),
        )

    def measure(self, jobs: Sequence[Job], op: str, num_bytes: int, **shape: Any) -> None:
        """Measures all jobs in turns and records a row for each; `shape` are fields that tell these
        rows from others of the same size."""
        where = ", ".join([op, report.format_bytes(num_bytes), *map(str, shape.values())])
        if jobs:
            entry = replace(jobs[0].entry, label=jobs[0].entry.label + AGAIN)
            jobs = [jobs[0], replace(jobs[0], entry=entry), *jobs[1:]]
        ready: list[Sampler] = []
        for job in jobs:
            make = partial(Sampler, job, op, num_bytes, self.is_small)
            ready += self.attempt(f"{job.entry.label}, {where}", make, job.may_be_refused)

        def go_on(step: Callable[[Sampler], None], first: int) -> None:
            for one in ready[first:] + ready[:first]:
                if not self.attempt(f"{one.job.entry.label}, {where}", partial(step, one)):
                    ready.remove(one)

        for turn in range(1 if self.is_small else 3):
            go_on(Sampler.take_turn, turn % max(1, len(ready)))
        go_on(Sampler.check_again, 0)
        times_us = {one.job.entry.label: one.measurement.p50_us for one in ready}
        rates = {one.job.entry.label: one.job.moved_bytes / one.measurement.p50_us for one in ready}
        for one in ready:
            label = one.job.entry.label
            rate = rates[label]
            row = report.row(one.measurement, None) | shape | self._clocks.during(one.spans)
            row |= {"timed": one.timed, "moved_bytes": one.job.moved_bytes or None}
            row["tb_per_s"] = round(rate / 1e6, 4) or None
            row["of_copy"] = round(rate / rates[COPY], 4) if rate and COPY in rates else None
            if (first := label.removesuffix(AGAIN)) != label and first in times_us:
                row["noise"] = round(times_us[label] / times_us[first], 4)
            self.keep(row)
        tables.print_rows(self.console, self.rows[-len(ready) :] if ready else [])

    def keep(self, row: dict[str, Any]) -> None:
        """Records and writes a row, without its unknown fields."""
        row = {"mode": self.mode} | {key: value for key, value in row.items() if value is not None}
        self.rows.append(row)
        self._write(row)

    def keep_times(self, times_us: Sequence[float], **fields: Any) -> None:
        """Records the samples of what `measure` cannot time."""
        p50_us, p99_us = np.percentile(times_us, [50, 99], method="inverted_cdf")
        times = {"min_us": min(times_us), "p50_us": p50_us, "p99_us": p99_us}
        rounded = {name: round(float(us), 3) for name, us in times.items()}
        self.keep({**fields, **rounded, "num_samples": len(times_us)})

    def _write(self, row: dict[str, Any]) -> None:
        if self._rows_path is not None:
            with self._rows_path.open("a") as lines:
                lines.write(json.dumps({"benchmark": self.name, **row}) + "\n")


def first_line(error: Exception) -> str:
    """The first line of the error's text; for an error in another process, the last line."""
    lines = str(error).strip().splitlines() or ["no text"]
    return lines[-1 if isinstance(error, ProcessRaisedException) else 0]


def check_copy(source: Tensor, copied: Tensor, call: Callable[[], object]) -> int:
    """The number of elements that `call` fails to copy from one tensor to the other."""
    copied.fill_(torch.nan)
    call()
    return int((source != copied).sum())


def main(
    name: str,
    doc: str | None,
    benchmark: Callable[[Bench], None],
    sizes: str,
    small_sizes: str,
    mode: str = ONE_RANK,
) -> None:
    """Runs a benchmark; exits with 0 if everything was measured and correct."""
    parser, parse_sizes = Parser(doc), parse_each(parse_size)
    add = parser.add_argument
    add("--sizes", type=parse_sizes, help=f"default: {sizes}; with --small {small_sizes}")
    add("--small", action="store_true", help="run every line, on few bytes; measures nothing")
    add("--rows", type=Path, metavar="FILE", help="also append each row to FILE, as JSON")
    args = parser.parse_args()
    chosen = args.sizes or parse_sizes(small_sizes if args.small else sizes)
    bench = Bench(name, chosen, args.small, args.rows, mode)
    bench.attempt(name, partial(benchmark, bench))
    num_wrong = sum(row.get("num_wrong", 0) for row in bench.rows)
    print(f"{len(bench.rows)} rows, {num_wrong} elements wrong, {bench.num_failed} failed")
    sys.exit(1 if num_wrong or bench.num_failed or not bench.rows else 0)
