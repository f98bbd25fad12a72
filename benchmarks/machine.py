"""Where a result comes from: the machine, the software and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def busy_cores() -> float:
    """Average number of cores that other programs keep busy, while this one sleeps."""
    seconds = 0.5
    start_ticks = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - start_ticks) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """Non-idle clock ticks of all cores together, including stolen time (proc_stat(5))."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_guest = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return user + nice + system + irq + softirq + steal


def describe() -> dict[str, object]:
    """CPU, cores, kernel, Python and torch."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def git_commit(checkout: Path = REPOSITORY) -> str:
    """The commit, with "+changes" if tracked files differ from it; "unknown" without git."""
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changes else "")


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):  # absent on arm64
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
