"""A rank's connection to the keeper of its host (keeper.py), which it starts if there is none."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rota import _C
from rota.checkpoint import keeper
from rota.checkpoint.contents import WHAT
from rota.errors import Mismatch, RotaError, Timeout, TransportError

# How long a process that was killed may take to end, before its rank is given to another.
END_S = 5.0
POLL_S = 0.01


class KeeperLost(Exception):
    """The keeper has ended, or has never answered."""


@dataclass(eq=False)
class KeeperLink:
    """One rank's connection, for one thread at a time; methods are the requests of keeper.py.

    timeout_s is of finding or starting the keeper, and of each request. pid is the keeper's.
    """

    job: str
    meeting: str
    rank: int
    linger_s: float
    launcher: int | None
    timeout_s: float
    pid: int = field(default=0, init=False)
    _owner_pid: int = field(default_factory=os.getpid, init=False)
    _socket: socket.socket | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """The keeper's socket: one for each user, job and host."""
        identity = "\0".join([str(os.geteuid()), self.job, _C.host_id()])
        return f"rota-keeper-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"

    def is_alive(self) -> bool:
        """Whether the keeper that this rank has joined still runs. Costs one system call."""
        self._check_process()
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)  # nothing comes unasked, except the end
        return not poll.poll(0)

    def connect(self) -> None:
        """Joins the keeper, and starts it if there is none. Blocks for milliseconds."""
        self._check_process()
        deadline = time.monotonic() + self.timeout_s
        while True:
            self.disconnect()
            try:
                self._socket = self._open()
                return self._join(deadline)
            except ConnectionRefusedError:
                self._start()
            except KeeperLost:  # it was just ending
                time.sleep(POLL_S)
            if time.monotonic() > deadline:
                raise Timeout(f"{WHAT}: the keeper of job {self.job!r} does not answer")

    def keep(self, owner: int, slot: int, memory_fd: int) -> None:
        self._request({"ask": "keep", "owner": owner, "slot": slot}, [memory_fd])

    def drop(self, owner: int, slot: int) -> None:
        self._request({"ask": "drop", "owner": owner, "slot": slot})

    def owners(self) -> list[int]:
        return list(self._request({"ask": "owners"})[0]["owners"])

    def fetch(self, owner: int) -> dict[int, int]:
        """Descriptors of what the keeper has of a rank's state, by slot; the caller closes them."""
        answer, fds = self._request({"ask": "fetch", "owner": owner})
        return dict(zip(answer["slots"], fds, strict=True))

    def left(self) -> list[int]:
        """The ranks whose processes have ended since they joined this keeper, if it is there."""
        try:
            return list(self._request({"ask": "left"})[0]["left"])
        except KeeperLost:
            return []

    def finish(self) -> None:
        self._request({"ask": "finish"})

    def disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _check_process(self) -> None:
        if os.getpid() != self._owner_pid:
            raise RotaError(
                f"{WHAT}: made in process {self._owner_pid}, used in its forked child "
                f"{os.getpid()}; make one in the child, with a rank of its own"
            )

    def _open(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(min(self.timeout_s, keeper.LONGEST_WAIT_S))
            connection.connect(f"\0{self.name}")
            pid, uid = keeper.peer_credentials(connection)
            if uid != os.geteuid():
                raise TransportError(
                    f"{WHAT}: the keeper of job {self.job!r} (started by pid {pid}) belongs to "
                    f"user {uid}, expected {os.geteuid()}; choose another name"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _join(self, deadline: float) -> None:
        request = {
            "ask": "join",
            "protocol": keeper.PROTOCOL,
            "job": self.job,
            "meeting": self.meeting,
            "rank": self.rank,
            "linger_s": self.linger_s,
            "launcher": self.launcher,
        }
        end = min(deadline, time.monotonic() + END_S)
        with contextlib.ExitStack() as stack:
            pidfds = [os.pidfd_open(os.getpid())]
            stack.callback(os.close, pidfds[0])
            if self.launcher is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    pidfds.append(os.pidfd_open(self.launcher))
                    stack.callback(os.close, pidfds[1])
            while True:
                answer, _ = self._exchange(request, pidfds)
                if "error" not in answer:
                    break
                # A process that was just killed is there until the kernel has ended it.
                if "holder" not in answer or time.monotonic() > end:
                    raise Mismatch(
                        f"{WHAT}: rank {self.rank} of job {self.job!r} (pid {os.getpid()}): "
                        f"{answer['error']}"
                    )
                time.sleep(POLL_S)
        self.pid = answer["pid"]

    # Keepers that start at the same time: the socket's name is given to one of them.
    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", keeper.__file__]
        starter = subprocess.run(
            [*command, self.name, self.job],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=Path(keeper.__file__).parent,
        )
        if starter.returncode not in (keeper.LISTENING, keeper.ANOTHER_LISTENS):
            text = starter.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise TransportError(
                f"{WHAT}: the keeper of job {self.job!r} does not start, exit status "
                f"{starter.returncode}: {text}"
            )

    def _request(self, request: dict[str, Any], fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        self._check_process()
        answer, answer_fds = self._exchange(request, fds)
        if "error" in answer:
            raise TransportError(f"{WHAT}: the keeper (pid {self.pid}) refuses: {answer['error']}")
        return answer, answer_fds

    def _exchange(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[Any, list[int]]:
        if self._socket is None:
            raise KeeperLost
        try:
            keeper.send_packet(self._socket, request, fds)
            answer, answer_fds = keeper.recv_packet(self._socket)
        except TimeoutError:
            raise Timeout(
                f"{WHAT}: the keeper of job {self.job!r} (pid {self.pid}) does not answer within "
                f"{self.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise KeeperLost from error
        if answer is None:
            raise KeeperLost
        return answer, answer_fds
