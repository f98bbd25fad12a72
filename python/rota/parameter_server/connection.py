"""Makes the shared memory of a ParameterServer, and opens that of the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from rota import _C
from rota.memory import empty
from rota.parameter_server.loop import ServerLoop, Ward
from rota.parameter_server.mailbox import LOOKED, Mailbox, OpenedMailbox, PushLayout
from rota.parameter_server.replica import SAVE_CHANNEL, Replica, Standby, StateLayout
from rota.parameter_server.saving import for_optimizer
from rota.parameter_server.shard import (
    MakeOptimizer,
    Place,
    PublishedShard,
    Rules,
    ServerShard,
    ShardMemory,
    ShardState,
    probe,
)
from rota.rendezvous.joint import JointSteps


class Plan(NamedTuple):
    """What all ranks agree on, and this rank's functions."""

    workers: Sequence[int]  # ranks, ascending
    servers: Sequence[int]  # by number of their shard
    layout: PushLayout
    rules: Rules
    make_optimizer: MakeOptimizer | None
    error_feedback: bool
    num_replicas: int  # 0 or 1

    def standby_of(self, server: int) -> int:
        """The number of the server that goes on with a server's shard."""
        return (server + 1) % len(self.servers)

    def lengths(self) -> list[int]:
        return [section.num_elems for section in self.layout.sections]


class Connection:
    """This rank's part: what it works with, and what it serves with.

    Making one is collective; it blocks until all ranks have the initial parameters, which are those
    of rank 0.

    Args:
        steps: for addresses.
        window: for signals; has the channels of pushes and saves.
        plan: what to make.
        parameters: this rank's, by number; written.
        timeout: of opening another rank's memory.
    """

    def __init__(
        self,
        steps: JointSteps,
        window: _C.Window,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> None:
        self._window = window
        self._plan = plan
        self._parameters = parameters
        self._timeout = timeout
        self.mailbox: Mailbox | None = None  # of a worker
        self.shards: list[PublishedShard] = []  # as a worker sees them
        self.shard: ServerShard | None = None  # of a server
        self.loop: ServerLoop | None = None
        self._memory: ShardMemory | None = None
        self._mailboxes: dict[int, OpenedMailbox] = {}
        self._standby: Standby | None = None
        self._initial: _C.ExposedTensor | None = None
        is_server = window.rank in plan.servers
        self._number = plan.servers.index(window.rank) if is_server else None
        self._addresses = steps.step(self._expose)
        steps.step(self._serve)
        steps.step(self._open_shards)
        self._initial = None

    def _expose(self) -> dict[str, str]:
        addresses: dict[str, str] = {}
        plan, world_size = self._plan, self._window.world_size
        if self._window.rank in plan.workers:
            self.mailbox = Mailbox(plan.layout, plan.error_feedback)
            addresses["mailbox"] = self.mailbox.exposed.address
        if self._number is not None:
            self._memory = ShardMemory(plan.lengths()[self._number], world_size)
            addresses["shard"] = self._memory.exposed.address
            if plan.num_replicas > 0:
                ward = self._ward_number(self._number)
                layout = self._state_layout(ward)
                self._standby = Standby(plan.lengths()[ward], world_size, layout)
                addresses["standby"] = self._standby.memory.exposed.address
                addresses["saves"] = self._standby.exposed_saves.address
        if self._window.rank == 0:
            self._initial = self._expose_parameters()
            addresses["initial"] = self._initial.address
        return addresses

    def _ward_number(self, server: int) -> int:
        return (server - 1) % len(self._plan.servers)

    def _state_layout(self, server: int) -> StateLayout:
        layout = self._plan.layout
        return StateLayout(layout.sections[server], layout.shapes, self._plan.make_optimizer)

    @torch.no_grad()
    def _expose_parameters(self) -> _C.ExposedTensor:
        """This rank's parameters as the sections of a push, float32."""
        layout, lengths = self._plan.layout, self._plan.lengths()
        memory = empty(max(1, sum(lengths)), dtype=torch.float32)
        parts = memory[: sum(lengths)].split(lengths)
        for section, part in zip(layout.sections, parts, strict=True):
            views = section.views(part, layout.shapes)
            for number, view in zip(section.parameters, views, strict=True):
                view.copy_(self._parameters[number])
        return _C.ExposedTensor(memory, 1, others_may_write=False)

    def _open(self, rank: int, kind: str) -> _C.OpenedTensor:
        return _C.OpenedTensor(self._addresses[rank][kind], f"rank {rank}", self._timeout)

    def _serve(self) -> None:
        """Starts this server's shard; it publishes the initial parameters."""
        if self._number is None or self._memory is None:
            return
        plan, number = self._plan, self._number
        mailboxes = self._mailboxes = {
            rank: OpenedMailbox(self._open(rank, "mailbox"), plan.layout) for rank in plan.workers
        }
        lengths = plan.lengths()
        initial = self._open(0, "initial").bytes.view(torch.float32)[: sum(lengths)].split(lengths)
        replica, wards = None, []
        if self._standby is not None:
            ward = self._ward_number(number)
            self._standby.start(initial[ward])
            replica = self._open_replica(number)
            wards.append(self._ward(ward, self._standby))
        state = ShardState(initial[number], 1, 0, dict.fromkeys(plan.workers, 0), None)
        self.shard = self._make_shard(number, self._memory, state, replica)
        self.shard.start()
        self.loop = ServerLoop(self._window, mailboxes, [self.shard], wards)

    def _make_shard(
        self, server: int, memory: ShardMemory, state: ShardState, replica: Replica | None
    ) -> ServerShard:
        plan = self._plan
        return ServerShard(
            server,
            plan.layout,
            self._mailboxes,
            memory,
            plan.rules,
            plan.make_optimizer,
            state,
            replica,
        )

    def _open_replica(self, number: int) -> Replica:
        rank = self._plan.servers[self._plan.standby_of(number)]
        return Replica(
            self._window,
            rank,
            self._open(rank, "standby"),
            self._open(rank, "saves"),
            self._plan.lengths()[number],
            self._state_layout(number),
        )

    def _ward(self, number: int, standby: Standby) -> Ward:
        rank = self._plan.servers[number]

        def take_over() -> ServerShard:
            num_saves = self._window.num_signals(rank, SAVE_CHANNEL)
            state = standby.load(num_saves, self._plan.workers)
            shard = self._make_shard(number, standby.memory, state, None)
            shard.start()
            return shard

        return Ward(self._open(rank, "shard"), standby.memory, take_over)

    def _open_shards(self) -> None:
        """Opens all shards, and copies the initial parameters before anyone can push."""
        if self.mailbox is None:
            return
        plan = self._plan
        for number, rank in enumerate(plan.servers):
            places = [Place(rank, self._open(rank, "shard"))]
            if plan.num_replicas > 0:
                standby = plan.servers[plan.standby_of(number)]
                places.append(Place(standby, self._open(standby, "standby")))
            self.shards.append(PublishedShard(number, plan.layout, places))
        self.pull()

    # ---- loading a state

    @torch.no_grad()
    def prepare(self, state_dict: Mapping[str, Any], names: Sequence[str]) -> ServerShard | None:
        """This server's shard of a state, which has been checked; not published yet.

        Raises:
            ValueError: the state is of another optimizer.
        """
        number, shard, plan = self._number, self.shard, self._plan
        if number is None or shard is None or self._memory is None:
            return None
        shapes, section = plan.layout.shapes, plan.layout.sections[number]
        values = torch.zeros(section.num_elems, dtype=torch.float32, device="cpu")
        for parameter, view in zip(section.parameters, section.views(values, shapes), strict=True):
            view.copy_(state_dict["parameters"][names[parameter]])
        optimizer = None
        if plan.make_optimizer is not None and section.parameters:
            probed, groups = probe(section, shapes, plan.make_optimizer)
            may_grow = plan.num_replicas == 0
            optimizer = for_optimizer(state_dict, names, groups, probed, may_grow)
        num_updates = state_dict["num_updates"]
        state = ShardState(values, shard.version + 1, num_updates, shard.clocks, optimizer)
        return self._make_shard(number, self._memory, state, shard.replica)

    def go_on_with(self, prepared: ServerShard) -> None:
        """Publishes a shard that was prepared, which replaces this server's."""
        assert self.loop is not None and self.shard is not None
        self.loop.replace(self.shard, prepared, self._timeout)
        self.shard = prepared

    @torch.no_grad()
    def pull(self) -> None:
        """Copies the newest versions to this worker's parameters."""
        mailbox = self.mailbox
        assert mailbox is not None
        for shard in self.shards:
            shard.copy_to(
                self._parameters, lambda: mailbox.exposed.publish(LOOKED, mailbox.clock + 1)
            )
