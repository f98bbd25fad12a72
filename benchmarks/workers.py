"""Starts the ranks of a benchmark, talks with them, and leaves no process behind.

A rank is a function in a process of its own, with a pipe to this one, in which it sleeps until it
is asked for something. It must not spin there: ranks usually fill the cores, so a spinning idle
rank would slow down the one being measured. Standard library only: MPI's ranks import this, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, TypeVar

CONTEXT = multiprocessing.get_context("forkserver")
# The first DistributedDataParallel imports torch._dynamo, which takes a second.
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "rota", "__main__"])
DEFAULTS = {
    # Loopback, to work without a network and to resolve no names.
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    # torch's allocator asks for no huge pages, so numpy must not either, or MPI's ranks would copy
    # other memory than torch's.
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
# How long a launcher may take to end after a request, before it is killed.
GRACE_S = 5.0

Self = TypeVar("Self", bound="Workers")


class RankError(RuntimeError):
    """A rank died, raised, or did not answer in time."""


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as text."""

    text: str


@dataclass(frozen=True)
class Rank:
    pipe: Connection
    pidfd: int  # a rank may not be our child, and a signal to a pidfd cannot hit a reused pid


class Workers:
    """The ranks of one job; a context manager that kills those that still run.

    Args:
        timeout_s: how long each start and each answer may take.

    Example:
        >>> with Workers(timeout_s=60) as workers:
        ...     for rank in range(2):
        ...         workers.fork(rank_main, rank, workers.folder / "store")
        ...     times = workers.recv_all()
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="rota-bench-")
        self.folder = Path(self._directory.name)  # for stores; only this user can enter it
        self._ranks: dict[int, Rank] = {}
        self._num_started = 0
        self._launchers: list[subprocess.Popen[bytes]] = []
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for launcher in self._launchers:
            launcher.terminate()  # mpiexec ends its ranks, then itself
        for rank in list(self._ranks):
            self.kill(rank)
        deadline_s = time.monotonic() + GRACE_S
        for launcher in self._launchers:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline_s - time.monotonic()))
            launcher.kill()
            launcher.wait()
        self._directory.cleanup()

    def fork(
        self,
        function: Callable[..., object],
        *args: object,
        namespace: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts one more rank: `function(pipe, *args)`, which must be at the top of a module. What
        it returns is sent at last; then it sleeps, since a rank that ends takes a core from others.
        `namespace` and `env` are of a simulated host (host_network.py)."""
        pipe, far_end = CONTEXT.Pipe()
        arguments = (far_end, function, args, namespace, dict(env or {}))
        process = CONTEXT.Process(target=_forked, args=arguments, daemon=True)
        process.start()
        far_end.close()  # so that the end of the rank is the end of the pipe
        self._ranks[self._num_started] = Rank(pipe, os.pidfd_open(process.pid or 0))
        self._num_started += 1

    def launch(
        self, command: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts ranks by a command, such as mpiexec's; each calls `join`, this waits for them."""
        first, self._num_started = self._num_started, self._num_started + num_ranks
        path = str(self.folder / f"{first}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(num_ranks)
            launcher = subprocess.Popen(
                [*command, "--socket", path],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # stdout ends in a line for programs
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the ranks
            )
            self._launchers.append(launcher)
            ended = os.pidfd_open(launcher.pid)
            deadline_s = time.monotonic() + self._timeout_s
            joined: dict[int, Rank] = {}
            while len(joined) < num_ranks:
                ready = wait([listener, ended], max(0.0, deadline_s - time.monotonic()))
                if listener not in ready:
                    raise RankError(f"{num_ranks - len(joined)} ranks did not start: {command[0]}")
                pipe = Connection(listener.accept()[0].detach())
                rank, pid = pipe.recv()
                joined[first + rank] = Rank(pipe, os.pidfd_open(pid))
            os.close(ended)
        self._ranks |= dict(sorted(joined.items()))

    @property
    def ranks(self) -> list[int]:
        """Those that have not been killed."""
        return list(self._ranks)

    def send(self, rank: int, note: object) -> None:
        with suppress(ConnectionError):  # recv says that it died
            self._ranks[rank].pipe.send(note)

    def recv(self, rank: int) -> Any:
        return self.recv_all([rank])[rank]

    def recv_all(self, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """The next note of each of these ranks, or of all; blocks, sleeping, until all are there.
        A rank that died, raised or took longer than `timeout_s` is a RankError."""
        awaited = {self._ranks[rank].pipe: rank for rank in ranks or self._ranks}
        notes: dict[int, Any] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while awaited:
            ready = wait(list(awaited), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RankError(
                    f"no answer from ranks {sorted(awaited.values())} within {self._timeout_s:g} s"
                )
            for pipe in [pipe for pipe in awaited if pipe in ready]:
                rank = awaited.pop(pipe)
                try:
                    notes[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RankError(f"rank {rank} died") from None
                if isinstance(notes[rank], Failure):
                    raise RankError(f"rank {rank} failed:\n{notes[rank].text}")
        return dict(sorted(notes.items()))

    def ask(self, note: object) -> list[Any]:
        """Every rank's answer to `note`, by rank."""
        for rank in self._ranks:
            self.send(rank, note)
        try:
            return list(self.recv_all().values())
        except RankError as error:
            raise RankError(f"{error}\n(asked for {note})") from None

    def signal(self, rank: int, number: int) -> None:
        signal.pidfd_send_signal(self._ranks[rank].pidfd, number)

    def kill(self, rank: int) -> int:
        """Kills a rank and forgets it; returns the time of that, by time.monotonic_ns()."""
        victim = self._ranks.pop(rank)
        killed_ns = time.monotonic_ns()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(victim.pidfd, signal.SIGKILL)
        select.select([victim.pidfd], [], [])  # readable once the process has ended
        os.close(victim.pidfd)
        victim.pipe.close()
        return killed_ns

    def stop(self) -> None:
        """Lets ranks that `serve` end in their own way, and waits for their launchers, whose
        failure is a RankError."""
        for rank in self._ranks:
            self.send(rank, None)
            self._ranks[rank].pipe.close()
        for launcher in self._launchers:
            try:
                status = launcher.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                raise RankError(f"ranks still run {GRACE_S:g} s after the end") from None
            if status != 0:
                raise RankError(f"exit status {status} at the end")


def serve(pipe: Connection, answer: Callable[[Any], object]) -> None:
    """Answers each note until `None` comes."""
    while (note := pipe.recv()) is not None:
        pipe.send(answer(note))


def join(rank: int, function: Callable[..., object], parser: argparse.ArgumentParser) -> None:
    """Runs `function(pipe, args)` on a rank that `launch` started, with the parser's arguments."""
    parser.add_argument("--socket", required=True)
    args = parser.parse_args()
    with Client(args.socket, family="AF_UNIX") as pipe:
        pipe.send((rank, os.getpid()))
        _work(pipe, function, (args,))


def _forked(
    pipe: Connection,
    function: Callable[..., object],
    args: tuple[object, ...],
    namespace: str | None,
    env: Mapping[str, str],
) -> None:
    os.setsid()  # Ctrl-C reaches the parent alone, which ends the ranks
    if namespace is not None:
        from host_network import enter_namespace

        enter_namespace(namespace)
    os.environ.update(env)
    _work(pipe, function, args)


def _work(pipe: Connection, function: Callable[..., object], args: tuple[object, ...]) -> None:
    note: object
    try:
        note = function(pipe, *args)
    except Exception:
        note = Failure(traceback.format_exc().strip())
    # Without a parent nothing is left to do, not even finalizers, which might wait for a peer.
    try:
        pipe.send(note)
        pipe.poll(None)
    except (EOFError, ConnectionError):
        if isinstance(note, Failure):
            os._exit(1)
