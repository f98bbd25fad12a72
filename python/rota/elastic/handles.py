"""What a process tells others of itself, and whether those others run."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

from rota import _C
from rota.errors import TransportError
from rota.memory import empty

# Of one handshake, which takes less than a millisecond unless the other process is stopped.
_OPEN_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Handle:
    """A process of a job; its text is what other processes pass on.

    Args:
        job: random, of the store in which the job's processes meet.
        name: random; a restarted process has another one.
        host: as `_C.host_id`.
        pid: in its own PID namespace, for texts.
        address: where processes of its host learn whether it runs.
    """

    job: str
    name: str
    host: str
    pid: int
    address: str

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
    """This process as others see it: they learn of its end from the kernel."""

    def __init__(self, job: str) -> None:
        self._exposed = _C.ExposedTensor(empty(1), 0, others_may_write=False)
        self.handle = Handle(
            job, uuid.uuid4().hex[:12], _C.host_id(), os.getpid(), self._exposed.address
        )

        self.is_closed = False

    def close(self) -> None:
        """From now on this process counts as gone. Idempotent."""
        self.is_closed = True
        self._exposed.close()


class Processes:
    """Whether processes run, without a timeout: their kernel reports the end of those on this host.

    Nothing is known here of processes on other hosts; they count as alive.
    """

    def __init__(self, own: Handle) -> None:
        self._own = own
        self._opened: dict[str, _C.OpenedTensor] = {}
        self._gone: set[str] = set()

    def is_alive(self, handle: Handle) -> bool:
        """Whether the process runs and has not left. Costs two system calls once it is known."""
        if handle.name == self._own.name or handle.host != self._own.host:
            return True
        if handle.name in self._gone:
            return False
        opened = self._opened.get(handle.name) or self._open(handle)
        if opened is not None and opened.is_open:
            return True
        self._gone.add(handle.name)
        self._opened.pop(handle.name, None)
        return False

    def gone(self, handles: Iterable[Handle]) -> list[Handle]:
        return [handle for handle in handles if not self.is_alive(handle)]

    def keep_only(self, handles: Iterable[Handle]) -> None:
        """Drops what is known of other processes, and their descriptors."""
        names = {handle.name for handle in handles}
        self._opened = {name: opened for name, opened in self._opened.items() if name in names}
        self._gone &= names

    def _open(self, handle: Handle) -> _C.OpenedTensor | None:
        try:
            opened = _C.OpenedTensor(handle.address, handle.who, _OPEN_TIMEOUT)
        except TransportError as error:
            if "ulimit" in str(error):  # this process is short of descriptors; the other may live
                raise
            return None
        self._opened[handle.name] = opened
        return opened
