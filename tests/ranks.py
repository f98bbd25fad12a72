"""Runs a function on several ranks: one process each, forked from a server that has torch loaded.

A fork takes milliseconds and importing torch takes seconds, so every test can have its own ranks:
no test can break the next one, and each covers the whole life of a group. A rank that hangs is
stopped, and the test fails with the Python stacks of all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

import rota
from default_device import enter_default_device

# How long ranks may outlive a test process that was killed and could not stop them.
_ORPHAN_S = 30.0
# Characters of a frame and its variables in a failure; tensors have many elements.
_MAX_LOCAL = 4000
# Time for a handler to write the stacks of all threads.
_DUMP_S = 1.0

_context = multiprocessing.get_context("forkserver")
# The first DistributedDataParallel imports torch._dynamo, which takes a second.
_context.set_forkserver_preload(
    ["numpy", "torch", "pytest", "rota", "torch._dynamo", "torch.distributed.fsdp"]
)


@dataclass(frozen=True)
class Place:
    """Where a rank runs, if not simply beside the test: hosts.py has such places.

    Args:
        enter: what the rank does before anything else.
        env: its variables; MASTER_ADDR and MASTER_PORT name a server for its stores.
    """

    enter: Callable[[], object]
    env: Mapping[str, str]


class Rank:
    """The first argument of a function that runs on a rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        directory: str,
        pipe: Connection,
        place: Place | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._directory = directory
        self._pipe = pipe
        self._place = place
        self._num_stores = 0
        self.layout: Any = None  # on hosts, if several_hosts.py has started it

    def make_store(self, timeout_s: float = 30.0) -> dist.Store:
        """An empty store; the i-th call on each rank gives the same store."""
        self._num_stores += 1
        name, timeout = f"store{self._num_stores}", timedelta(seconds=timeout_s)
        if self._place is not None:
            address, port = (self._place.env[key] for key in ("MASTER_ADDR", "MASTER_PORT"))
            return dist.PrefixStore(name, dist.TCPStore(address, int(port), timeout=timeout))
        # A file needs no server and no name look-ups, which stall without DNS.
        store = dist.FileStore(os.path.join(self._directory, name))
        store.set_timeout(timeout)
        return store

    def init(self, backend: str = "rota", timeout_s: float = 30.0, pg_options: Any = None) -> None:
        """Makes the default group."""
        dist.init_process_group(
            backend,
            store=self.make_store(timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            pg_options=pg_options,
        )
        if backend == "gloo":
            # A rank that ends at once would break the connections of one that still connects.
            dist.barrier()

    def communicator(
        self, *, slot_bytes: int | None = None, timeout_s: float | None = None
    ) -> rota.Communicator:
        """A communicator over the default group, which is made if it does not exist."""
        if not dist.is_initialized():
            self.init()
        options: dict[str, Any] = {}
        if slot_bytes is not None:
            options["slot_bytes"] = slot_bytes
        if timeout_s is not None:
            options["timeout"] = timedelta(seconds=timeout_s)
        return rota.Communicator(**options)

    def tell(self, note: object = None) -> None:
        """Sends a note to the test, which receives it with Ranks.hear."""
        self._pipe.send_bytes(pickle.dumps(("note", note)))

    def hear(self) -> Any:
        """Waits for a note that the test sends with Ranks.tell."""
        return pickle.loads(self._pipe.recv_bytes())

    def say(self, word: str = "go on") -> None:
        """Lets all ranks go on that wait for this word; each is said once."""
        Path(self._directory, word).touch()

    def await_word(self, word: str = "go on") -> None:
        while not Path(self._directory, word).exists():
            time.sleep(0.005)

    def pid_of(self, rank: int) -> int:
        """The process of another rank, which has started."""
        return int(Path(self._directory, f"pid{rank}").read_text())


def _rank_main(
    rank: Rank,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: Mapping[str, str],
    stderr_path: str,
    timeout_s: float,
) -> None:
    stderr = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    os.close(stderr)
    Path(rank._directory, f"pid{rank.rank}").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(timeout_s + _ORPHAN_S, exit=True)
    try:
        if rank._place is not None:
            rank._place.enter()
            os.environ.update(rank._place.env)
        os.environ.update(env)
        enter_default_device()
        reply = ("result", function(rank, *args))
    except BaseException as error:
        # pytest shows the values of assertions in the test process only.
        has_locals = isinstance(error, AssertionError)
        trace = traceback.TracebackException.from_exception(error, capture_locals=has_locals)
        reply = ("error", "".join(line[:_MAX_LOCAL] for line in trace.format()))
    rank._pipe.send_bytes(pickle.dumps(reply))


class Ranks:
    """The processes of one run; a context manager that leaves none of them behind."""

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: object,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        places: Sequence[Place] = (),
    ) -> None:
        """Starts `function(rank, *args)` on every rank; it must be at the top of a module.

        With `places`, one for each rank, every rank runs in its own.
        """
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="rota-test-")
        self._replies: list[tuple[str, Any] | None] = [None] * world_size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(world_size):
            pipe, rank_pipe = _context.Pipe()
            place = places[number] if places else None
            rank = Rank(number, world_size, self._directory.name, rank_pipe, place)
            process = _context.Process(
                target=_rank_main,
                args=(rank, function, args, dict(env or {}), self._stderr(number), timeout_s),
                daemon=True,
            )
            process.start()
            rank_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def stderr(self, rank: int) -> str:
        path = Path(self._stderr(rank))
        return path.read_text() if path.exists() else ""

    def wait_for_stderr(self, rank: int, text: str = "\n") -> None:
        """Waits until a rank has written `text` to stderr."""
        while text not in self.stderr(rank):
            if self._processes[rank].exitcode is not None or self._seconds_left() == 0:
                raise AssertionError(f"rank {rank} did not write {text!r} to stderr")
            time.sleep(0.02)

    def kill(self, rank: int, signum: int = signal.SIGKILL, *, joins: bool = False) -> None:
        """Sends a signal; `joins`: waits until the process has ended."""
        os.kill(self.pid(rank), signum)
        if joins:
            self._processes[rank].join()

    def tell(self, rank: int, note: object = None) -> None:
        self._pipes[rank].send_bytes(pickle.dumps(note))

    def tell_all(self, note: object = None) -> None:
        for rank in range(len(self._pipes)):
            self.tell(rank, note)

    def hear(self, rank: int) -> Any:
        """The next note of a rank; fails the test if the rank ends or hangs instead."""
        if not self._pipes[rank].poll(self._seconds_left()):
            self._fail_as_hung([rank], "sent no note")
        with contextlib.suppress(EOFError):
            kind, content = pickle.loads(self._pipes[rank].recv_bytes())
            if kind == "note":
                return content
            self._replies[rank] = (kind, content)
        self.results()  # fails with the cause, unless the function has just returned
        raise AssertionError(f"rank {rank} returned without the note that the test waits for")

    def hear_all(self) -> list[Any]:
        """The next note of every rank."""
        return [self.hear(rank) for rank in range(len(self._pipes))]

    def hear_result(self, rank: int) -> Any:
        """What the function returned on one rank; does not wait for the other ranks."""
        if not self._pipes[rank].poll(self._seconds_left()):
            self._fail_as_hung([rank], "did not return")
        self._receive(rank)
        self._raise_failures(killed=())
        return self._replies[rank][1]  # type: ignore[index]

    def results(self, *, killed: Collection[int] = ()) -> list[Any]:
        """What the function returned on each rank, once all have ended; None for a killed one.

        Fails the test if a rank raised, died, or did not end in time.
        """
        waiting = {
            self._pipes[rank]: rank
            for rank, reply in enumerate(self._replies)
            if reply is None and rank not in killed
        }
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), self._seconds_left())
            if not ready:
                self._raise_failures(killed)  # a rank that has failed may be what the others await
                self._fail_as_hung(sorted(waiting.values()), "did not return")
            for pipe in ready:
                self._receive(waiting.pop(pipe))  # type: ignore[call-overload]
        for rank, process in enumerate(self._processes):
            process.join(self._seconds_left())
            if process.exitcode is None:
                self._fail_as_hung([rank], "returned, but its process did not end")
        self._raise_failures(killed)
        return [None if reply is None else reply[1] for reply in self._replies]

    def results_without(self, victim: int) -> list[Any]:
        """Kills a rank once every rank has sent a note; the results of the others."""
        self.hear_all()
        self.kill(victim)
        return self.results(killed=[victim])

    def _receive(self, rank: int) -> None:
        try:
            reply = pickle.loads(self._pipes[rank].recv_bytes())
            while reply[0] == "note":  # a note that no test waited for
                reply = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_DUMP_S)
            exit_code = self._processes[rank].exitcode
            reply = ("error", f"the process ended without a result, exit code {exit_code}\n")
        self._replies[rank] = reply

    def _raise_failures(self, killed: Collection[int]) -> None:
        texts = []
        for rank, reply in enumerate(self._replies):
            if reply is not None and reply[0] == "error":
                texts.append(f"--- rank {rank}/{len(self._replies)}\n{reply[1]}")
            elif self._processes[rank].exitcode not in (0, None) and rank not in killed:
                texts.append(
                    f"--- rank {rank} returned, then its process ended with "
                    f"{self._processes[rank].exitcode}"
                )
        if texts:
            raise AssertionError("\n".join(["a rank failed", *texts, *self._stderr_texts()]))

    def _fail_as_hung(self, ranks: list[int], what: str) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        raise AssertionError(
            f"rank {ranks} of {len(self._pipes)} {what} within {self._timeout_s} s\n"
            + "\n".join(self._stderr_texts())
        )

    def _stderr_texts(self) -> Iterator[str]:
        for rank in range(len(self._pipes)):
            if text := self.stderr(rank).strip():
                yield f"--- stderr of rank {rank}\n{text}"

    def _stderr(self, rank: int) -> str:
        return os.path.join(self._directory.name, f"rank{rank}")

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    killed: Collection[int] = (),
) -> list[Any]:
    """Runs `function(rank, *args)` on every rank and returns what each returned, by rank.

    Args:
        killed: ranks that kill themselves.
    """
    with Ranks(world_size, function, *args, env=env, timeout_s=timeout_s) as ranks:
        results = ranks.results(killed=killed)
        others = [rank for rank in killed if ranks._processes[rank].exitcode != -signal.SIGKILL]
        assert not others, f"ranks {others} were to kill themselves"
        return results


@dataclass(frozen=True)
class Body:
    """What each rank runs of a test; pickled by name, under which its module has the test."""

    module: str
    name: str

    def __call__(self, *args: object, **options: object) -> Any:
        return getattr(importlib.import_module(self.module), self.name).body(*args, **options)


def as_test(
    body: Callable[..., Any], num_given: int, place: str | None, run: Callable[..., object]
) -> Any:
    """The test that calls `run(Body, arguments)`.

    Args:
        num_given: parameters of `body` that are not the test's.
        place: a parameter of the test that `body` does not have: on how many ranks, or where.
    """

    @functools.wraps(body)
    def test(**args: object) -> None:
        run(Body(body.__module__, body.__name__), args)

    own = [inspect.Parameter(place, inspect.Parameter.POSITIONAL_OR_KEYWORD)] if place else []
    own += list(inspect.signature(body).parameters.values())[num_given:]
    test.body = body  # type: ignore[attr-defined]
    test.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return test


def on_ranks(
    world_size: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    killed: Collection[int] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Makes `function(rank, ...)` a test, which every rank runs with the test's parameters.

    Args:
        world_size: None: the test has a parameter of this name, which the function does not get.
        env, timeout_s: as for Ranks.
        killed: ranks that kill themselves.

    Example:
        >>> @pytest.mark.parametrize("dtype", DTYPES)
        ... @on_ranks(2)
        ... def test_send_arrives(rank: Rank, dtype: torch.dtype) -> None: ...
    """

    def run(body: Body, args: dict[str, Any]) -> None:
        size = world_size or args.pop("world_size")
        run_ranks(
            size, functools.partial(body, **args), env=env, timeout_s=timeout_s, killed=killed
        )

    return lambda body: as_test(body, 1, None if world_size else "world_size", run)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(call: Callable[..., object], *args: Any, **options: Any) -> tuple[str, str]:
    """The type and text of the exception that the call raises, as strings to send to the test."""
    try:
        call(*args, **options)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", "no exception was raised"


def check_error(error: tuple[str, str], kind: str, *facts: str) -> None:
    """Checks what error_of returned: the type of the exception, and what its text must say."""
    missing = [fact for fact in facts if fact not in error[1]]
    assert error[0] == kind and not missing, f"{error} is no {kind} that says {missing}"


def isas_of_this_cpu() -> list[str]:
    """The values that ROTA_ISA may have here."""
    flags = Path("/proc/cpuinfo").read_text()
    names = ["portable"]
    names += ["avx2"] if "avx2" in flags and "f16c" in flags else []
    names += ["avx512"] if all(f"avx512{part}" in flags for part in ("f", "bw", "vl", "dq")) else []
    return names
