"""Lists the current records in benchmarks/results/README.md.

    python benchmarks/index.py            # after a benchmark that is to be kept
    python benchmarks/index.py --prune    # also deletes all others

A record is current if it is the newest of its benchmark on its machine, or if a text or a program
of the repository names it by its time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from arguments import Parser
from machine import REPOSITORY
from record import RESULTS
from report import write_whole

TIME = re.compile(r"\d{8}T\d{6}Z")
TEXTS = ("*.md", "*.py", "*.h", "*.cpp", "*.cu")
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "python", "tests")
HEAD = """\
# Current records

Written by `python benchmarks/index.py`: the newest record of each benchmark on each machine, and
those that a text names. Pictures and summaries have the name of their record.

| record | machine | named in |
|---|---|---|
"""


def names() -> dict[str, set[str]]:
    """The files that name a record, by its time."""
    files = list(REPOSITORY.glob("*.md"))
    for folder in FOLDERS:
        files += [path for text in TEXTS for path in (REPOSITORY / folder).rglob(text)]
    found: dict[str, set[str]] = {}
    for path in files:
        if not path.is_relative_to(RESULTS):
            for time in TIME.findall(path.read_text(errors="replace")):
                found.setdefault(time, set()).add(str(path.relative_to(REPOSITORY)))
    return found


def machine_of(record: Path) -> str:
    machine = json.loads(record.read_text()).get("machine")
    return str(machine.get("gpu") or machine["cpu"]) if isinstance(machine, dict) else "unknown"


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--prune", action="store_true", help="delete the records that are not current")
    args = parser.parse_args()

    named = names()
    records = sorted(RESULTS.glob("*.json"), key=lambda path: TIME.findall(path.name))
    newest = {(TIME.sub("", path.name), machine_of(path)): path for path in records}
    current = [
        path for path in records if path in newest.values() or named.get(TIME.findall(path.name)[0])
    ]
    lines = []
    for path in current:
        (time,) = TIME.findall(path.name)
        where = ", ".join(sorted(named.get(time, ())))
        lines.append(f"| [{path.stem}]({path.name}) | {machine_of(path)} | {where} |\n")
    write_whole(RESULTS / "README.md", HEAD + "".join(lines))
    kept = {TIME.findall(path.name)[0] for path in current}
    others = [path for path in RESULTS.iterdir() if not kept & set(TIME.findall(path.name))]
    for path in others if args.prune else ():
        if path.name != "README.md":
            path.unlink()
    print(f"{len(records)} records, {len(current)} current")


if __name__ == "__main__":
    main()
