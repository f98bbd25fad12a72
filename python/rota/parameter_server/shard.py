"""One server's shard of the parameters: applies pushes to it, and publishes versions of it.

The server keeps float32 parameters and any torch optimizer for them. After each update it copies
them to the older one of two versions, which workers read in place. This module decides what an
update is; it must not wait: loop.py does.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rota import _C, _torch
from rota.errors import TransportError
from rota.parameter_server.mailbox import ASKED, OpenedMailbox
from rota.parameter_server.saving import Save, by_number, numbers_by_group
from rota.parameter_server.setup import NOTE_BYTES, MakeOptimizer, Setup, Share
from rota.shared.buckets import write_bytes
from rota.shared.double_buffer import (
    FIRST_FREE_WORD,
    NUM_SLOTS,
    DoubleBuffer,
    OpenedDoubleBuffer,
)
from rota.shared.memory import empty

if TYPE_CHECKING:
    from rota.parameter_server.replica import Replica

# Words of a shard behind those of its double buffer; server.py has the table.
SLOWEST = FIRST_FREE_WORD
CONSUMED, APPLIED, SAVED, _WORDS_OF_WORKER = range(4)  # of each worker

# Contributions are added in parts that stay in a core's cache until they are divided.
_PART_ELEMS = 1 << 16


def word_of(worker: int, word: int) -> int:
    """Where CONSUMED, APPLIED or SAVED of a worker is."""
    return SLOWEST + 1 + _WORDS_OF_WORKER * worker + word


def checked_optimizer(
    make_optimizer: MakeOptimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Raises TypeError or ValueError if the function returns something else."""
    optimizer: object = make_optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"rota.ParameterServer: make_optimizer returned an object of type "
            f"{type(optimizer).__name__}, expected a torch.optim.Optimizer of the parameters that "
            f"it is given"
        )
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(given) != sorted(id(p) for p in parameters):
        raise ValueError(
            f"rota.ParameterServer: make_optimizer returned an optimizer of {len(given)} "
            f"parameters that are not the {len(parameters)} given to it; use those, which are "
            f"float32 copies"
        )
    return optimizer


def probe(share: Share, make_optimizer: MakeOptimizer) -> tuple[dict[str, Any], list[list[int]]]:
    """The state_dict() of an optimizer like a share's after a step with zeroes, and the numbers of
    its parameters, by group."""
    probes = [nn.Parameter(zeros) for zeros in share.tensors(share.zeros())]
    for parameter in probes:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = checked_optimizer(make_optimizer, probes)
    with torch.device("cpu"):  # as in the server's thread, whatever the caller's default
        optimizer.step()
    return optimizer.state_dict(), numbers_by_group(optimizer, probes, share.parameters)


class ShardState(NamedTuple):
    """What an update depends on, beside the pushes."""

    values: torch.Tensor  # float32 parameters, flat, as in Share
    version: int
    num_updates: int
    clocks: dict[int, int]  # each worker's pushes that are applied
    optimizer: dict[str, Any] | None  # its state_dict(); None before the first step


class ShardMemory(DoubleBuffer[torch.Tensor]):
    """The published versions of a shard (num_elems, float32), on the server."""

    def __init__(self, server: int, setup: Setup) -> None:
        layout = setup.shard_layout(server)
        memory = empty(layout.end, dtype=torch.uint8)
        views = layout.views(memory)
        num_words = word_of(setup.world_size, 0)
        exposed = _C.ExposedTensor(memory, num_words, others_may_write=False)
        super().__init__(exposed, views["versions"].unbind())
        self.notes = views["notes"]


class ServerShard:
    """A shard on the server that updates it.

    Mailboxes are by rank of their workers, ascending. The replica, which is saved with every
    update, is what another server would go on with.
    """

    def __init__(
        self,
        server: int,
        setup: Setup,
        mailboxes: Mapping[int, OpenedMailbox],
        memory: ShardMemory,
        state: ShardState,
        replica: Replica | None,
    ) -> None:
        self._server = server
        self._mailboxes = mailboxes
        self._memory = memory
        self._setup = setup
        self.replica = replica
        self._share = share = setup.layout.shares[server]
        self._flat = state.values.clone()
        self._gradient = torch.zeros_like(self._flat)
        layout = setup.layout
        needs_scratch = layout.wire.dtype is not None or layout.keeps_base
        self._scratch = torch.zeros_like(self._flat if needs_scratch else self._flat[:0])
        self._views = share.tensors(self._flat)
        self._gradients = share.tensors(self._gradient)
        self.parameters = [nn.Parameter(view) for view in self._views]
        self.optimizer: torch.optim.Optimizer | None = None
        if setup.make_optimizer is not None and self.parameters:
            self.optimizer = checked_optimizer(setup.make_optimizer, self.parameters)
            self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
            if state.optimizer is not None:
                self.optimizer.load_state_dict(state.optimizer)
        self.clocks = dict(state.clocks)
        self.version = state.version
        self.num_updates = state.num_updates  # of the training, also before it was loaded
        # By rank of a worker that has asked: the question and the save, until it is read.
        self._saves: dict[int, tuple[int, _C.ExposedTensor | None]] = {}
        # Updates between a worker's pull and the application of its push, by worker.
        self.delays: dict[int, Counter[int]] = {worker: Counter() for worker in mailboxes}

    def start(self) -> None:
        self._publish_update(self._mailboxes, self._mailboxes)

    def close(self) -> None:
        self._memory.exposed.close()

    # ---- updates

    @torch.no_grad()
    def advance(self, living: Set[int]) -> bool:
        """Makes one update if what it needs is there, and returns whether it was.

        `living` may push again: a worker's last push must be visible to whoever leaves it out.
        """
        pushers = self._pushers(living)
        if not pushers:
            return False
        clock = self.clocks[pushers[0]]
        if self._setup.mode != "sync":
            self._apply(pushers[0], clock)
        elif self._setup.average_weights:
            self._average(pushers, clock, self._flat)
        else:
            self._average(pushers, clock, self._gradient)
            self._step()
        for worker in pushers:
            pulled = self._mailboxes[worker].version(clock, self._server)
            # A worker may have pulled what its server had not saved when it died.
            self.delays[worker][max(0, self.version - pulled)] += 1
            self.clocks[worker] = clock + 1
        self.version += 1
        self.num_updates += 1
        self._publish_update(pushers, living)
        return True

    def _pushers(self, living: Set[int]) -> list[int]:
        """The workers whose pushes make the next update; none if not all have come."""
        if self._setup.mode == "sync":
            clock = max(self.clocks.values())
            pushers = [w for w, mailbox in self._mailboxes.items() if mailbox.num_pushed > clock]
            return pushers if living <= set(pushers) else []
        by_clock = sorted(self.clocks, key=lambda worker: self.clocks[worker])
        ready = (w for w in by_clock if self._mailboxes[w].num_pushed > self.clocks[w])
        return list(itertools.islice(ready, 1))

    def _average(self, pushers: Sequence[int], clock: int, total: torch.Tensor) -> None:
        """The mean of pushes, with the bits of all_reduce(op="avg")."""
        mailboxes = [self._mailboxes[worker] for worker in pushers]
        first = mailboxes[0].values(clock, self._server, total)
        if len(mailboxes) == 1:
            if first is not total:
                total.copy_(first)
            return
        for i, mailbox in enumerate(mailboxes[1:], 1):
            values = mailbox.values(clock, self._server, self._scratch)
            is_last = i == len(mailboxes) - 1
            for begin in range(0, len(total), _PART_ELEMS):
                part = slice(begin, begin + _PART_ELEMS)
                torch.add(first[part], values[part], out=total[part])
                if is_last:
                    total[part].div_(len(mailboxes))
            first = total

    def _apply(self, worker: int, clock: int) -> None:
        mailbox = self._mailboxes[worker]
        values = mailbox.values(clock, self._server, self._gradient)
        if self._setup.average_weights:
            # Each worker's newest weights, on average, make up the whole.
            self._flat.lerp_(values, 1 / len(self._mailboxes))
            return
        if values is not self._gradient:
            self._gradient.copy_(values)
        if (compensation := self._setup.delay_compensation) != 0:
            # The first-order change of the gradient since the worker's pull, with the diagonal of
            # g g^T for the Hessian (DC-ASGD, Zheng et al. 2017): g + lambda g * g * (w - w_pulled).
            base = mailbox.base(clock, self._server)
            moved = torch.sub(self._flat, base, out=self._scratch).mul_(self._gradient)
            self._gradient.addcmul_(self._gradient, moved, value=compensation)
        self._step()

    def _step(self) -> None:
        if self.optimizer is None:
            return
        if self._setup.lr_lambda is not None:
            factor = self._setup.lr_lambda(self.num_updates)
            for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
                group["lr"] = peak * factor
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:  # the first time, or the optimizer has dropped it
                parameter.grad = gradient
        self.optimizer.step()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():  # the optimizer has replaced its memory
                view.copy_(parameter)
                parameter.data = view

    # ---- publishing

    def _publish_update(self, pushers: Collection[int], living: Iterable[int]) -> None:
        """Publishes the version, which has the pushes of these workers, and saves it."""
        self._memory.begin(self.version).copy_(self._flat)
        self._memory.finish(self.version)
        # First, so that workers that have all flushed are nobody's slowest any more.
        self.publish_slowest(living)
        for worker in pushers:
            self._memory.exposed.publish(word_of(worker, APPLIED), self.clocks[worker])
        if self.replica is not None:
            self.replica.save(self.version, self.clocks, self.optimizer, self.num_updates)
        for worker in pushers:
            self._memory.exposed.publish(word_of(worker, CONSUMED), self.clocks[worker])

    def publish_slowest(self, living: Iterable[int]) -> None:
        slowest = min((self.clocks[worker] for worker in living), default=None)
        if slowest is not None:
            self._memory.exposed.publish(SLOWEST, slowest)

    # ---- saving

    def answer(self, worker: int) -> None:
        """Makes a save if a worker asks for one and all its pushes are applied, and frees it once
        the worker has read it."""
        mailbox = self._mailboxes[worker]
        question = mailbox.opened.load(ASKED)
        last, _ = self._saves.get(worker, (0, None))
        if question % 2 == 0:  # it does not wait for a save
            self.forget(worker)
        elif question != last and self.clocks[worker] == mailbox.num_pushed:
            save = None
            try:
                save = _C.ExposedTensor(self._save().packed(), 1, others_may_write=False)
                note = {"address": save.address}
            except Exception as error:  # that of the worker, not of the server
                text = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
                note = {"error": text[: NOTE_BYTES // 8]}  # JSON takes up to 6 bytes for each
            self._saves[worker] = question, save
            written = json.dumps(note).encode().ljust(NOTE_BYTES, b"\0")
            write_bytes(self._memory.notes[worker], written)
            self._memory.exposed.publish(word_of(worker, SAVED), question)

    def forget(self, worker: int) -> None:
        self._saves.pop(worker, None)

    def _save(self) -> Save:
        numbers = self._share.parameters
        values = dict(zip(numbers, self._views, strict=True))
        if self._setup.average_weights:
            return Save(self.num_updates, values, None, None)
        if self.optimizer is None:  # there are no parameters
            return Save(self.num_updates, values, {}, {})
        groups = numbers_by_group(self.optimizer, self.parameters, numbers)
        return Save(self.num_updates, values, *by_number(self.optimizer.state_dict(), groups))


class PublishedShard(OpenedDoubleBuffer[torch.Tensor]):
    """A shard as others see it, in place, at its server or at whoever goes on with it."""

    def __init__(
        self, server: int, setup: Setup, places: Sequence[tuple[int, _C.OpenedTensor]]
    ) -> None:
        self.server = server
        self.pulled_version = 0
        self._share = setup.layout.shares[server]
        self._layout = setup.shard_layout(server)
        self._places = list(places)
        self.switch()

    def switch(self) -> bool:
        """Goes on with the next place, where the shard will appear; False if there is none."""
        if not self._places:
            return False
        self.rank, opened = self._places.pop(0)
        views = self._layout.views(opened.bytes)
        super().__init__(opened, views["versions"].unbind())
        self._parameters = [self._share.tensors(flat) for flat in self._slots]
        self._notes = views["notes"]
        return True

    def read_save(self, worker: int, timeout: timedelta) -> Save:
        found = json.loads(self._notes[worker].numpy().tobytes().rstrip(b"\0"))
        if "error" in found:
            raise TransportError(
                f"rota.ParameterServer.state_dict: server rank {self.rank} cannot save its "
                f"parameters: {found['error']}"
            )
        opened = _C.OpenedTensor(found["address"], f"rank {self.rank}", timeout)
        return Save.unpacked(opened.bytes)

    def copy_to(self, parameters: Sequence[torch.Tensor], order_loads: Callable[[], None]) -> None:
        """Copies the newest version to its parameters, which are given by number. Never waits;
        order_loads() orders what was loaded before it before all that follows."""
        targets = [parameters[number] for number in self._share.parameters]
        while True:
            version = self.num_done
            if targets:
                _torch.copy_each(targets, self._parameters[version % NUM_SLOTS])
            order_loads()
            if not self.is_overwritten(version):
                break
        self.pulled_version = version
