"""examples/same_bits.py: the demo's GPT has the same parameters on any number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_in_every_build

EXAMPLE = Path(__file__).parents[1] / "examples" / "same_bits.py"
LIMIT_S = 240


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--context", "8", "--steps", "11", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_hashes_are_the_same_on_any_number_of_ranks(optimizer: str) -> None:
    done = run("--optimizer", optimizer, "--ranks", "1", "3", "mixed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same") == 3


def test_narrow_wire_is_seen_to_round_each_rank() -> None:
    done = run("--wire-dtype", "bfloat16", "--ranks", "1", "4")
    assert done.returncode == 1
    assert "DIFFERENT" in done.stdout
    assert "the parameters on 4 ranks differ from those on 1" in done.stderr
