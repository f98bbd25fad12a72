"""Rows and outcomes as tables, for the screen and, in Markdown, for the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import report

HEADINGS = ("entry", "p50 us", "min us", "p99 us", "TB/s", "of copy", "#wrong", "timed", "SM MHz")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose text is Markdown."""
    made = Table(*headings, box=box.MARKDOWN)
    for column in made.columns:
        column.no_wrap = True
    for row in rows:
        made.add_row(*(escape(cell.replace("|", "\\|")) for cell in row))
    return made


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    by_title: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        parts = [row.get("op", "?"), report.format_bytes(row.get("num_bytes", 0)), row.get("shape")]
        parts.append(f"{row['ranks']} ranks" if "ranks" in row else None)
        parts.append(row.get("mode"))
        by_title.setdefault(", ".join(part for part in parts if part), []).append(row)
    for title, of_table in by_title.items():
        console.print(f"\n{title}", markup=False)
        console.print(table(HEADINGS, [_cells(row) for row in of_table]))


def _cells(row: dict[str, Any]) -> list[str]:
    label = row.get("label", "?")
    if "noise" in row:
        label += f" (noise: {row['noise']:.3f})"
    if "throttled" in row:
        label += f" (THROTTLED: {', '.join(row['throttled'])})"
    return [
        label,
        *(
            report.format_time(row[key]) if key in row else "-"
            for key in ("p50_us", "min_us", "p99_us")
        ),
        f"{row['tb_per_s']:.3f}" if "tb_per_s" in row else "-",
        f"{row['of_copy']:.1%}" if "of_copy" in row else "-",
        str(row.get("num_wrong", "-")),
        row.get("timed", "-"),
        "-".join(f"{mhz:.0f}" for mhz in row.get("sm_mhz", "")) or "-",
    ]
