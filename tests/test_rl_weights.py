"""examples/rl_weights.py: samplers follow a trainer, and one is killed and comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_in_every_build

EXAMPLE = Path(__file__).parents[1] / "examples" / "rl_weights.py"
LIMIT_S = 120


@pytest.mark.parametrize("options", [(), ("--wire-dtype", "bfloat16")], ids=["full", "bfloat16"])
def test_samplers_have_the_trainers_weights(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(EXAMPLE), "--samples", "2", "--bytes", "4", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout and "sampler 2, back" in done.stdout
