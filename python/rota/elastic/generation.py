"""One generation of a membership: its ranks, its groups, and how all of it ends.

| key in the store | value |
|---|---|
| change/UUID | a process that has come for the generation after this one |
| over/UUID | why a member has gone on |
| note/KEY | a text of members for whoever comes later |
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from rota import _torch
from rota.communicator import Communicator, living_communicators
from rota.elastic.forming import Forming
from rota.errors import PeerFailed, RotaError
from rota.rendezvous.groups import (
    begin_generation,
    end_generation,
    is_of_this_generation,
    rota_backend,
)
from rota.shared.liveness import Handle, Processes
from rota.window_setup import living_windows


class Generation:
    """The ranks that train together until one is lost, leaves or joins; `Membership` makes it.

    While it lasts, `torch.distributed`'s default group is that of its ranks, on backend "rota".
    What is made meanwhile ends with it: groups, communicators and windows then raise
    rota.RotaError, which names the generation.

    Attributes:
        number: 1 for the first one of a job, and larger for each later one.
        uuid: random; part of every name in the store.
        rank, world_size: of this process.
        handles: of the members, by rank.
        communicator: over all ranks.
        seconds: what its making took, by term. For benchmarks.
    """

    communicator: Communicator

    def __init__(
        self,
        store: dist.Store,
        processes: Processes,
        number: int,
        uuid: str,
        handles: Sequence[Handle],
        rank: int,
    ) -> None:
        self.number = number
        self.uuid = uuid
        self.rank = rank
        self.world_size = len(handles)
        self.handles = [str(handle) for handle in handles]
        self.seconds: dict[str, float] = {}
        self._members = list(handles)
        self._forming: Forming | None = None
        self._store = store
        self._processes = processes
        self._has_ended = False
        self._flag = torch.zeros(1, dtype=torch.int64, device="cpu")

    @contextlib.contextmanager
    def forming(self, forming: Forming) -> Iterator[None]:
        """A context for making its groups; leaves none of them behind after an error."""
        # Communicators keep what they are given, in C++, where no garbage collector finds a cycle.
        check = weakref.WeakMethod(self.check_peers)

        def check_peers() -> None:
            method = check()
            if method is not None:
                method()

        begin_generation(self.uuid, check_peers)
        self._forming = forming
        try:
            with forming.connecting():
                yield
        except BaseException as error:
            end_groups(f"{self} was not formed: {error}")
            raise
        self._forming = None

    def is_over(self, *, leave: bool = False) -> bool:
        """Whether the ranks are to go on in the next generation; the same answer on all of them.

        It is collective: all ranks call it, at the end of a step. Rank 0 asks the store whether a
        process has come, and an all_reduce spreads the answer. After True, every rank calls
        `Membership.next`, or `Membership.leave` if it leaves.

        Args:
            leave: this rank is going to leave.

        Raises:
            rota.PeerFailed: a rank has died or left without this.
        """
        if self._has_ended:
            raise RotaError(
                f"rota.elastic: {self} has ended; use the one that Membership.next returns"
            )
        wants = leave or (self.rank == 0 and self._store.check([f"change/{self.uuid}"]))
        self._flag[0] = int(wants)
        self.communicator.all_reduce(self._flag, op="max")
        return bool(self._flag[0])

    def check_peers(self) -> None:
        """Raises rota.PeerFailed if a member has ended or gone on; for what ranks make together."""
        if self._forming is not None:
            return self._forming.check()
        self._check_gone()
        over = f"over/{self.uuid}"
        if self._store.check([over]):
            self._check_gone()  # the cause why a member has gone on
            reason = self._store.get(over).decode()
            raise PeerFailed(f"rota.elastic: {self} has ended: {reason}")

    def _check_gone(self) -> None:
        if who := self._processes.describe_gone(self._members):
            raise PeerFailed(f"rota.elastic: {self}: {who} has died or left")

    def end(self, reason: str) -> None:
        """Ends everything that was made in it, here and for whoever waits elsewhere. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self._store.set(f"over/{self.uuid}", reason)
        end_groups(f"{self} has ended: {reason}; take what is made in the new one")

    def write_note(self, key: str, text: str) -> None:
        """Leaves a text in the store, for processes that have not joined yet."""
        self._store.set(f"note/{key}", text)

    def __str__(self) -> str:
        return f"generation {self.number} ({self.uuid})"


def end_groups(reason: str) -> None:
    """Aborts and destroys torch's groups, and rota's communicators and windows, of this process."""
    for communicator in living_communicators():
        with contextlib.suppress(RotaError):
            communicator.abort(reason)
    for group in _torch.all_groups():
        with contextlib.suppress(RuntimeError):  # one that is closed
            if (backend := rota_backend(group)) is not None:
                backend.abort(reason)
    for window in living_windows():
        window.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    _torch.restart_group_names()
    end_generation()


def shares_host(generation: Generation, rank: int) -> bool:
    return any({rank, generation.rank} <= set(host) for host in generation.communicator.hosts)


def check_results() -> None:
    """Communicator.check_results() of everything that was made in this generation."""
    for communicator in living_communicators():
        if is_of_this_generation(communicator.name):
            communicator.check_results()
    for group in _torch.all_groups():
        if (backend := rota_backend(group)) is not None:
            backend.check_results()
