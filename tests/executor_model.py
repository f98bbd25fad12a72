"""What the executors of csrc/cpu/ do with slots and flags, for flag_model.py.

Each is written in the verbs of cpu/exchange.h, with the elements left out. Waits carry the phase by
which errors name them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import rota._C
from flag_model import Flag, Op, Place

schedule = rota._C.schedule


class Recorder:
    """The verbs of cpu/exchange.h and of the frame in core/communicator.cpp, written down.

    Args:
        num_slots: 2 is what the protocol needs; fewer must be found to be wrong.
        num_parities: of mailboxes and posts; the same.
        without: phases whose waits are left out, to show that each is needed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_slots: int = 2,
        num_parities: int = 2,
        without: Collection[str] = (),
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_slots = num_slots
        self.num_parities = num_parities
        self.without = without
        self.ops: list[Op] = []
        self.epoch = 0
        self.first_round = 0

    def peers(self) -> list[int]:
        return [
            schedule.rotated_peer(self.rank, self.world_size, i) for i in range(self.world_size - 1)
        ]

    def next(self) -> int:
        return schedule.next_rank(self.rank, self.world_size)

    def previous(self) -> int:
        return schedule.previous_rank(self.rank, self.world_size)

    def slot(self, region: int, round_: int, part: int | None = None) -> Place:
        return Place(region, "slot", (self.first_round + round_) % self.num_slots, part)

    def message(self, region: int, part: int | None = None) -> Place:
        return Place(region, "mailbox", self.epoch % self.num_parities, part)

    def write(self, place: Place, content: Hashable) -> None:
        self.ops.append(Op("write", place, content))

    def read(self, place: Place, content: Hashable) -> None:
        self.ops.append(Op("read", place, content))

    def publish(self, flag: str, round_: int) -> None:
        self.ops.append(Op("publish", Flag(self.rank, flag), self.first_round + round_ + 1))

    def wait(self, peer: int, flag: str, round_: int, phase: str) -> None:
        if phase not in self.without:
            self.ops.append(Op("wait", Flag(peer, flag), self.first_round + round_ + 1, phase))

    def tag(self, round_: int, what: str = "") -> Hashable:
        """The content of one round, different from that of every other round."""
        return (self.epoch, self.first_round + round_, what)

    def collective(self, contribute: Part | None, complete: Part) -> None:
        """The frame around an executor: contribute, post, meet, complete."""
        self.epoch += 1
        if contribute is not None:
            contribute(self)
        parity = self.epoch % self.num_parities
        self.write(Place(self.rank, "post", parity), self.epoch)
        self.ops.append(Op("publish", Flag(self.rank, f"post {parity}"), self.epoch))
        for peer in self.peers():
            if "start" not in self.without:
                self.ops.append(Op("wait", Flag(peer, f"post {parity}"), self.epoch, "start"))
            self.read(Place(peer, "post", parity), self.epoch)
        self.first_round += complete(self)


Part = Callable[[Recorder], int]


# ---- the executors: the words of csrc/cpu/all_reduce.cpp and copy_collectives.cpp ----------------


def one_shot(rank: Recorder, num_rounds: int) -> int:
    for round_ in range(num_rounds):
        rank.write(rank.slot(rank.rank, round_), rank.tag(round_))
        rank.publish("filled", round_)
        for peer in rank.peers():
            rank.wait(peer, "filled", round_, "one_shot")
        for peer in range(rank.world_size):
            rank.read(rank.slot(peer, round_), rank.tag(round_))
    return num_rounds


def two_shot(rank: Recorder, num_rounds: int) -> int:
    for step in range(schedule.two_shot_num_steps(num_rounds)):
        work = schedule.two_shot_step(num_rounds, step)
        if work.contribute_round >= 0:
            rank.write(rank.slot(rank.rank, work.contribute_round), rank.tag(work.contribute_round))
            rank.publish("filled", work.contribute_round)
        if work.reduce_round >= 0:
            for peer in rank.peers():
                rank.wait(peer, "filled", work.reduce_round, "two_shot reduce")
            _two_shot_reduce(rank, rank.slot, work.reduce_round)
    return num_rounds


def _two_shot_reduce(rank: Recorder, slot: Callable[..., Place], round_: int) -> None:
    """The own shard from everybody's slot, the sum back to there, and then the others' shards."""
    for peer in range(rank.world_size):
        rank.read(slot(peer, round_, rank.rank), rank.tag(round_))
    for peer in rank.peers():
        rank.write(slot(peer, round_, rank.rank), rank.tag(round_, "sum"))
    rank.publish("drained", round_)
    for owner in rank.peers():
        rank.wait(owner, "drained", round_, "two_shot collect")
        rank.read(slot(rank.rank, round_, owner), rank.tag(round_, "sum"))


# The halves of a slot of the ordered ring.
PARTIAL, RESULT = 0, 1


def ordered_ring(rank: Recorder, num_rounds: int) -> int:
    last = rank.world_size - 1
    num_steps = schedule.ordered_ring_num_steps(rank.world_size, num_rounds)
    for step in range(num_steps):
        work = schedule.ordered_ring_step(rank.rank, rank.world_size, num_rounds, step)
        if step > 0:
            rank.wait(rank.previous(), "filled", step - 1, "ordered_ring receive")
        if step > 1:
            rank.wait(rank.next(), "filled", step - 1, "ordered_ring send")
        if work.partial_chunk >= 0:
            if rank.rank > 0:
                rank.read(rank.slot(rank.previous(), step - 1, PARTIAL), rank.tag(step - 1))
            half = RESULT if rank.rank == last else PARTIAL
            rank.write(rank.slot(rank.rank, step, half), rank.tag(step))
        if work.result_chunk >= 0:
            rank.read(rank.slot(rank.previous(), step - 1, RESULT), rank.tag(step - 1))
            if rank.next() != last:
                rank.write(rank.slot(rank.rank, step, RESULT), rank.tag(step))
        rank.publish("filled", step)
    return num_steps


def ring(rank: Recorder, num_rounds: int) -> int:
    num_steps = schedule.ring_num_steps(rank.world_size)
    slot = 0
    for _ in range(num_rounds):
        if slot > 1:
            rank.wait(rank.next(), "filled", slot - 1, "ring send")
        rank.write(rank.slot(rank.rank, slot), rank.tag(slot))
        rank.publish("filled", slot)
        for step in range(num_steps):
            is_last = step == num_steps - 1
            rank.wait(rank.previous(), "filled", slot, "ring receive")
            if not is_last:
                rank.wait(rank.next(), "filled", slot, "ring send")
            rank.read(rank.slot(rank.previous(), slot), rank.tag(slot))
            if not is_last:
                rank.write(rank.slot(rank.rank, slot + 1), rank.tag(slot + 1))
                rank.publish("filled", slot + 1)
            slot += 1
    return slot


def broadcast(rank: Recorder, num_rounds: int, root: int = 0) -> int:
    for round_ in range(num_rounds):
        if rank.rank == root:
            for peer in rank.peers() if round_ >= 2 else []:
                rank.wait(peer, "drained", round_ - 2, "broadcast send")
            rank.write(rank.slot(root, round_), rank.tag(round_))
            rank.publish("filled", round_)
        else:
            rank.wait(root, "filled", round_, "broadcast receive")
            rank.read(rank.slot(root, round_), rank.tag(round_))
            rank.publish("drained", round_)
    return num_rounds


def all_gather(rank: Recorder, num_rounds: int) -> int:
    for round_ in range(num_rounds):
        rank.write(rank.slot(rank.rank, round_), rank.tag(round_))
        rank.publish("filled", round_)
        for peer in rank.peers():
            rank.wait(peer, "filled", round_, "all_gather receive")
            rank.read(rank.slot(peer, round_), rank.tag(round_))
    return num_rounds


def contribute_message(rank: Recorder) -> int:
    """Before the post of every collective in one message."""
    rank.write(rank.message(rank.rank), rank.tag(0))
    return 0


def complete_message(rank: Recorder) -> int:
    """one_shot, broadcast and all_gather behind the posts: everybody's message is there."""
    for peer in rank.peers():
        rank.read(rank.message(peer), rank.tag(0))
    return 0


def complete_two_shot_message(rank: Recorder) -> int:
    _two_shot_reduce(rank, lambda peer, _, part: rank.message(peer, part), 0)
    return 1
