"""Runs one command after the other, each within a time limit, whatever became of those before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

# From the request to end to the end by force.
GRACE_S = 5.0


@dataclass(frozen=True)
class Step:
    """A command of a stage.

    Args:
        stage: build, test, memcheck or bench.
        name: unique in a run.
        limit_s: when it is ended, with all that it has started.
        env: what it sees beside this process's environment.
        reason: why there is no command, which is no failure; None if there is one.
    """

    stage: str
    name: str
    command: Sequence[str]
    limit_s: float
    env: Mapping[str, str]
    reason: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step: "passed", "failed", "stopped" at its limit, or "left out"."""

    stage: str
    name: str
    verdict: str
    seconds: float
    limit_s: float
    text: str  # why it failed or was left out, else its last line

    @property
    def is_failure(self) -> bool:
        """Whether the run's exit status tells of it."""
        return self.verdict in ("failed", "stopped")

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the record."""
        return asdict(self) | {"seconds": round(self.seconds, 1), "limit_s": round(self.limit_s)}


def run(step: Step, extra_s: float, log_path: Path, cwd: Path) -> Outcome:
    """Runs a step; its output goes to the screen and to the log.

    Args:
        extra_s: what earlier steps have left of their limits.
    """
    limit_s = step.limit_s + extra_s
    if step.reason is not None:
        print(f"{step.name} is left out: {step.reason}", flush=True)
        return Outcome(step.stage, step.name, "left out", 0.0, limit_s, step.reason)
    started = time.monotonic()
    tail: list[str] = []
    with log_path.open("a", errors="replace") as log:
        shown = " ".join(part if "\n" not in part else "..." for part in step.command)
        _say(log, f"\n=== {step.name}, at most {limit_s:.0f} s: {shown}\n")
        try:
            # A group of its own, so that what it starts ends with it.
            process = subprocess.Popen(
                step.command,
                cwd=cwd,
                env={**os.environ, **step.env, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            _say(log, f"{error}\n")
            return Outcome(step.stage, step.name, "failed", 0.0, limit_s, str(error))
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(process.stdout, log, tail), daemon=True)
        reader.start()
        verdict = "passed"
        try:
            status = process.wait(limit_s)
            if status != 0:
                verdict = "failed"
        except subprocess.TimeoutExpired:
            verdict = "stopped"
        finally:
            # Also after an end of its own: nothing that it started may go on using the GPU.
            _end_group(process)
        reader.join(GRACE_S)
        seconds = time.monotonic() - started
        text = tail[-1] if tail else "no output"
        if verdict == "failed":
            text = f"exit status {process.returncode}: {text}"
        elif verdict == "stopped":
            text = f"not done within {limit_s:.0f} s; the last line: {text}"
        _say(log, f"=== {step.name} {verdict} after {seconds:.1f} s\n")
    return Outcome(step.stage, step.name, verdict, seconds, limit_s, text)


def _copy(output: TextIO, log: TextIO, tail: list[str]) -> None:
    for line in output:
        _say(log, line)
        if line.strip():
            tail[:] = [line.strip()[:300]]


def _say(log: TextIO, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
    if not log.closed:  # a process that outlived its group may still write
        log.write(text)
        log.flush()


def _end_group(process: subprocess.Popen[str]) -> None:
    """Asks the whole group to end, then makes it."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + GRACE_S
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()


def _group_lives(process: subprocess.Popen[str]) -> bool:
    process.poll()  # takes the leader's status, without which the group would seem to live
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
