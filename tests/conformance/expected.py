"""The list of what each test of the suite does on Gloo and on rota, one file per version of torch.

A line is `test gloo rota reason`. `gloo` and `rota` have a letter per world size in WORLD_SIZES:

    p  passes
    l  torch lets only Gloo or MPI run it, and it passes with that gate lifted
    s  torch skips it on a machine like this one, for want of GPUs or ranks, or because it is broken
    x  no third party's backend can pass it; see suite.EXCLUSIONS
    f  fails

The reason is the line of torch that gates, skips or excludes the test on rota, and the error.
Tests that pass everywhere, and those that torch skips everywhere, are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from suite import Result

# The subgroup tests need 8: torch skips them in smaller worlds.
WORLD_SIZES = (2, 3, 4, 8)
BACKENDS = ("gloo", "rota")
NOT_RUN = "?"
# If a test does one thing at one world size and another at the next, the reason is that of the
# letter further right.
LETTERS = "?psxlf"

HEADER = f"""\
# What each test of torch's suite does on Gloo and on rota with {", ".join(map(str, WORLD_SIZES))}
# ranks, without GPUs: p passes, l passes with a gate lifted, s skipped, x excluded by torch,
# f fails; see expected.py. Written by `run.py --record`.
"""
COUNTED = {"pass": "p", "are skipped": "s"}


@dataclass
class Expectation:
    """What one test does: per backend a letter for each world size."""

    outcomes: dict[str, str] = field(
        default_factory=lambda: {backend: NOT_RUN * len(WORLD_SIZES) for backend in BACKENDS}
    )
    reason: str = ""

    def get(self, backend: str, world_size: int) -> str:
        return self.outcomes[backend][WORLD_SIZES.index(world_size)]

    def enter(self, backend: str, world_size: int, result: Result) -> None:
        letters = list(self.outcomes[backend])
        letters[WORLD_SIZES.index(world_size)] = result.letter
        self.outcomes[backend] = "".join(letters)
        if backend == "rota" and result.letter == max(letters, key=LETTERS.index):
            self.reason = str(result)

    def lags(self) -> bool:
        """Whether rota does not pass where Gloo passes, for no line of torch."""
        pairs = zip(self.outcomes["gloo"], self.outcomes["rota"], strict=True)
        return any(gloo == "p" and rota not in "plx" for gloo, rota in pairs)


def list_path(torch_version: str) -> Path:
    """The list for a version of torch; patch releases and builds share one."""
    major, minor = torch_version.split(".")[:2]
    return Path(__file__).parent / f"torch-{major}.{minor}.txt"


def counts_of(path: Path) -> dict[str, int]:
    """How many tests pass everywhere and are skipped everywhere, by their letter."""
    text = path.read_text()
    counts = {}
    for what, letter in COUNTED.items():
        (count,) = re.findall(rf"^# (\d+) others {what} everywhere$", text, re.MULTILINE)
        counts[letter] = int(count)
    return counts


def read(path: Path) -> dict[str, Expectation]:
    expectations = {}
    letters = f"([{LETTERS}]{{{len(WORLD_SIZES)}}})"
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(rf"(\w+) +{letters} +{letters}(?: +(.*))?", line)
        if match is None:
            raise ValueError(f"{path}: expected `test gloo rota reason`, got {line!r}")
        name, gloo, rota, reason = match.groups()
        expectations[name] = Expectation({"gloo": gloo, "rota": rota}, reason or "")
    return expectations


def write(path: Path, expectations: Mapping[str, Expectation]) -> None:
    def is_counted(entry: Expectation, letter: str) -> bool:
        return set("".join(entry.outcomes.values())) == {letter}

    header = HEADER
    for what, letter in COUNTED.items():
        count = sum(is_counted(entry, letter) for entry in expectations.values())
        header += f"# {count} others {what} everywhere\n"
    lines = [
        f"{name} {entry.outcomes['gloo']} {entry.outcomes['rota']} {entry.reason}".rstrip()
        for name, entry in sorted(expectations.items())
        if not any(is_counted(entry, letter) for letter in COUNTED.values())
    ]
    path.write_text(header + "\n".join(lines) + "\n")
