"""Starts the ranks of one launcher, gives them turns, and leaves no process behind.

A rank that dies, fails or times out ends the run with a `RankError` that names it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from protocol import Failure, Hello, Reply, Turn

# How long a process may take to end after a request, before it is killed.
GRACE_S = 5.0
NUM_LOG_LINES = 15

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank died, raised, or did not answer in time."""


class RankGroup:
    """The ranks of one library: started once, then given one turn at a time.

    Args:
        name: for messages.
        num_ranks: how many ranks the commands start.
        commands: one that starts all ranks (mpiexec), or one per rank; `--socket PATH` is added.
        env: variables to set in addition to this process's own.
        run_dir: an empty folder that only this user can enter, for sockets and logs.
        timeout_s: how long the start, and each turn, may take.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str],
        run_dir: Path,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.hellos: list[Hello] = []
        self._num_ranks = num_ranks
        self._commands = commands
        # torch's allocator asks for no huge pages, so numpy must not either, or MPI's ranks would
        # copy other memory than torch's.
        self._env = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0", **env}
        self._socket_path = run_dir / f"{name}.sock"
        self._log_path = run_dir / f"{name}.log"
        self._timeout_s = timeout_s
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Connection] = {}
        # Of the ranks, which may not be our children; signals to a pidfd cannot hit a reused pid.
        self._pidfds: dict[int, int] = {}

    def start(self) -> None:
        """Starts the ranks and waits until each has said hello.

        Raises:
            RankError: a launcher ended, or a rank timed out.
        """
        deadline_s = time.monotonic() + self._timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._socket_path))
            listener.listen(self._num_ranks)
            listener.settimeout(0.1)
            self._launch()
            while len(self._links) < self._num_ranks:
                with suppress(TimeoutError):
                    self._greet(listener, deadline_s)
                self._check_start(deadline_s)
        self.hellos.sort(key=lambda hello: hello.rank)

    def _launch(self) -> None:
        with self._log_path.open("wb") as log:
            for command in self._commands:
                # A new session, so that Ctrl-C reaches only the driver, which ends the ranks.
                launcher = subprocess.Popen(
                    [*command, "--socket", str(self._socket_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
                self._launchers.append(launcher)

    def _greet(self, listener: socket.socket, deadline_s: float) -> None:
        connection, _ = listener.accept()
        connection.setblocking(True)
        link = Connection(connection.detach())
        if not link.poll(max(0.0, deadline_s - time.monotonic())):
            raise RankError(f"{self.name}: a rank connected but did not say hello")
        try:
            hello = link.recv()
        except (EOFError, ConnectionError) as error:
            raise RankError(f"{self.name}: a rank died as it started{self._log_tail()}") from error
        self._links[hello.rank] = link
        self._pidfds[hello.rank] = os.pidfd_open(hello.pid)
        self.hellos.append(hello)

    def _check_start(self, deadline_s: float) -> None:
        missing = sorted(set(range(self._num_ranks)) - set(self._links))
        if not missing:
            return
        for launcher in self._launchers:
            if launcher.poll() is not None:
                raise RankError(
                    f"{self.name}: exit status {launcher.returncode} before ranks {missing} were "
                    f"ready{self._log_tail()}"
                )
        if time.monotonic() > deadline_s:
            raise RankError(
                f"{self.name}: ranks {missing} not ready after {self._timeout_s:g} s"
                f"{self._log_tail()}"
            )

    def ask(self, turn: Turn) -> list[Reply]:
        """Every rank's measurement of `turn`, by rank; blocks, sleeping, until all have answered.

        Raises:
            RankError: a rank died, raised, or took longer than `timeout_s`.
        """
        what = f"{turn.op} of {turn.num_elems} {turn.dtype} by {turn.entry.label}"
        deadline_s = time.monotonic() + self._timeout_s
        for rank in self._links:
            self._talk(rank, what, lambda link: link.send(turn))
        replies: dict[int, Reply] = {}
        awaited = dict(self._links)
        while awaited:
            ready = wait(awaited.values(), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RankError(
                    f"{self.name}: no answer from ranks {sorted(awaited)} within "
                    f"{self._timeout_s:g} s ({what}); are they stuck, or is --timeout too short?"
                    f"{self._log_tail()}"
                )
            for rank in [rank for rank, link in awaited.items() if link in ready]:
                reply = self._talk(rank, what, lambda link: link.recv())
                if isinstance(reply, Failure):
                    raise RankError(f"{self.name}: rank {rank} failed ({what}):\n{reply.text}")
                replies[rank] = reply
                del awaited[rank]
        return [replies[rank] for rank in range(self._num_ranks)]

    def _talk(self, rank: int, what: str, action: Callable[[Connection], T]) -> T:
        try:
            return action(self._links[rank])
        except (EOFError, ConnectionError) as error:
            pid = self.hellos[rank].pid
            raise RankError(
                f"{self.name}: rank {rank} (pid {pid}) died ({what}){self._log_tail()}"
            ) from error

    def stop(self) -> None:
        """Tells the ranks to end and waits until they have.

        Raises:
            RankError: a launcher's exit status is not 0.
        """
        for link in self._links.values():
            with suppress(ConnectionError):
                link.send(None)
        for launcher in self._launchers:
            try:
                status = launcher.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                raise RankError(f"{self.name}: still running {GRACE_S:g} s after stop") from None
            if status != 0:
                raise RankError(f"{self.name}: exit status {status} at the end{self._log_tail()}")

    def kill(self) -> None:
        """Ends all processes that still run; may be called at any time and repeatedly."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        for launcher in self._launchers:
            launcher.terminate()  # mpiexec ends its ranks, then itself
        deadline_s = time.monotonic() + GRACE_S
        for launcher in self._launchers:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline_s - time.monotonic()))
            launcher.kill()
            launcher.wait()
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._pidfds.clear()

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)
