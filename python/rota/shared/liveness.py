"""Whether processes run: what one shows to others, and how those others see its end.

Kernels tell, so no timeout decides about a slow process. On one host a process exposes memory,
which its kernel closes with it; processes of other hosts hold a connection to a socket of it. (The
keeper of checkpoints, which imports nothing of rota, watches its ranks by pidfd.)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from rota import _C
from rota.errors import Timeout, TransportError
from rota.shared.memory import empty

_BACKLOG = 1024  # connections of observers that nobody has accepted
# A lost host is noticed after 2 + 3 * 1 s; a slow process is not, because its kernel answers.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_CONNECT_S = 5.0
# For one handshake, which takes less than a millisecond.
_OPEN_TIMEOUT = timedelta(milliseconds=100)
_OPEN_AGAIN_S = 1.0


@dataclass(frozen=True)
class Handle:
    """A process of a job; its text is what other processes pass on."""

    job: str  # random, of the store in which the job's processes meet
    name: str  # random; a restarted process has another one
    host: str  # as _C.host_id
    pid: int  # in its own PID namespace, for texts
    address: str  # where processes of its host learn whether it runs
    endpoint: str  # where those of other hosts do, as "ip:port"

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Handle:
        """Raises ValueError: the text is no handle."""
        try:
            return Handle(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rota.elastic: {text!r} is no handle of a process ({error}); pass what "
                f"Membership.handle gives"
            ) from error

    @property
    def who(self) -> str:
        return f"pid {self.pid} ({self.name})"


class OwnProcess:
    """This process as others see it.

    Nobody needs to accept the connections of other hosts: this kernel makes them, answers their
    keepalive probes, and ends them with the process. (Clients of a torch TCPStore here would not
    notice the end of its host: torch asks for no keepalive.)
    """

    def __init__(self, job: str, ip: str) -> None:
        self._exposed = _C.ExposedTensor(empty(1), 0, others_may_write=False)
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((ip, 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._observers: list[socket.socket] = []
        self.handle = Handle(
            job,
            uuid.uuid4().hex[:12],
            _C.host_id(),
            os.getpid(),
            self._exposed.address,
            f"{ip}:{self._listener.getsockname()[1]}",
        )
        self.is_closed = False

    def tidy(self) -> None:
        """Makes room for more observers in the socket's backlog."""
        with contextlib.suppress(BlockingIOError):
            while True:
                observer, _ = self._listener.accept()
                observer.setblocking(False)
                self._observers.append(observer)
        self._observers = [observer for observer in self._observers if _is_connected(observer)]

    def close(self) -> None:
        """From now on this process counts as gone. Idempotent."""
        self.is_closed = True
        self._exposed.close()
        self._listener.close()
        for observer in self._observers:
            observer.close()


class LocalWatch:
    """Whether a process of this host runs, by memory that it exposes.

    One that does not answer a handshake is stopped, or waits for a core, and lives; it is asked
    again after a second.
    """

    def __init__(self, address: str, who: str, timeout: timedelta = _OPEN_TIMEOUT) -> None:
        self._address = address
        self._who = who
        self._timeout = timeout
        self._opened: _C.OpenedTensor | None = None
        self._open_again = 0.0

    def is_alive(self) -> bool:
        """Whether it runs and has not closed the memory. Costs two system calls once it is known.
        TransportError: this process is short of descriptors."""
        if self._opened is None:
            if self._open_again > time.monotonic():
                return True
            try:
                self._opened = _C.OpenedTensor(self._address, self._who, self._timeout)
            except Timeout:
                self._open_again = time.monotonic() + _OPEN_AGAIN_S
                return True
            except TransportError as error:
                if "ulimit" in str(error):  # the other may live
                    raise
                return False
        return self._opened.is_open

    def close(self) -> None:
        self._opened = None


class RemoteWatch:
    """Whether a process of another host runs, which listens at `endpoint` ("ip:port")."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._connection: socket.socket | None = None

    def is_alive(self) -> bool:
        """Raises OSError: this process is short of descriptors."""
        if self._connection is None:
            ip, port = self._endpoint.rsplit(":", 1)
            try:
                self._connection = socket.create_connection((ip, int(port)), timeout=_CONNECT_S)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return False
            self._connection.setblocking(False)
            for level, option, value in _KEEPALIVE:
                self._connection.setsockopt(level, option, value)
        return _is_connected(self._connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Processes:
    """Whether the processes of a job run."""

    def __init__(self, own: Handle) -> None:
        self._own = own
        self._watches: dict[str, LocalWatch | RemoteWatch] = {}
        self._gone: set[str] = set()

    def is_alive(self, handle: Handle) -> bool:
        if handle.name == self._own.name:
            return True
        if handle.name in self._gone:
            return False
        if handle.name not in self._watches:
            is_here = handle.host == self._own.host
            self._watches[handle.name] = (
                LocalWatch(handle.address, handle.who) if is_here else RemoteWatch(handle.endpoint)
            )
        if self._watches[handle.name].is_alive():
            return True
        self._gone.add(handle.name)
        self._drop({handle.name})
        return False

    def gone(self, handles: Iterable[Handle]) -> list[Handle]:
        return [handle for handle in handles if not self.is_alive(handle)]

    def describe_gone(self, members: Sequence[Handle]) -> str:
        """Which members, by rank, have died or left, as "rank 1, pid 4711 (name),"; empty: none."""
        gone = self.gone(members)
        return ", ".join(f"rank {members.index(handle)}, {handle.who}," for handle in gone)

    def keep_only(self, handles: Iterable[Handle]) -> None:
        self._drop(self._watches.keys() - {handle.name for handle in handles})

    def take_gone(self, kept: Set[str]) -> set[str]:
        """The names of those that were found gone, once; not of `kept`, which stay."""
        gone = self._gone - kept
        self._gone -= gone
        return gone

    def _drop(self, names: set[str]) -> None:
        for name in names:
            self._watches.pop(name).close()


def own_ip(store: dist.Store) -> str:
    """The address under which this host reaches the server of a TCPStore, and is reached."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "127.0.0.1"  # a file: on one host
    host, port = store.host, store.port
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses the own address, and sends nothing
        ip: str = probe.getsockname()[0]
        return ip


def _is_connected(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:  # reset, or keepalive probes were not answered
        return False
