"""Two commits, each with a build of its own, in turns: which rows of a benchmark became slower.

    git worktree add ../before COMMIT && make -C ../before venv
    python benchmarks/commits.py --before ../before -- collectives.py --backends rota --ranks 2

A turn runs the benchmark of this checkout, with the arguments after --, on one of the two builds;
every other pair of turns begins with the other one. A row's time is the median of its turns'
medians, and its noise says how far two turns of one commit are apart.
"""

from __future__ import annotations

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

import machine
from arguments import Parser, parse_natural
from record import Run
from report import format_bytes, format_time, print_table

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


def main() -> None:
    """Exits with 0 also where rows became slower, which is a valid result."""
    parser = Parser(__doc__)
    add = parser.add
    add("--before", type=Path, required=True, help="the checkout of the other commit, built")
    add("--turns", type=parse_natural(2), default=6, metavar="N", help="of each commit")
    add("--ranks", type=parse_natural(1), default=2, help="of the benchmark")
    own = "each commit's own benchmark, where this one's needs what the other build lacks"
    add("--own-scripts", action="store_true", help=own)
    parser.add_json()
    add("command", nargs="+", help="a benchmark of both checkouts and its arguments, after --")
    args = parser.parse_args()
    if not (args.before / ".venv" / "bin" / "python").exists():
        sys.exit(f"error: {args.before} has no build: run make venv there")

    script, *arguments = args.command
    name = f"commits-{script.removesuffix('.py')}"
    times: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    checkouts = {"before": args.before.resolve(), "after": HERE.parent}
    with Run("commits", args.ranks, args, name) as run, tempfile.TemporaryDirectory() as directory:
        commit = machine.git_commit(args.before)
        for turn in track(range(args.turns), "turns"):
            order: Iterable[str] = checkouts if turn % 2 == 0 else reversed(checkouts)
            for which in order:
                checkout = checkouts[which]
                path = (checkout / "benchmarks" if args.own_scripts else HERE) / script
                for row in run_turn(checkout, path, arguments, Path(directory, "record.json")):
                    key = (row["label"], row["op"], row["num_bytes"])
                    times[key][which].append(row["p50_us"])
        rows = [
            Row(*key, of_commit["before"], of_commit["after"])
            for key, of_commit in times.items()
            if len(of_commit) == len(checkouts)  # an entry that only one commit has
        ]
        title = f"{' '.join(args.command)}: {run.git_commit[:10]} over {commit[:10]}"
        lines = [
            (
                f"{row.label} {row.op} {format_bytes(row.num_bytes)}",
                format_time(median(row.before_us)),
                format_time(median(row.after_us)),
                f"{row.ratio:.2f}",
                f"{row.noise:.2f}",
                "slower" if row.is_slower else "",
            )
            for row in rows
        ]
        print_table(run.console, title, ("", "before", "after", "ratio", "noise", ""), lines)
        run.finish(
            {"before": commit, "rows": [asdict(row) for row in rows]},
            num_rows=len(rows),
            num_slower=sum(row.is_slower for row in rows),
            median_ratio=round(median(row.ratio for row in rows), 3),
        )


if __name__ == "__main__":
    main()
