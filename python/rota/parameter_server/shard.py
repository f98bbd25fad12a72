"""One server's shard of the parameters: applies pushes to it, and publishes versions of it.

The server keeps float32 parameters and any torch optimizer for them. After each update it copies
them to the older one of two versions, which workers read in place. This module decides what an
update is; it must not wait: loop.py does.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rota import _C
from rota.errors import TransportError
from rota.memory import empty
from rota.parameter_server.mailbox import OpenedMailbox, PushLayout, Section
from rota.parameter_server.saving import Save, by_number, numbers_by_group

if TYPE_CHECKING:
    from rota.parameter_server.replica import Replica

NUM_VERSIONS = 2
# Words of a shard; server.py has the table.
BEGUN, DONE, SLOWEST, _NUM_FIXED = range(4)

# Contributions are added in parts that stay in a core's cache until they are divided.
_PART_ELEMS = 1 << 16

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# Of a worker's save: JSON, then zeroes.
_NOTE_BYTES = 4096


def consumed_word(worker: int) -> int:
    return _NUM_FIXED + 3 * worker


def applied_word(worker: int) -> int:
    return _NUM_FIXED + 3 * worker + 1


def saved_word(worker: int) -> int:
    return _NUM_FIXED + 3 * worker + 2


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


def probe(
    section: Section, shapes: Sequence[torch.Size], make_optimizer: MakeOptimizer
) -> tuple[dict[str, Any], list[list[int]]]:
    """The state_dict() of an optimizer like a section's after a step with zeroes, and the numbers
    of its parameters, by group."""
    probes = [
        nn.Parameter(torch.zeros(shapes[number], dtype=torch.float32, device="cpu"))
        for number in section.parameters
    ]
    for parameter in probes:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = checked_optimizer(make_optimizer, probes)
    with torch.device("cpu"):  # as in the server's thread, whatever the caller's default
        optimizer.step()
    return optimizer.state_dict(), numbers_by_group(optimizer, probes, section.parameters)


class Rules(NamedTuple):
    """What an update is."""

    mode: str  # "sync", "async" or "stale"
    average_weights: bool
    delay_compensation: float
    lr_lambda: Callable[[int], float] | None


class ShardState(NamedTuple):
    """What an update depends on, beside the pushes."""

    values: torch.Tensor  # float32 parameters, as a section of a push
    version: int
    num_updates: int
    clocks: dict[int, int]  # each worker's pushes that are applied
    optimizer: dict[str, Any] | None  # its state_dict(); None before the first step


class ShardMemory:
    """The published versions of a shard, in place: (NUM_VERSIONS, num_elems), float32.

    Behind them is a note for each rank.
    """

    def __init__(self, num_elems: int, num_ranks: int, *, others_may_write: bool = False) -> None:
        num_note_elems = num_ranks * _NOTE_BYTES // 4
        memory = empty(NUM_VERSIONS * num_elems + num_note_elems, dtype=torch.float32)
        versions, notes = memory.split([NUM_VERSIONS * num_elems, num_note_elems])
        self.versions = versions.view(NUM_VERSIONS, num_elems)
        self.notes = notes.view(torch.uint8).view(num_ranks, _NOTE_BYTES)
        num_words = _NUM_FIXED + 3 * num_ranks
        self.exposed = _C.ExposedTensor(memory, num_words, others_may_write)


class ServerShard:
    """A shard on the server that updates it.

    Args:
        server: the shard's number.
        layout: of pushes.
        mailboxes: of the workers, by rank, in ascending order.
        memory: where versions are published.
        rules: what an update is.
        make_optimizer: of the shard's parameters; None if weights are averaged.
        state: what to start from; its values are copied.
        replica: where every update is saved.
    """

    def __init__(
        self,
        server: int,
        layout: PushLayout,
        mailboxes: Mapping[int, OpenedMailbox],
        memory: ShardMemory,
        rules: Rules,
        make_optimizer: MakeOptimizer | None,
        state: ShardState,
        replica: Replica | None,
    ) -> None:
        self._server = server
        self._mailboxes = mailboxes
        self._memory = memory
        self._rules = rules
        self.replica = replica
        self._section = section = layout.sections[server]
        self._flat = state.values.clone()
        self._gradient = torch.zeros_like(self._flat)
        needs_scratch = layout.wire.dtype is not None or layout.keeps_base
        self._scratch = torch.zeros_like(self._flat if needs_scratch else self._flat[:0])
        self._views = section.views(self._flat, layout.shapes)
        self._gradients = section.views(self._gradient, layout.shapes)
        self.parameters = [nn.Parameter(view) for view in self._views]
        self.optimizer: torch.optim.Optimizer | None = None
        if make_optimizer is not None and self.parameters:
            self.optimizer = checked_optimizer(make_optimizer, self.parameters)
            self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
            if state.optimizer is not None:
                self.optimizer.load_state_dict(state.optimizer)
        self.clocks = dict(state.clocks)
        self.version = state.version
        self.num_updates = state.num_updates  # of the training, also before it was loaded
        # Of workers that have asked: by rank, the question and the save, until it is read.
        self._saves: dict[int, tuple[int, _C.ExposedTensor | None]] = {}
        # Updates between a worker's pull and the application of its push, by worker.
        self.delays: dict[int, Counter[int]] = {worker: Counter() for worker in mailboxes}

    def start(self) -> None:
        """Publishes what it starts from."""
        self._publish(self._mailboxes, self._mailboxes)
        self._publish_consumed(self._mailboxes)

    def close(self) -> None:
        """Lets workers know that no version follows."""
        self._memory.exposed.close()

    # ---- updates

    @torch.no_grad()
    def advance(self, living: Set[int]) -> bool:
        """Makes one update if what it needs is there, and returns whether it was.

        Args:
            living: workers that may push again. A worker's last push must be visible to whoever
                leaves it out.
        """
        pushers = self._pushers(living)
        if not pushers:
            return False
        self._begin()
        clock = self.clocks[pushers[0]]
        if self._rules.mode != "sync":
            self._apply(pushers[0], clock)
        elif self._rules.average_weights:
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
        self._publish(pushers, living)
        self.save_to_replica()
        self._publish_consumed(pushers)
        return True

    def save_to_replica(self) -> None:
        if self.replica is not None:
            self.replica.save(
                self._flat, self.version, self.clocks, self.optimizer, self.num_updates
            )

    def _pushers(self, living: Set[int]) -> list[int]:
        """The workers whose pushes make the next update; none if not all have come."""
        if self._rules.mode == "sync":
            clock = max(self.clocks.values())
            pushers = [w for w, mailbox in self._mailboxes.items() if mailbox.num_pushed > clock]
            return pushers if living <= set(pushers) else []
        by_clock = sorted(self.clocks, key=lambda worker: self.clocks[worker])
        ready = (w for w in by_clock if self._mailboxes[w].num_pushed > self.clocks[w])
        return list(itertools.islice(ready, 1))

    def _average(self, pushers: Sequence[int], clock: int, total: torch.Tensor) -> None:
        """The mean of pushes: added in ascending rank, left to right, then divided.

        These are the bits of all_reduce(op="avg").
        """
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
        if self._rules.average_weights:
            # Each worker's newest weights, on average, make up the whole.
            self._flat.lerp_(values, 1 / len(self._mailboxes))
            return
        if values is not self._gradient:
            self._gradient.copy_(values)
        if self._rules.delay_compensation != 0:
            self._compensate(mailbox.base(clock, self._server))
        self._step()

    def _compensate(self, base: torch.Tensor) -> None:
        """Adds the first-order change of the gradient since the worker's pull, with the diagonal
        of g g^T for the Hessian (DC-ASGD, Zheng et al. 2017): g + lambda g * g * (w - w_pulled)."""
        moved = torch.sub(self._flat, base, out=self._scratch).mul_(self._gradient)
        self._gradient.addcmul_(self._gradient, moved, value=self._rules.delay_compensation)

    def _step(self) -> None:
        if self.optimizer is None:
            return
        if self._rules.lr_lambda is not None:
            factor = self._rules.lr_lambda(self.num_updates)
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

    def _begin(self) -> None:
        """Announces that the older version will be overwritten."""
        self._memory.exposed.publish(BEGUN, self.version + 1)
        # No later store may overtake the one above: it is ordered before this load, which is
        # ordered before what follows (csrc/base/flag.h).
        self._memory.exposed.load(BEGUN)

    def _publish(self, pushers: Iterable[int], living: Iterable[int]) -> None:
        """Publishes the version, which has the pushes of these workers."""
        self._memory.versions[self.version % NUM_VERSIONS].copy_(self._flat)
        self._memory.exposed.publish(DONE, self.version)
        # First, so that workers that have all flushed are nobody's slowest any more.
        self.publish_slowest(living)
        for worker in pushers:
            self._memory.exposed.publish(applied_word(worker), self.clocks[worker])

    def _publish_consumed(self, pushers: Iterable[int]) -> None:
        for worker in pushers:
            self._memory.exposed.publish(consumed_word(worker), self.clocks[worker])

    def publish_slowest(self, living: Iterable[int]) -> None:
        """Publishes how many pushes of each living worker are applied at least."""
        slowest = min((self.clocks[worker] for worker in living), default=None)
        if slowest is not None:
            self._memory.exposed.publish(SLOWEST, slowest)

    # ---- saving

    def answer(self, worker: int) -> None:
        """Makes a save if a worker asks for one and all its pushes are applied, and frees it once
        the worker has read it."""
        mailbox = self._mailboxes[worker]
        question = mailbox.num_asked
        last, _ = self._saves.get(worker, (0, None))
        if question % 2 == 0:
            self.forget(worker)
        elif question != last and self.clocks[worker] == mailbox.num_pushed:
            save = None
            try:
                save = _C.ExposedTensor(self._save().packed(), 1, others_may_write=False)
                note = {"address": save.address}
            except Exception as error:  # that of the worker, not of the server
                text = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()
                note = {"error": text[: _NOTE_BYTES // 8]}  # JSON takes up to 6 bytes for each
            self._saves[worker] = question, save
            written = json.dumps(note).encode().ljust(_NOTE_BYTES, b"\0")
            self._memory.notes[worker].copy_(
                torch.frombuffer(bytearray(written), dtype=torch.uint8)
            )
            self._memory.exposed.publish(saved_word(worker), question)

    def forget(self, worker: int) -> None:
        """Frees the save that a worker may have asked for."""
        self._saves.pop(worker, None)

    def _save(self) -> Save:
        numbers = self._section.parameters
        values = dict(zip(numbers, self._views, strict=True))
        if self._rules.average_weights:
            return Save(self.num_updates, values, None, None)
        if self.optimizer is None:  # there are no parameters
            return Save(self.num_updates, values, {}, {})
        groups = numbers_by_group(self.optimizer, self.parameters, numbers)
        return Save(self.num_updates, values, *by_number(self.optimizer.state_dict(), groups))


class Place(NamedTuple):
    """Memory in which versions of a shard appear."""

    rank: int  # of its server
    opened: _C.OpenedTensor


class PublishedShard:
    """A shard as a worker sees it, in place.

    Args:
        server: its number.
        layout: of pushes.
        places: where it is published: by its server, and by whoever goes on with it.
    """

    def __init__(self, server: int, layout: PushLayout, places: Sequence[Place]) -> None:
        self.server = server
        self.pulled_version = 0
        self._section = layout.sections[server]
        self._shapes = layout.shapes
        self._places = list(places)
        self._use(self._places.pop(0))

    def _use(self, place: Place) -> None:
        self.rank, self.opened = place
        section = self._section
        flat = self.opened.bytes.view(torch.float32)
        self._notes = self.opened.bytes[4 * NUM_VERSIONS * section.num_elems :]
        self._versions = [
            section.views(flat[i * section.num_elems : (i + 1) * section.num_elems], self._shapes)
            for i in range(NUM_VERSIONS)
        ]

    def switch(self) -> bool:
        """Goes on with the next place, where the shard will appear; False if there is none."""
        if not self._places:
            return False
        self._use(self._places.pop(0))
        return True

    def read_save(self, worker: int, timeout: timedelta) -> Save:
        """The save that a worker has asked for, once it is there.

        Raises:
            rota.PeerFailed: the server has died.
            rota.TransportError: the server could not make it.
        """
        note = self._notes[worker * _NOTE_BYTES : (worker + 1) * _NOTE_BYTES].numpy().tobytes()
        found = json.loads(note.rstrip(b"\0"))
        if "error" in found:
            raise TransportError(
                f"rota.ParameterServer.state_dict: server rank {self.rank} cannot save its "
                f"parameters: {found['error']}"
            )
        opened = _C.OpenedTensor(found["address"], f"rank {self.rank}", timeout)
        return Save.unpacked(opened.bytes)

    def copy_to(self, parameters: Sequence[torch.Tensor], order_loads: Callable[[], None]) -> None:
        """Copies the newest version to its parameters, which are given by number. Never waits.

        order_loads: whatever is loaded before it is loaded before all that follows.
        """
        targets = [parameters[number] for number in self._section.parameters]
        while True:
            version = self.opened.load(DONE)
            if targets:
                torch._foreach_copy_(targets, self._versions[version % NUM_VERSIONS])
            order_loads()
            if self.opened.load(BEGUN) < version + NUM_VERSIONS:
                break
        self.pulled_version = version
