"""Runs functions in processes that see simulated GPUs (simulated_gpu.py).

They are forked from a server that has torch and rota loaded, so each test has its own CUDA state
and none waits for torch to load. Functions are pickled by name, so they must be at the top of a
module in tests/.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

import simulated_gpu
from ranks import Body, as_test

TIMEOUT_S = 60.0
# Time for a process to write the stacks of all its threads.
_DUMP_S = 2.0


@dataclass(frozen=True)
class Outcome:
    value: Any  # what the function returned; None if it did not return
    error: str | None  # a traceback, or how the process died
    stderr: str

    @property
    def warnings(self) -> list[str]:
        """The lines of stderr, without warnings that a rank has waited for another for a second:
        on a busy machine those can appear in any test."""
        return [line for line in self.stderr.splitlines() if not line.endswith("; still waiting")]


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """What the functions returned; fails the test if any did not."""
    failures = [
        f"process {number}: {outcome.error}\n{outcome.stderr}"
        for number, outcome in enumerate(outcomes)
        if outcome.error is not None
    ]
    assert not failures, "\n".join(failures)
    return [outcome.value for outcome in outcomes]


class SimulatedProcesses:
    """A server that starts when it is first needed and ends with close()."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def run(self, function: Callable[..., Any], *args: Any, **environment: str) -> Any:
        """Returns what the function returns in a new process; an exception fails the test.

        Keywords are environment variables of that process.
        """
        return self.run_together([(function, args)], **environment)[0]

    def run_together(self, calls: list[Call], **environment: str) -> list[Any]:
        """Like run(), for several processes that run at the same time."""
        return values_of(self.outcomes(calls, **environment))

    def ranks(
        self,
        function: Callable[..., Any],
        folder: Path,
        *args: Any,
        world_size: int = 2,
        **environment: str,
    ) -> list[Outcome]:
        """How `function(rank, store_path, *args)` ended on each rank; see init_group."""
        calls = [(function, (rank, f"{folder}/store", *args)) for rank in range(world_size)]
        return self.outcomes(calls, **environment)

    def outcomes(self, calls: list[Call], **environment: str) -> list[Outcome]:
        """How each process ended, including those that died."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        # Loaded in the process itself: the server imports no tests.
        self._pipe.send(([pickle.dumps(call) for call in calls], environment))
        outcomes: list[Outcome] = self._pipe.recv()
        return outcomes

    def _start(self) -> None:
        variables = simulated_gpu.environment()
        self._pipe, far_end = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(far_end.fileno())],
            env={**os.environ, **variables},
            pass_fds=[far_end.fileno()],
        )
        far_end.close()

    def close(self) -> None:
        if self._pipe is not None and self._server is not None:
            self._pipe.close()
            self._server.wait()


def simulated(**environment: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a test, which runs in a process that sees simulated GPUs; see
    SimulatedProcesses.run."""

    def run(body: Body, args: dict[str, Any]) -> None:
        args.pop("processes").run(functools.partial(body, **args), **environment)

    return lambda body: as_test(body, 0, "processes", run)


def init_group(rank: int, world_size: int, store_path: str, timeout_s: float = 30.0) -> None:
    """Makes the default group, of this process and those that give the same path.

    Args:
        rank: in [0, world_size).
        world_size: the number of processes, which share the first GPU.
        store_path: a file that does not exist, for the store.
        timeout_s: the group's.
    """
    torch.cuda.set_device(0)
    dist.init_process_group(
        "rota",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def contribution(rank: int, num_elems: int = 1000) -> torch.Tensor:
    """What a rank adds to sums, on the CPU; they are exact."""
    return torch.arange(num_elems, dtype=torch.float32) * (rank + 1)


def sum_of_two(num_elems: int = 1000) -> torch.Tensor:
    return contribution(0, num_elems) + contribution(1, num_elems)


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime of this process, for functions that torch does not offer."""
    return ctypes.CDLL(None)


@dataclass
class _Child:
    pid: int
    results: Connection
    stderr: Any
    outcome: Outcome | None = None


def _serve(pipe: Connection) -> None:
    while True:
        try:
            calls, environment = pipe.recv()
        except EOFError:
            return
        children = [_fork(call, environment) for call in calls]
        deadline = time.monotonic() + TIMEOUT_S
        for child in children:
            _await(child, deadline)
        pipe.send([child.outcome for child in children])


def _fork(call: bytes, environment: dict[str, str]) -> _Child:
    results, own_end = Pipe(duplex=False)
    # Stays open, because the parent reads it at the end.
    stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
    pid = os.fork()
    if pid != 0:
        own_end.close()
        return _Child(pid, results, stderr)
    os.dup2(stderr.fileno(), 2)
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    value, error = None, None
    try:
        function, args = pickle.loads(call)
        value = function(*args)
    except BaseException:
        error = traceback.format_exc()
    # A communicator that only the frames of a caught exception refer to must leave its group now,
    # as at interpreter exit; otherwise its peers would report this process as dead.
    gc.collect()
    own_end.send((value, error))
    sys.stderr.flush()
    os._exit(0)  # without finalizers, because other threads may still be running


def _await(child: _Child, deadline: float) -> None:
    value, error = None, None
    if wait([child.results], max(0.0, deadline - time.monotonic())):
        try:
            value, error = child.results.recv()
        except EOFError:
            error = "no result"
    else:
        error = f"no result within {TIMEOUT_S} s"
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    if error == "no result":
        error = f"the process ended with {os.waitstatus_to_exitcode(status)}"
    child.stderr.seek(0)
    child.outcome = Outcome(value, error, child.stderr.read())


if __name__ == "__main__":
    # Outcomes are pickled as instances of the module that the tests import.
    sys.modules["simulated_processes"] = sys.modules["__main__"]
    Outcome.__module__ = "simulated_processes"
    _serve(Connection(int(sys.argv[1])))
