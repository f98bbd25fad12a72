"""The readable summary of a run, in Markdown: what ran, the issue's figures, every table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu import frame


def markdown(record: dict[str, Any], facts_lines: Sequence[str]) -> str:
    """The whole text, from the record alone."""
    title = "GPU run"
    warning = []
    if record["dry"]:
        title = "Dry run of the GPU run"
        warning = ["**No number below is a measurement.**", ""]
    parts = [f"# {title}, {record['started']}", "", *warning]
    parts += ["```", *facts_lines, "```", ""]
    parts += ["## Stages", "", *stages(record["stages"]), ""]
    parts += ["## Asked and got", "", *figures(record["figures"]), ""]
    if record["notes"]:
        parts += ["## Notes", "", *(f"- {note}" for note in record["notes"]), ""]
    parts += ["## Measured", "", *HOW, ""]
    by_benchmark: dict[str, list[dict[str, Any]]] = {}
    for row in record["measurements"]:
        by_benchmark.setdefault(row["benchmark"], []).append(row)
    for benchmark, rows in by_benchmark.items():
        parts += [f"### {benchmark}", ""]
        for what, of_table in frame.tables(rows).items():
            parts += [f"{what}", "", *table(frame.HEADINGS, [frame.cells(row) for row in of_table])]
            parts.append("")
    return "\n".join(parts)


HOW = (
    "Times are of one call in µs. A sample is of many calls, one after the other in a CUDA graph",
    "or on the stream; p50, min and p99 are of samples. TB/s (1e12 bytes) count bytes read and",
    'written. "of copy" is the rate over that of a device-to-device copy that moves as many bytes,',
    'in the same turns; "of large copy" over that of one that moves 4 GiB.',
)


def stages(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each step."""
    return table(
        ("stage", "step", "verdict", "s", "limit s", "last words"),
        [
            [
                one["stage"],
                one["name"],
                one["verdict"],
                f"{one['seconds']:.1f}",
                str(one["limit_s"]),
                "" if one["text"].startswith("{") else one["text"],
            ]
            for one in outcomes
        ],
    )


def figures(found: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each figure of the issue."""
    verdict = {True: "yes", False: "no", None: "-"}
    return table(
        ("what", "asked", "got", "met", "by"),
        [
            [one["what"], one["asked"], one["got"], verdict[one["is_met"]], one["row"]]
            for one in found
        ],
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(headings), "|" + "---|" * len(headings), *(line(row) for row in rows)]
