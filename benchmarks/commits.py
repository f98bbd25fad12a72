"""Two commits, each with a build of its own, in turns: which rows of a benchmark became slower.

    git worktree add ../before COMMIT && make -C ../before venv
    python benchmarks/commits.py --before ../before -- collectives.py --backends rota --ranks 2

A turn runs the benchmark of this checkout, with the arguments after --, on one of the two builds;
every other pair of turns begins with the other one. A row's time is the median of its turns'
medians, and its noise says how far two turns of one commit are apart. The last line of the output
is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track

import driver
import machine
import report
from arguments import Parser, parse_natural

HERE = Path(__file__).resolve().parent
# A row counts as slower above this, beyond its noise.
TOLERANCE = 1.03

# What tells rows apart that one benchmark measures.
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Row:
    """One row of the benchmark; times in microseconds, one for each turn."""

    label: str
    op: str
    num_bytes: int
    before_us: list[float]
    after_us: list[float]

    @property
    def ratio(self) -> float:
        """Above 1: slower than before."""
        return median(self.after_us) / median(self.before_us)

    @property
    def noise(self) -> float:
        """The larger quotient of quartiles of a commit's turns."""
        return max(_spread(self.before_us), _spread(self.after_us))

    @property
    def is_slower(self) -> bool:
        """Whether noise does not explain it."""
        return self.ratio > TOLERANCE * self.noise


def _spread(times: list[float]) -> float:
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] / ordered[quarter]


def run_turn(
    checkout: Path, script: Path, arguments: list[str], record: Path
) -> list[dict[str, Any]]:
    """Runs a benchmark on the build of a checkout; the rows of its record."""
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python), str(script), *arguments, "--json", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not record.exists():
        sys.exit(
            f"error: {script.name} failed on the build of {checkout}; does it need what that build "
            f"lacks (--own-scripts)?\n{done.stdout[-2000:]}{done.stderr}"
        )
    rows: list[dict[str, Any]] = json.loads(record.read_text())["measurements"]
    record.unlink()
    return rows


def compare(args: argparse.Namespace) -> list[Row]:
    """Lets the commits take turns."""
    times: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    checkouts = {"before": args.before.resolve(), "after": HERE.parent}
    name, *arguments = args.command
    with tempfile.TemporaryDirectory() as directory:
        for turn in track(range(args.turns), "turns"):
            order: Iterable[str] = checkouts if turn % 2 == 0 else reversed(checkouts)
            for which in order:
                checkout = checkouts[which]
                script = (checkout / "benchmarks" if args.own_scripts else HERE) / name
                record = Path(directory) / "record.json"
                for row in run_turn(checkout, script, arguments, record):
                    key = (row["label"], row["op"], row["num_bytes"])
                    times[key][which].append(row["p50_us"])
    return [
        Row(*key, of_commit["before"], of_commit["after"])
        for key, of_commit in times.items()
        if len(of_commit) == len(checkouts)  # an entry that only one commit has
    ]


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, prints the table, writes the record and sums up."""
    if not (args.before / ".venv" / "bin" / "python").exists():
        sys.exit(f"error: {args.before} has no build: run make venv there")
    name = f"commits-{args.command[0].removesuffix('.py')}"
    run = driver.Run("commits", name, args.ranks, args)
    commit = machine.git_commit(args.before)
    rows = compare(args)
    report.print_labelled(
        run.console,
        f"{' '.join(args.command)}: {run.git_commit[:10]} over {commit[:10]}",
        ("", "before", "after", "ratio", "noise", ""),
        [
            (
                f"{row.label} {row.op} {report.format_bytes(row.num_bytes)}",
                report.format_time(median(row.before_us)),
                report.format_time(median(row.after_us)),
                f"{row.ratio:.2f}",
                f"{row.noise:.2f}",
                "slower" if row.is_slower else "",
            )
            for row in rows
        ],
    )
    run.write_record({"before": commit, "rows": [asdict(row) for row in rows]})
    return {
        "benchmark": "commits",
        "json": str(run.json_path),
        "num_rows": len(rows),
        "num_slower": sum(row.is_slower for row in rows),
        "median_ratio": round(median(row.ratio for row in rows), 3),
    }


def main() -> int:
    """Returns the exit status: 0 also where rows became slower, which is a valid result."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--before", type=Path, required=True, help="the checkout of the other commit, built")
    add(
        "--turns",
        type=parse_natural(2),
        default=6,
        metavar="N",
        help="of each commit (default: %(default)s)",
    )
    add("--ranks", type=parse_natural(1), default=2, help="of the benchmark (default: %(default)s)")
    add(
        "--own-scripts",
        action="store_true",
        help="each commit's own benchmark, where this one's needs what the other build lacks",
    )
    add("--json", type=Path, help="where to write the record (default: benchmarks/results/)")
    add("command", nargs="+", help="a benchmark of both checkouts and its arguments, after --")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
