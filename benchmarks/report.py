"""Tables and JSON of measurements, independent of how they were taken.

GB is 1e9 bytes, times are in us. algbw is message bytes over the median time; busbw is algbw times
the factor of nccl-tests' doc/PERFORMANCE.md, which makes it comparable with a link's bandwidth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from interleave import Measurement
from operations import OPERATIONS
from protocol import FAKE_AND_BARRIER

ROOFLINE = "memcpy"
BEST_MPI = "best MPI"

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]


def row(result: Measurement, num_ranks: int | None) -> Row:
    """One measurement as a row of the JSON record; without busbw if `num_ranks` is None."""
    algbw = result.num_bytes / result.p50_us / 1e3 if result.num_bytes else None
    busbw = None
    if algbw is not None and num_ranks is not None and result.entry.label != ROOFLINE:
        # Hooks are counted as the all-reduce that they consist of.
        operation = OPERATIONS.get(result.op, OPERATIONS["all_reduce"])
        busbw = algbw * operation.busbw_factor(num_ranks)
    return {
        **asdict(result.entry),
        "op": result.op,
        "num_bytes": result.num_bytes,
        "num_elems": result.num_elems,
        "batch": result.batch,
        "num_samples": len(result.times_us),
        "p50_us": round(result.p50_us, 3),
        "min_us": round(result.min_us, 3),
        "p99_us": round(result.p99_us, 3),
        "algbw_gb_per_s": algbw and round(algbw, 6),
        "busbw_gb_per_s": busbw and round(busbw, 6),
        "num_wrong": result.num_wrong,
    }


def speedups(measurements: Sequence[Measurement], mpi_names: Iterable[str]) -> list[Row]:
    """How many times faster each entry of rota is than Gloo, the best MPI and the rooflines, by
    median times at one size.

    The rooflines are memcpy and torch's fake backend, which moves nothing, without and with a
    barrier.
    """
    groups = {"gloo": {"gloo"}, BEST_MPI: set(mpi_names)}
    groups |= {roofline: {roofline} for roofline in ("fake", FAKE_AND_BARRIER, ROOFLINE)}
    ratios = []
    for num_bytes, at_size in groupby(measurements, key=lambda result: result.num_bytes):
        results = list(at_size)
        for ours in (result for result in results if result.entry.backend == "rota"):
            for against, backends in groups.items():
                peers = [result for result in results if result.entry.backend in backends]
                if peers:
                    best = min(peers, key=lambda result: result.p50_us)
                    ratio: Row = {"num_bytes": num_bytes, "entry": ours.entry.label}
                    ratio |= {"peer": best.entry.label, "against": against}
                    ratios.append({**ratio, "speedup": best.p50_us / ours.p50_us})
    return ratios


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str] | None]
) -> None:
    """One line per row: a label, and numbers to its right; a rule below the row before a None."""
    table = Table(title=title)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        if cells is None:
            table.add_section()
        else:
            table.add_row(*cells)
    console.print(table)


def print_columns(console: Console, title: str, rows: Iterable[Row], columns: Columns) -> None:
    """One line per row; `columns` are the headings, and what a row shows below them."""
    lines = [
        [show.format(**row) if isinstance(show, str) else show(row) for show in columns.values()]
        for row in rows
    ]
    print_table(console, title, list(columns), lines)


def print_measurements(console: Console, rows: Sequence[Row], ratios: Sequence[Row]) -> None:
    """A table with a line per size and entry; and one of how many times faster rota is."""
    lines: list[Sequence[str] | None] = []
    for num_bytes, at_size in groupby(rows, key=lambda row: row["num_bytes"]):
        lines += [
            (
                cells["label"],
                format_bytes(num_bytes),
                *(format_time(cells[key]) for key in ("p50_us", "min_us", "p99_us")),
                *(optional(cells[key], ".3f") for key in ("algbw_gb_per_s", "busbw_gb_per_s")),
                optional(cells["num_wrong"], "d"),
                str(cells["batch"]),
            )
            for cells in at_size
        ]
        lines.append(None)
    headings = ["backend", "bytes", "p50 us", "min us", "p99 us", "algbw GB/s", "busbw GB/s"]
    print_table(console, "one call on the slowest rank", [*headings, "#wrong", "batch"], lines)
    console.print(
        "[dim]A sample is `batch` calls in a row, divided by `batch`: above 1, min and p99 are of "
        "such means.[/dim]\n",
        soft_wrap=True,
    )
    if not ratios:
        return
    peers = list(dict.fromkeys(ratio["against"] for ratio in ratios))
    lines = []
    for num_bytes, at_size in groupby(ratios, key=lambda ratio: ratio["num_bytes"]):
        for entry, of_entry in groupby(at_size, key=lambda ratio: ratio["entry"]):
            cells = {
                ratio["against"]: (f"{ratio['peer']} " if ratio["against"] == BEST_MPI else "")
                + f"{ratio['speedup']:.3g}"
                for ratio in of_entry
            }
            lines.append((entry, format_bytes(num_bytes), *(cells[peer] for peer in peers)))
    title = "peer's time / rota's time: above 1, rota is faster"
    print_table(console, title, ("entry", "bytes", *peers), lines)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes the record of one run, one measurement per line, so that records are easy to diff."""
    lists = {key: value for key, value in record.items() if isinstance(value, list)}
    head = {key: value for key, value in record.items() if key not in lists}
    parts = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
    for key, values in lists.items():
        lines = ",\n".join(f"    {json.dumps(value)}" for value in values)
        parts.append(f'  "{key}": [\n{lines}\n  ]' if values else f'  "{key}": []')
    write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically: readers see the old contents or all of `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def format_bytes(num_bytes: int) -> str:
    """Formats as on the command line: 4, 64K, 1M."""
    if num_bytes == 0:
        return "-"
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return str(num_bytes)


def format_time(time_us: float) -> str:
    """Microseconds with four digits."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def optional(value: float | None, form: str) -> str:
    """A value that may not have been measured."""
    return "-" if value is None else format(value, form)
