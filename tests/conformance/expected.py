"""The list of what each test of the suite does on Gloo and on rota, one file per version of torch.

A line is `test gloo rota reason`. `gloo` and `rota` have a letter per world size in WORLD_SIZES:

    p  passes
    l  torch lets only Gloo or MPI run it, and it passes with that gate lifted
    s  torch skips it on a machine like this one, for want of GPUs or ranks, or because it is broken
    x  cannot pass for a backend that is not part of torch
    f  fails

The reason is the line of torch that gates (l), skips (s) or fails (x) the test, or the cause (f). The
reason of an x ends with the error, and the test has to fail with that error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from suite import Result

WORLD_SIZES = (2, 3, 4)
BACKENDS = ("gloo", "rota")
UNKNOWN = "?"

HEADER = """\
# What each test of torch's suite does on Gloo and on rota with 2, 3 and 4 ranks on a machine without a GPU.
# The letters: p passes, l passes with a gate lifted, s skipped, x impossible for a third party, f fails;
# see expected.py. `run.py --record` rewrites this file; it keeps x and reasons of x and f as they are.
"""


@dataclass
class Expectation:
    """What one test does: per backend a letter for each world size."""

    outcomes: dict[str, str] = field(
        default_factory=lambda: {backend: UNKNOWN * len(WORLD_SIZES) for backend in BACKENDS}
    )
    reason: str = ""

    def get(self, backend: str, world_size: int) -> str:
        return self.outcomes[backend][WORLD_SIZES.index(world_size)]

    def set(self, backend: str, world_size: int, letter: str) -> None:
        letters = list(self.outcomes[backend])
        letters[WORLD_SIZES.index(world_size)] = letter
        self.outcomes[backend] = "".join(letters)

    def is_met_by(self, backend: str, world_size: int, result: Result) -> bool:
        letter = self.get(backend, world_size)
        if letter == "x":
            return result.status == "fail" and self.reason.endswith(result.error)
        return letter == result.letter

    def lags(self) -> bool:
        """Whether rota fails or skips a test that Gloo passes, for no line of torch."""
        pairs = zip(self.outcomes["gloo"], self.outcomes["rota"], strict=True)
        return any(gloo in "pl" and rota in "sf?" for gloo, rota in pairs)


def list_path(torch_version: str) -> Path:
    """The list for a version of torch: patch releases and builds share one."""
    major, minor = torch_version.split(".")[:2]
    return Path(__file__).parent / f"torch-{major}.{minor}.txt"


def read(path: Path) -> dict[str, Expectation]:
    expectations = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w+) +([plsxf?]{3}) +([plsxf?]{3})(?: +(.*))?", line)
        if match is None:
            raise ValueError(f"{path}: expected `test gloo rota reason`, got {line!r}")
        name, gloo, rota, reason = match.groups()
        expectations[name] = Expectation({"gloo": gloo, "rota": rota}, reason or "")
    return expectations


def write(path: Path, expectations: Mapping[str, Expectation]) -> None:
    width = max(map(len, expectations))
    lines = [
        f"{name:{width}} {entry.outcomes['gloo']} {entry.outcomes['rota']} {entry.reason}".rstrip()
        for name, entry in sorted(expectations.items())
    ]
    path.write_text(HEADER + "\n".join(lines) + "\n")
