"""Random programs of sends and receives, between which collectives run.

A plan is one order of the operations of all ranks, of which each rank takes its own. An operation
that blocks comes after everything that it needs, or meets its peer in the same place of the order.
So by induction over the order no program can deadlock, even if no message were buffered.

A stream is what MPI matches in order: the messages with one tag from one rank (or any) to another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rota
from oracle import assert_same, exact, exact_inputs
from random_programs import Channel, Channels, run_program, seeds
from ranks import Rank

NUM_MESSAGES = 1500
NUM_MESSAGES_OVER_HOSTS = 300
MAX_OPEN = 30  # halves of messages that wait for their other half, or to be waited for
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool),
    torch.complex64,
)
# Around a link's cell of 128 KiB (csrc/transport/layout.h), several cells, and many.
LENGTHS = (0, 1, 8, 100, 4096, 128 << 10, 512 << 10, (1 << 20) + 24)
LENGTH_WEIGHTS = (3, 3, 6, 8, 6, 3, 2, 1)
LAYOUTS = ("whole", "slice", "steps", "transposed")
GUARD = 0xA5  # bytes around what is received


class Message(NamedTuple):
    number: int  # from which its contents follow
    source: int
    dtype: torch.dtype
    num_elems: int
    layouts: tuple[str, str]  # at the sender, at the receiver
    asked: tuple[torch.dtype, int]  # what the receiver asks for, mostly the same

    @property
    def is_mismatch(self) -> bool:
        return self.asked != (self.dtype, self.num_elems)


@dataclass
class Stream:
    """Messages in the order in which their halves are posted; of any source, in some such order."""

    channel: int
    source: int | None
    target: int
    tag: int
    messages: list[Message] = field(default_factory=list)
    num_posted: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    @property
    def is_posted(self) -> bool:
        return min(self.num_posted.values()) == len(self.messages)


class Half(NamedTuple):
    """The send or the recv of a message."""

    stream: int
    index: int
    is_send: bool


class Op(NamedTuple):
    """One operation of one rank."""

    kind: str  # start, block, wait or poll, of halves; reduce, start_reduce, wait_reduce
    halves: tuple[Half, ...] = ()  # several that start together have one work
    channel: int = 0  # of a reduction, as is the rest
    number: int = 0
    num_elems: int = 0


# ---- the plan


class Planner:
    """Makes the programs of all ranks, in one order of all their operations."""

    def __init__(self, rng: random.Random, world_size: int) -> None:
        self.rng = rng
        self.world_size = world_size
        everybody = tuple(range(world_size))
        self.channels = [Channel(everybody, False), Channel(everybody, True)]
        if world_size > 2:
            some = tuple(sorted(rng.sample(everybody, world_size - 1)))
            self.channels.append(Channel(some, rng.random() < 0.5))
        self.streams = [self.random_stream() for _ in range(6 * world_size)]
        self.programs: list[list[Op]] = [[] for _ in everybody]
        self.num_messages = 0
        self.num_reductions = 0
        self.started: list[tuple[Half, ...]] = []  # and not waited for
        self.reducing: list[tuple[int, Op]] = []  # rank, what it has to wait for

    def random_stream(self) -> Stream:
        rng = self.rng
        channel = rng.randrange(len(self.channels))
        source, target = rng.sample(self.channels[channel].ranks, 2)
        if rng.random() < 0.2:
            return Stream(channel, None, target, tag=1000 + rng.randrange(3))
        return Stream(channel, source, target, tag=rng.randrange(4))

    def plan(self, num_messages: int) -> None:
        """Adds operations until all messages are through."""
        unique = {(s.channel, s.source, s.target, s.tag): s for s in self.streams}
        self.streams = list(unique.values())
        actions = {
            self.add_message: 6,
            self.post: 10,
            self.post_together: 1,
            self.rendezvous: 2,
            self.swap: 1,
            self.wait: 8,
            self.poll: 2,
            self.reduce: 1,
            self.wait_reduction: 1,
        }
        while self.num_messages < num_messages:
            self.rng.choices(list(actions), list(actions.values()))[0]()
        while self.half_posted() or self.started or self.reducing:
            self.rng.choice((self.post, self.wait, self.poll, self.wait_reduction))()

    def half_posted(self) -> list[int]:
        """The streams with messages of which something is not posted."""
        return [number for number, stream in enumerate(self.streams) if not stream.is_posted]

    def rank_of(self, half: Half) -> int:
        stream = self.streams[half.stream]
        return stream.messages[half.index].source if half.is_send else stream.target

    def can_complete(self, *halves: Half) -> bool:
        """Whether the other ranks have posted what these halves need."""
        return all(
            self.streams[half.stream].num_posted[not half.is_send] > half.index for half in halves
        )

    def add_message(self) -> None:
        if len(self.half_posted()) + len(self.started) > MAX_OPEN:
            return
        self.append_message(self.rng.choice(self.streams))

    def append_message(self, stream: Stream) -> None:
        rng = self.rng
        layouts = (rng.choice(LAYOUTS), rng.choice(LAYOUTS))
        if stream.source is None:  # whichever comes first must fit
            peers = [rank for rank in self.channels[stream.channel].ranks if rank != stream.target]
            dtype, num_elems, source = torch.int32, 25, rng.choice(peers)
        else:
            dtype, source = rng.choice(DTYPES), stream.source
            num_bytes = rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
            num_elems = max(0, num_bytes // dtype.itemsize + rng.randint(-1, 1))
        asked = (dtype, num_elems)
        if stream.source is not None and rng.random() < 0.03:
            asked = rng.choice([(dtype, num_elems + 1), (rng.choice(DTYPES), num_elems)])
        stream.messages.append(Message(self.num_messages, source, dtype, num_elems, layouts, asked))
        self.num_messages += 1

    def next_half(self, number: int, is_send: bool) -> Half | None:
        """The next half of a stream that can be posted, which then counts as posted."""
        stream = self.streams[number]
        index = stream.num_posted[is_send]
        if index == len(stream.messages):
            return None
        stream.num_posted[is_send] += 1
        return Half(number, index, is_send)

    def post(self) -> None:
        """Starts a half, or runs it if it cannot block forever."""
        numbers = self.half_posted()
        if not numbers:
            return
        half = self.next_half(self.rng.choice(numbers), self.rng.random() < 0.5)
        if half is None:
            return
        blocks = self.can_complete(half) and self.rng.random() < 0.5
        self.programs[self.rank_of(half)].append(Op("block" if blocks else "start", (half,)))
        if not blocks:
            self.started.append((half,))

    def post_together(self) -> None:
        """Starts some halves of one rank and channel by one call."""
        rank, channel = self.rng.randrange(self.world_size), self.rng.randrange(len(self.channels))
        if self.channels[channel].is_communicator:
            return
        halves = []
        for number in self.half_posted():
            stream = self.streams[number]
            is_send = rank == stream.source
            if stream.channel != channel or not (is_send or rank == stream.target):
                continue
            following = stream.messages[stream.num_posted[is_send] :]
            if stream.source is None or not following or following[0].is_mismatch:
                continue
            half = self.next_half(number, is_send)
            assert half is not None
            halves.append(half)
        if halves:
            self.rng.shuffle(halves)
            self.programs[rank].append(Op("start", tuple(halves)))
            self.started.append(tuple(halves))

    def rendezvous(self) -> None:
        """A new message, whose sender and receiver both block."""
        stream = self.rng.choice(self.streams)
        if not stream.is_posted:
            return
        self.append_message(stream)
        for is_send in (True, False):
            self.block(self.streams.index(stream), is_send)

    def block(self, number: int, is_send: bool) -> None:
        half = self.next_half(number, is_send)
        assert half is not None
        self.programs[self.rank_of(half)].append(Op("block", (half,)))

    def swap(self) -> None:
        """Two ranks send to each other, and both receive only then."""
        numbers = {
            (stream.channel, stream.source, stream.target): number
            for number, stream in enumerate(self.streams)
            if stream.is_posted
        }
        pairs = [
            (number, numbers[channel, target, source])
            for (channel, source, target), number in numbers.items()
            if source is not None and (channel, target, source) in numbers
        ]
        if not pairs:
            return
        pair = self.rng.choice(pairs)
        for number in pair:
            self.append_message(self.streams[number])
        for is_send in (True, False):
            for number in pair:
                self.block(number, is_send)

    def wait(self) -> None:
        ready = [halves for halves in self.started if self.can_complete(*halves)]
        if ready:
            halves = self.rng.choice(ready)
            self.started.remove(halves)
            self.programs[self.rank_of(halves[0])].append(Op("wait", halves))

    def poll(self) -> None:
        if self.started:
            halves = self.rng.choice(self.started)
            self.programs[self.rank_of(halves[0])].append(Op("poll", halves))

    def reduce(self) -> None:
        """A sum on all ranks of a channel."""
        channel = self.rng.randrange(len(self.channels))
        starts = not self.channels[channel].is_communicator and self.rng.random() < 0.5
        number, num_elems = self.num_reductions, self.rng.choice((1, 1000, 100_000))
        self.num_reductions += 1
        kind = "start_reduce" if starts else "reduce"
        for rank in self.channels[channel].ranks:
            self.programs[rank].append(Op(kind, (), channel, number, num_elems))
            if starts:
                self.reducing.append((rank, Op("wait_reduce", (), channel, number, num_elems)))

    def wait_reduction(self) -> None:
        if self.reducing:
            rank, op = self.reducing.pop(self.rng.randrange(len(self.reducing)))
            self.programs[rank].append(op)


# ---- the tensors


class Contents:
    """What messages hold: slices of random bytes that all ranks make."""

    def __init__(self, seed: int) -> None:
        self._bytes = torch.from_numpy(
            np.random.default_rng(seed).integers(0, 256, 4 << 20, np.uint8)
        )

    def of(self, message: Message) -> torch.Tensor:
        first = message.number * 4096 % (2 << 20)
        values = self._bytes[first : first + message.num_elems * message.dtype.itemsize].clone()
        return (values & 1 if message.dtype == torch.bool else values).view(message.dtype)


class Memory(NamedTuple):
    """A tensor, and the memory that it is a view of."""

    whole: torch.Tensor  # bytes
    view: torch.Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, num_elems: int, layout: str) -> Memory:
        guard = 1 if dtype == torch.bool else GUARD
        num_bytes = (2 * num_elems + 16) * dtype.itemsize
        whole = torch.full((num_bytes,), guard, dtype=torch.uint8)
        elems = whole.view(dtype)
        match layout:
            case "whole":
                return cls(whole, elems[:num_elems])
            case "slice":
                return cls(whole, elems[3 : 3 + num_elems])
            case "steps":
                return cls(whole, elems[: 2 * num_elems : 2])
            case "transposed":
                rows = 2 if num_elems % 2 == 0 else 1
                return cls(whole, elems[:num_elems].view(rows, num_elems // rows).t())
        raise ValueError(layout)

    def fill(self, values: torch.Tensor) -> Memory:
        self.view.copy_(values.view(self.view.shape))
        return self


# ---- the executor


class Execution:
    """One rank's program: runs it, and compares what it receives with the plan."""

    def __init__(self, rank: Rank, seed: int, plan: Planner, num_hosts: int) -> None:
        self.rank = rank.rank
        self.plan = plan
        self.contents = Contents(seed)
        self.open = Channels(rank, plan.channels, num_hosts)
        self.memories: dict[Half, Memory] = {}
        self.works: dict[tuple[Half, ...], dist.Work] = {}
        self.reductions: dict[tuple[int, int], tuple[dist.Work | None, torch.Tensor]] = {}
        # Who sent it, in streams of any source.
        self.sources: dict[Half, int] = {}

    def run(self) -> None:
        for op in self.plan.programs[self.rank]:
            match op.kind:
                case "start" if len(op.halves) > 1:
                    self.works[op.halves] = self.start_together(op.halves)
                case "start":
                    self.works[op.halves] = self.call(op.halves[0], is_async=True)
                case "block":
                    self.block(op.halves[0])
                case "wait":
                    self.wait(op.halves)
                case "poll":
                    self.works[op.halves].is_completed()
                case "reduce" | "start_reduce":
                    self.reduce(op)
                case "wait_reduce":
                    self.check_reduction(op)
        self.check_any_sources()

    # ---- messages

    def prepare(self, half: Half) -> tuple[Message, Stream, torch.Tensor]:
        stream = self.plan.streams[half.stream]
        message = stream.messages[half.index]
        if half.is_send:
            memory = Memory.make(message.dtype, message.num_elems, message.layouts[0])
            memory.fill(self.contents.of(message))
        else:
            memory = Memory.make(*message.asked, message.layouts[1])
        self.memories[half] = memory
        return message, stream, memory.view

    def peer_of(self, half: Half) -> int | None:
        """The other rank; on a communicator, its number there."""
        stream = self.plan.streams[half.stream]
        peer = stream.target if half.is_send else stream.source
        if peer is None or not self.plan.channels[stream.channel].is_communicator:
            return peer
        return self.plan.channels[stream.channel].ranks.index(peer)

    def call(self, half: Half, *, is_async: bool) -> Any:
        """What the call returns: a Work, or the rank that sent; on a communicator, its number."""
        _, stream, tensor = self.prepare(half)
        name = ("i" if is_async else "") + ("send" if half.is_send else "recv")
        peer, comm = self.peer_of(half), self.open.communicators.get(stream.channel)
        if comm is not None:
            return getattr(comm, name)(tensor, peer, stream.tag)
        return getattr(dist, name)(tensor, peer, self.open.groups[stream.channel], stream.tag)

    def start_together(self, halves: tuple[Half, ...]) -> dist.Work:
        ops = []
        for half in halves:
            _, stream, tensor = self.prepare(half)
            function = dist.isend if half.is_send else dist.irecv
            group = self.open.groups[stream.channel]
            ops.append(dist.P2POp(function, tensor, self.peer_of(half), group, stream.tag))
        (work,) = dist.batch_isend_irecv(ops)
        return work

    def block(self, half: Half) -> None:
        stream = self.plan.streams[half.stream]
        source = error = None
        try:
            source = self.call(half, is_async=False)
        except rota.Mismatch as mismatch:
            error = mismatch
        if source is not None and stream.channel in self.open.communicators:
            source = self.plan.channels[stream.channel].ranks[source]
        self.finish(half, stream.messages[half.index], error, source)

    def wait(self, halves: tuple[Half, ...]) -> None:
        work = self.works.pop(halves)
        error = None
        try:
            work.wait()
            assert work.is_completed()
        except rota.Mismatch as mismatch:
            error = mismatch
        for half in halves:
            stream = self.plan.streams[half.stream]
            source = stream.source
            if source is None and not half.is_send:
                source = self.plan.channels[stream.channel].ranks[work._source_rank()]
            self.finish(half, stream.messages[half.index], error, source)

    def finish(
        self, half: Half, message: Message, error: rota.Mismatch | None, source: int | None
    ) -> None:
        if half.is_send:
            assert error is None, f"{message}: {error}"
            self.memories.pop(half).whole.fill_(0)  # the caller may change it
            return
        if message.is_mismatch:
            assert error is not None, f"{message}: no error"
            assert "called send(" in str(error) and "called recv(" in str(error)
            self.check(half, message, is_written=False)
            return
        assert error is None, f"{message}: {error}"
        assert source is not None
        if self.plan.streams[half.stream].source is None:
            self.sources[half] = source  # once all have come, it is known which one this was
        else:
            assert source == message.source, message
            self.check(half, message, is_written=True)

    def check(self, half: Half, message: Message, is_written: bool) -> None:
        got = self.memories.pop(half).whole
        dtype, num_elems = message.asked
        layout = self.plan.streams[half.stream].messages[half.index].layouts[1]
        expected = Memory.make(dtype, num_elems, layout)
        if is_written:
            expected.fill(self.contents.of(message))
        assert_same(got, expected.whole, str(message))

    def check_any_sources(self) -> None:
        """Each source's messages must have come in their order, whoever else sent meanwhile."""
        messages: dict[tuple[int, int], Iterator[Message]] = {}
        for half in sorted(self.sources):
            key = half.stream, self.sources[half]
            if key not in messages:
                messages[key] = iter(
                    [
                        message
                        for message in self.plan.streams[half.stream].messages
                        if message.source == self.sources[half]
                    ]
                )
            self.check(half, next(messages[key]), is_written=True)

    # ---- reductions

    def inputs_of(self, op: Op) -> list[torch.Tensor]:
        world_size = len(self.plan.channels[op.channel].ranks)
        return [
            tensor.roll(op.number)
            for tensor in exact_inputs(world_size, op.num_elems, torch.float32)
        ]

    def reduce(self, op: Op) -> None:
        place = self.plan.channels[op.channel].ranks.index(self.rank)
        tensor = self.inputs_of(op)[place]
        comm = self.open.communicators.get(op.channel)
        work = None
        if comm is not None:
            comm.all_reduce(tensor)
        else:
            is_async = op.kind == "start_reduce"
            work = dist.all_reduce(tensor, group=self.open.groups[op.channel], async_op=is_async)
        self.reductions[op.channel, op.number] = work, tensor
        if op.kind == "reduce":
            self.check_reduction(op)

    def check_reduction(self, op: Op) -> None:
        work, tensor = self.reductions.pop((op.channel, op.number))
        if work is not None:
            work.wait()
        assert_same(tensor, exact(self.inputs_of(op), "sum"), str(op))


def run_plan(rank: Rank, seed: int, num_messages: int, num_hosts: int) -> None:
    plan = Planner(random.Random(seed), rank.world_size)
    plan.plan(num_messages)
    execution = Execution(rank, seed, plan, num_hosts)
    execution.run()
    dist.barrier()  # a process that ends before the others finish counts as dead


@pytest.mark.parametrize("seed", seeds(usual=3))
def test_random_messages_arrive_in_order_and_complete(seed: int) -> None:
    run_program(seed, 2 + seed % 3, run_plan, NUM_MESSAGES, 1)


@pytest.mark.parametrize("seed", seeds(usual=2))
def test_random_messages_over_hosts_arrive_in_order(seed: int) -> None:
    run_program(seed, 2 + seed % 3, run_plan, NUM_MESSAGES_OVER_HOSTS, 2)
