"""Runs programs of the repository as a person would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 300  # ends a hang


def run_python(*arguments: str, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Fails the test if Python ends with another code. Options are those of subprocess.run."""
    options = {"cwd": ROOT, "timeout": LIMIT_S} | options
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done
