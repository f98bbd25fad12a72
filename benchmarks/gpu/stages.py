"""Runs one command after the other, each within a time limit, whatever became of those before."""

from __future__ import annotations

import contextlib
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

# How what is left of a step is ended, and before that a step at its limit: pytest then tells
# what has failed so far.
ENDING: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGKILL)
STOPPING: Sequence[signal.Signals] = (signal.SIGINT, *ENDING)
GRACE_S = 3.0  # from one signal to the next


@dataclass(frozen=True)
class Step:
    """A command of a stage.

    Args:
        stage: build, test, memcheck or bench.
        name: unique in a run.
        limit_s: what it is to take; see Budget.
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


class Budget:
    """The time of a run, and what a step may take of it."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s
        self._spare_s = 0.0

    def limit_s(self, step: Step) -> float:
        """When to end it: its own limit and, of what earlier steps have left, at most as much
        again, so that one that hangs cannot use up the time of all; no later than the run."""
        limit_s = step.limit_s + min(self._spare_s, step.limit_s)
        return max(0.0, min(limit_s, self._end - time.monotonic()))

    def settle(self, step: Step, seconds: float) -> None:
        """Later steps may take what it has left, or no longer what it has taken of that."""
        self._spare_s = max(0.0, self._spare_s + step.limit_s - seconds)


def run(step: Step, limit_s: float, log_path: Path, cwd: Path) -> Outcome:
    """Runs a step; its output goes to the screen and to the log. No process of it remains, also
    where an exception such as SystemExit ends the wait for it.

    Args:
        limit_s: when it is ended, with all that it has started; 0: it is not started.
    """
    if step.reason is not None:
        print(f"{step.name} is left out: {step.reason}", flush=True)
        return Outcome(step.stage, step.name, "left out", 0.0, limit_s, step.reason)
    if limit_s <= 0:
        text = "not started: the time of the whole run is over"
        print(f"{step.name} is {text}", flush=True)
        return Outcome(step.stage, step.name, "stopped", 0.0, limit_s, text)
    started = time.monotonic()
    tail: list[str] = []
    with log_path.open("a", errors="replace") as log:
        shown = " ".join(part if "\n" not in part else "..." for part in step.command)
        _say(log, f"\n=== {step.name}, at most {limit_s:.0f} s: {shown}\n")
        try:
            # A group of its own, so that what it starts ends with it; in this process's session, so
            # that whoever ends that leaves nothing on the GPU.
            process = subprocess.Popen(
                step.command,
                cwd=cwd,
                env={**os.environ, **step.env, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
        except OSError as error:
            _say(log, f"{error}\n")
            return Outcome(step.stage, step.name, "failed", 0.0, limit_s, str(error))
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(process.stdout, log, tail), daemon=True)
        reader.start()
        verdict, last_words, signals = "passed", None, ENDING
        try:
            if process.wait(limit_s) != 0:
                verdict = "failed"
        except subprocess.TimeoutExpired:
            verdict, last_words, signals = "stopped", _last_words(tail), STOPPING
        finally:
            # Also after an end of its own: nothing that it started may go on using the GPU.
            _end_group(process, signals)
        reader.join(GRACE_S)
        seconds = time.monotonic() - started
        text = last_words or _last_words(tail)
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


def _last_words(tail: list[str]) -> str:
    return tail[-1] if tail else "no output"


def _say(log: TextIO, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
    if not log.closed:  # a process that outlived its group may still write
        log.write(text)
        log.flush()


def _end_group(process: subprocess.Popen[str], signals: Sequence[signal.Signals]) -> None:
    """Asks the whole group to end, then makes it."""
    for signal_number in signals:
        if not _group_lives(process):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        deadline = time.monotonic() + GRACE_S
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold even what is killed
        process.wait(GRACE_S)


def _group_lives(process: subprocess.Popen[str]) -> bool:
    """Whether any of it runs; what waits for a parent to take its status, perhaps for ever, does
    not."""
    process.poll()
    return any(_runs_in(process.pid, stat) for stat in Path("/proc").glob("[0-9]*/stat"))


def _runs_in(group: int, stat: Path) -> bool:
    try:
        state, _parent, of_process = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False  # it has just ended
    return int(of_process) == group and state not in "ZX"
