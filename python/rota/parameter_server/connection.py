"""Makes the shared memory of a ParameterServer, and opens that of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from rota import _C
from rota.parameter_server.loop import ServerLoop, Ward
from rota.parameter_server.mailbox import LOOKED, Mailbox, OpenedMailbox
from rota.parameter_server.replica import OpenedReplica, Replica, StateLayout
from rota.parameter_server.saving import for_optimizer
from rota.parameter_server.setup import Setup
from rota.parameter_server.shard import (
    PublishedShard,
    ServerShard,
    ShardMemory,
    ShardState,
    probe,
)
from rota.rendezvous.joint import JointSteps
from rota.shared.memory import empty


class Connection:
    """This rank's part: what it works with, and what it serves with.

    Making one is collective; it blocks until all ranks have the initial parameters, which are those
    of rank 0. `parameters` are this rank's, by number, and get them.
    """

    def __init__(
        self,
        steps: JointSteps,
        window: _C.Window,
        setup: Setup,
        parameters: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> None:
        self._window = window
        self._setup = setup
        self._parameters = parameters
        self._timeout = timeout
        self.mailbox: Mailbox | None = None  # of a worker
        self.shards: list[PublishedShard] = []  # as a worker sees them
        self.shard: ServerShard | None = None  # of a server
        self.loop: ServerLoop | None = None
        self._memory: ShardMemory | None = None
        self._mailboxes: dict[int, OpenedMailbox] = {}
        self._standby: ShardMemory | None = None  # for the shard that this server would go on with
        self._replica: Replica | None = None
        self._initial: _C.ExposedTensor | None = None
        is_server = window.rank in setup.servers
        self._number = setup.servers.index(window.rank) if is_server else None
        self._addresses = steps.step(self._expose)
        steps.step(self._serve)
        steps.step(self._open_shards)
        self._initial = None

    def _expose(self) -> dict[str, str]:
        addresses: dict[str, str] = {}
        setup = self._setup
        if self._window.rank in setup.workers:
            self.mailbox = Mailbox(setup.layout, setup.error_feedback)
            addresses["mailbox"] = self.mailbox.exposed.address
        if self._number is not None:
            self._memory = ShardMemory(self._number, setup)
            addresses["shard"] = self._memory.exposed.address
            if setup.num_replicas > 0:
                self._standby = ShardMemory(setup.ward_of(self._number), setup)
                addresses["standby"] = self._standby.exposed.address
                self._replica = Replica(StateLayout(self._number, setup))
                addresses["replica"] = self._replica.exposed.address
        if self._window.rank == 0:
            self._initial = self._expose_parameters()
            addresses["initial"] = self._initial.address
        return addresses

    @torch.no_grad()
    def _expose_parameters(self) -> _C.ExposedTensor:
        layout = self._setup.layout
        memory = empty(max(1, layout.num_elems), dtype=torch.float32)
        for view, parameter in zip(
            layout.by_number(layout.split(memory)), self._parameters, strict=True
        ):
            view.copy_(parameter)
        return _C.ExposedTensor(memory, 1, others_may_write=False)

    def _open(self, rank: int, kind: str) -> _C.OpenedTensor:
        return _C.OpenedTensor(self._addresses[rank][kind], f"rank {rank}", self._timeout)

    def _serve(self) -> None:
        """Starts this server's shard; it publishes the initial parameters."""
        if self._number is None or self._memory is None:
            return
        setup, number = self._setup, self._number
        mailboxes = self._mailboxes = {
            rank: OpenedMailbox(self._open(rank, "mailbox"), setup.layout) for rank in setup.workers
        }
        initial = setup.layout.split(self._open(0, "initial").bytes.view(torch.float32))
        state = ShardState(initial[number], 1, 0, dict.fromkeys(setup.workers, 0), None)
        self.shard = ServerShard(number, setup, mailboxes, self._memory, state, self._replica)
        self.shard.start()
        self.loop = ServerLoop(self._window, mailboxes, [self.shard], self._wards())

    def _wards(self) -> list[Ward]:
        standby, setup = self._standby, self._setup
        if standby is None or self._number is None:
            return []
        number = setup.ward_of(self._number)
        rank = setup.servers[number]
        published = PublishedShard(number, setup, [(rank, self._open(rank, "shard"))])
        layout = StateLayout(number, setup)
        replica = OpenedReplica(layout, self._open(rank, "replica"), published)

        def take_over() -> ServerShard:
            shard = ServerShard(number, setup, self._mailboxes, standby, replica.load(), None)
            shard.start()
            return shard

        return [Ward(published, standby, take_over)]

    def _open_shards(self) -> None:
        """Opens all shards, and copies the initial parameters before anyone can push."""
        if self.mailbox is None:
            return
        setup = self._setup
        for number, rank in enumerate(setup.servers):
            places = [(rank, self._open(rank, "shard"))]
            if setup.num_replicas > 0:
                standby = setup.servers[setup.standby_of(number)]
                places.append((standby, self._open(standby, "standby")))
            self.shards.append(PublishedShard(number, setup, places))
        self.pull()

    # ---- loading a state

    @torch.no_grad()
    def prepare(self, state_dict: Mapping[str, Any], names: Sequence[str]) -> ServerShard | None:
        """This server's shard of a checked state, not published yet; ValueError: it is of another
        optimizer."""
        number, shard, setup = self._number, self.shard, self._setup
        if number is None or shard is None or self._memory is None:
            return None
        share = setup.layout.shares[number]
        values = share.zeros()
        for parameter, view in zip(share.parameters, share.tensors(values), strict=True):
            view.copy_(state_dict["parameters"][names[parameter]])
        optimizer = None
        if setup.make_optimizer is not None and share.parameters:
            probed, groups = probe(share, setup.make_optimizer)
            may_grow = setup.num_replicas == 0
            optimizer = for_optimizer(state_dict, names, groups, probed, may_grow)
        num_updates = state_dict["num_updates"]
        state = ShardState(values, shard.version + 1, num_updates, shard.clocks, optimizer)
        return ServerShard(number, setup, self._mailboxes, self._memory, state, shard.replica)

    def go_on_with(self, prepared: ServerShard) -> None:
        assert self.loop is not None and self.shard is not None
        self.loop.replace(self.shard, prepared, self._timeout)
        self.shard = prepared

    @torch.no_grad()
    def pull(self) -> None:
        """Copies the newest versions to this worker's parameters, if it is one."""
        if (mailbox := self.mailbox) is not None:
            order_loads = partial(mailbox.exposed.publish, LOOKED, mailbox.clock + 1)
            for shard in self.shards:
                shard.copy_to(self._parameters, order_loads)
