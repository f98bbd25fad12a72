"""The members of a process group that may change: torch's reconfigure, from torch 2.15 on."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from rota import timeouts
from rota.elastic.forming import Forming
from rota.errors import PeerFailed
from rota.rendezvous.documents import Documents
from rota.rendezvous.groups import begin_generation
from rota.shared.liveness import Handle, OwnProcess, Processes, own_ip

Connect = Callable[[dist.Store, int, int, Callable[[], None]], None]


class GroupMembers:
    """This process among those that may be members of one group, whose store outlives all."""

    def __init__(self, store: dist.Store, timeout: timedelta) -> None:
        self._store = dist.PrefixStore("rota/members", store)
        self._timeout = timeouts.usable(timeout)
        self._documents = Documents(self._store)
        job = self._documents.change("job", lambda job: job.setdefault("id", uuids.uuid4().hex))
        self._own = OwnProcess(job["id"], own_ip(store))
        self._processes = Processes(self._own.handle)

    def handle(self) -> str:
        """This process, for reconfigure() of others."""
        return str(self._own.handle)

    def reconfigure(
        self,
        uuid: int,
        handles: Sequence[str],
        are_ordered: bool,
        timeout: timedelta | None,
        connect: Connect,
    ) -> None:
        """As `rota.elastic.Membership.reconfigure`; handles are by rank if ordered.

        `connect` gets a store for this uuid alone, the rank, the number of members, and what raises
        if one of them is gone.
        """
        forming = Forming(
            self._documents,
            self._own.handle,
            self._processes,
            str(uuid),
            list(handles) if are_ordered else sorted(handles),
            self._timeout if timeout is None else timeouts.usable(timeout),
        )
        forming.agree()
        members = forming.handles
        with forming.connecting():
            connect(
                dist.PrefixStore(f"groups/{uuid}", self._store),
                members.index(self._own.handle),
                len(members),
                forming.check,
            )
        self._processes.keep_only(members)
        self._own.tidy()
        begin_generation(str(uuid), lambda: self._check(members))

    def _check(self, members: Sequence[Handle]) -> None:
        if who := self._processes.describe_gone(members):
            raise PeerFailed(f"rota: {who} has died or left; reconfigure without it")
