"""The list of what each test of the suite does on Gloo and on rota, one file per version of torch.

A line is `test gloo rota reason`. `gloo` and `rota` have a letter per world size in WORLD_SIZES:
p the test passes, s torch skips it, f it fails. A test that Gloo passes and rota does not has a
reason: the line of torch that skips it, or the cause of a failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORLD_SIZES = (2, 3, 4)
BACKENDS = ("gloo", "rota")
UNKNOWN = "?"

HEADER = """\
# What each test of torch's suite does with 2, 3 and 4 ranks on a machine without a GPU:
# p passes, s is skipped by torch, f fails. The reason, needed wherever Gloo passes and rota does not, is the
# line of torch that skips the test, or why it fails.
# Written by `python tests/conformance/run.py --record`, except for the reasons of failures.
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

    def needs_reason(self) -> bool:
        """Whether Gloo passes at a world size at which rota does not."""
        pairs = zip(self.outcomes["gloo"], self.outcomes["rota"], strict=True)
        return any(gloo == "p" != rota for gloo, rota in pairs)


def list_path(torch_version: str) -> Path:
    """The list for a version of torch: patch releases and builds share one."""
    major, minor = torch_version.split(".")[:2]
    return Path(__file__).parent / f"torch-{major}.{minor}.txt"


def read(path: Path) -> dict[str, Expectation]:
    expectations = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"(\w+) +([psf?]{3}) +([psf?]{3})(?: +(.*))?", line)
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
