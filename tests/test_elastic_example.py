"""The example trains through kills, leaves and joins, with the bits of an undisturbed run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_in_every_build

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_elastic.py"
LIMIT_S = 120


def test_example_ends_with_the_parameters_of_an_undisturbed_run() -> None:
    command = [sys.executable, str(EXAMPLE), "--quick", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"parameters (\w+)", done.stdout)
    assert len(hashes) == 2 and hashes[0] == hashes[1]
    events = re.findall(r"s, step \d+: (\w+)", done.stdout)
    assert events == ["kill", "leave", "join", "kill"]
