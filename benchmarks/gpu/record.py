"""The files that describe a run: <gpu>-<date>.json for programs, .md for people."""

from __future__ import annotations

import io
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

import machine
import report
from gpu import tables
from gpu.asked import asked
from gpu.facts import Facts, slug

HOW = """\
Times are of one call in µs. A sample is of many calls, one after the other in a CUDA graph or on
the stream; p50, min and p99 are of samples. TB/s (1e12 bytes) count bytes read and written. "of
copy" is the rate over that of a device-to-device copy, in a graph, of as many bytes, in the same
turns. "noise" is the ratio of one entry's times, measured twice."""
NOTHING = "**Nothing was measured: every line ran, on few bytes. No number below tells of a GPU.**"


class Record:
    """The results of a run so far."""

    def __init__(self, output: Path, facts: Facts, commit: str, is_small: bool) -> None:
        started = datetime.now(timezone.utc)
        stem = f"{'dry' if is_small else slug(facts)}-{started:%Y%m%dT%H%M%SZ}"
        output.mkdir(parents=True, exist_ok=True)
        self.json_path = output / f"{stem}.json"
        self.summary_path = output / f"{stem}.md"
        self.log_path = output / f"{stem}.log"
        self.rows_path = output / f"{stem}.rows.jsonl"
        self.steps: list[dict[str, Any]] = []
        self._is_small = is_small
        self._about = {
            "benchmark": "gpu",
            "measured": not is_small,
            "started": started.isoformat(timespec="seconds"),
            "git_commit": commit,
            "machine": machine.describe() | facts,
        }

    def write(self) -> None:
        rows, notes = self._read_rows()
        try:
            figures = asked(rows)
        except Exception as error:  # a row may lack a field
            figures = []
            notes.append(f"no figures: {type(error).__name__}: {error}")
        if self._is_small:
            figures = [one | {"got": "not measured", "met": None} for one in figures]
        record = {**self._about, "notes": notes, "steps": self.steps, "asked": figures}
        report.write_json(self.json_path, {**record, "measurements": rows})
        text = io.StringIO()
        page = Console(file=text, width=400, highlight=False, soft_wrap=True)
        self.show(page)
        for paragraph in (*(f"- {note}" for note in notes), "", HOW):
            page.print(paragraph, markup=False)
        tables.print_rows(page, [row for row in rows if "p50_us" in row])
        lines = [line.rstrip() for line in text.getvalue().split("\n")]
        report.write_whole(self.summary_path, "\n".join(lines))

    def show(self, page: Console) -> None:
        """Prints the steps, and the targets with their results."""
        record = json.loads(self.json_path.read_text())
        heading = [f"# GPU run, {record['started']}", "", *([NOTHING] if self._is_small else [])]
        heading += [f"{name}: {record[name]}" for name in ("git_commit", "machine")]
        page.print("\n".join(heading), markup=False, soft_wrap=True)
        steps = [
            [one["name"], one["verdict"], f"{one['seconds']:.1f}", one["text"]]
            for one in record["steps"]
        ]
        page.print(tables.table(("step", "verdict", "s", "last words"), steps))
        verdict = {True: "yes", False: "no", None: "-"}
        got = [
            [one["what"], one["asked"], one["got"], verdict[one["met"]], one.get("row", "-")]
            for one in record["asked"]
        ]
        page.print(tables.table(("what", "asked", "got", "met", "by"), got))

    def _read_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        rows, notes = [], []
        lines = self.rows_path.read_text().splitlines() if self.rows_path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
                is_note = "note" in row
            except (ValueError, TypeError):  # from a process that was killed while writing
                notes.append(f"not a row: {line[:100]}")
                continue
            if is_note:
                notes.append(f"{row.get('benchmark')}: {row['note']}")
            else:
                rows.append(row)
        return rows, notes
