"""examples/parameter_server.py runs in every mode, and draws its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_in_every_build

EXAMPLE = Path(__file__).parents[1] / "examples" / "parameter_server.py"
LIMIT_S = 240


def test_example_trains_in_every_mode(tmp_path: Path) -> None:
    png = tmp_path / "loss.png"
    command = [sys.executable, str(EXAMPLE), "--seconds", "0.5", "--staleness", "1"]
    command += ["--png", str(png)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("all-reduce", "sync", "async", "stale"):
        assert f"│ {mode} " in done.stdout
    assert png.stat().st_size > 10_000
