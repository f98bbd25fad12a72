"""What a process tells others of itself, and whether those others run."""

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
from rota.memory import empty

_BACKLOG = 1024  # connections of observers that nobody has accepted
# A lost host is noticed after 2 + 3 * 1 s; a slow process is not, because its kernel answers.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_CONNECT_S = 5.0
# Of one handshake, which takes less than a millisecond. A process that does not answer is stopped,
# or waits for a core, and lives.
_OPEN_TIMEOUT = timedelta(milliseconds=100)
_OPEN_AGAIN_S = 1.0


@dataclass(frozen=True)
class Handle:
    """A process of a job; its text is what other processes pass on.

    Args:
        job: random, of the store in which the job's processes meet.
        name: random; a restarted process has another one.
        host: as `_C.host_id`.
        pid: in its own PID namespace, for texts.
        address: where processes of its host learn whether it runs.
        endpoint: where those of other hosts do, as "ip:port".
    """

    job: str
    name: str
    host: str
    pid: int
    address: str
    endpoint: str

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
    """This process as others see it: they learn of its end from the kernel.

    Processes of other hosts hold a connection to a socket of it. Nobody needs to accept that: this
    kernel makes it, answers its keepalive probes, and ends it with the process. (Clients of a torch
    TCPStore here would notice the process's end as well, but not that of its host: torch asks for
    no keepalive, and a wait that runs out of time then waits for the server without any.)

    Args:
        job: as in Handle.
        ip: of this host, as others reach it.
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


class Processes:
    """Whether processes run. Their kernels tell, so no timeout decides about a slow one.

    Those on this host: within milliseconds. On other hosts as well, unless the host itself is lost:
    it then leaves keepalive probes unanswered for some seconds.
    """

    def __init__(self, own: Handle) -> None:
        self._own = own
        self._opened: dict[str, _C.OpenedTensor] = {}
        self._open_again: dict[str, float] = {}  # when to ask those that have not answered
        self._connections: dict[str, socket.socket] = {}  # to those of other hosts
        self._gone: set[str] = set()

    def is_alive(self, handle: Handle) -> bool:
        """Whether the process runs and has not left. Costs two system calls once it is known."""
        if handle.name == self._own.name:
            return True
        if handle.name in self._gone:
            return False
        if handle.host == self._own.host:
            if self._open_again.get(handle.name, 0.0) > time.monotonic():
                return True
            try:
                opened = self._opened.get(handle.name) or self._open(handle)
            except Timeout:
                self._open_again[handle.name] = time.monotonic() + _OPEN_AGAIN_S
                return True
            if opened is not None and opened.is_open:
                return True
        else:
            connection = self._connections.get(handle.name) or self._connect(handle)
            if connection is not None and _is_connected(connection):
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
        """Drops the descriptors of other processes."""
        names = {handle.name for handle in handles}
        self._drop({*self._opened, *self._connections} - names)
        self._open_again = {}

    def take_gone(self, kept: Set[str]) -> set[str]:
        """The names of those that were found gone, once; not of `kept`, which stay."""
        gone = self._gone - kept
        self._gone -= gone
        return gone

    def _drop(self, names: set[str]) -> None:
        for name in names:
            self._opened.pop(name, None)
            connection = self._connections.pop(name, None)
            if connection is not None:
                connection.close()

    def _open(self, handle: Handle) -> _C.OpenedTensor | None:
        try:
            opened = _C.OpenedTensor(handle.address, handle.who, _OPEN_TIMEOUT)
        except TransportError as error:
            if "ulimit" in str(error):  # this process is short of descriptors; the other may live
                raise
            return None
        self._opened[handle.name] = opened
        return opened

    def _connect(self, handle: Handle) -> socket.socket | None:
        ip, port = handle.endpoint.rsplit(":", 1)
        try:
            connection = socket.create_connection((ip, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None
        connection.setblocking(False)
        for level, option, value in _KEEPALIVE:
            connection.setsockopt(level, option, value)
        self._connections[handle.name] = connection
        return connection


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
