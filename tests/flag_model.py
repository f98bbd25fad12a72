"""A model of ranks that share slots and flags, and two ways to look for an unsafe reuse of a slot.

A rank is a straight line of operations on words: it publishes flags of its own, waits for others',
and writes and reads places in anybody's region. executor_model.py has those of csrc/cpu/.

  explore()      walks every interleaving that the flags allow; small worlds only.
  check_order()  proves that the flags order each read behind the write of what it expects and
                 before the next write to the same place; for any world, because flags only grow
                 and lines do not branch: what a wait guarantees is the same in each interleaving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from itertools import pairwise
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A piece of memory: part of a slot, a mailbox or a post of one rank's region."""

    region: int
    kind: str
    number: int
    part: int | None = None  # a rank's shard, or half of a slot; None: all parts


class Flag(NamedTuple):
    """A word of one rank's region, which only that rank publishes."""

    region: int
    name: str


class Op(NamedTuple):
    """One operation. Reads expect a content; waits expect a flag to have reached a value."""

    verb: str  # write, read; publish, wait
    word: Place | Flag
    value: Any  # content, or the number of a flag
    phase: str = ""


class Program:
    """All ranks' lines, with each wait resolved to the operation that it waits for."""

    def __init__(self, lines: list[list[Op]]) -> None:
        self.lines = lines
        self.world_size = len(lines)
        published: dict[Flag, tuple[list[int], list[int]]] = {}  # values and positions
        for line in lines:
            for position, op in enumerate(line):
                if op.verb == "publish" and isinstance(op.word, Flag):
                    values, positions = published.setdefault(op.word, ([], []))
                    assert not values or values[-1] < op.value, "a flag only grows"
                    values.append(op.value)
                    positions.append(position)
        # For each operation the peer's operation that must be done before; (-1, -1): none.
        self.awaited: list[list[tuple[int, int]]] = []
        for line in lines:
            self.awaited.append([])
            for op in line:
                peer = position = -1
                if op.verb == "wait" and isinstance(op.word, Flag):
                    values, positions = published.get(op.word, ([], []))
                    index = bisect_left(values, op.value)
                    never = len(lines[op.word.region])
                    peer = op.word.region
                    position = positions[index] if index < len(values) else never
                self.awaited[-1].append((peer, position))

    def parts(self, place: Place) -> list[Place]:
        """The places without overlap that a place stands for; halves count as two of the parts."""
        if place.part is not None:
            return [place]
        return [place._replace(part=part) for part in range(max(self.world_size, 2))]


def explore(lines: list[list[Op]]) -> str | None:
    """Walks all interleavings; returns the first violation found, or None."""
    program = Program(lines)
    numbers: dict[Place, int] = {}
    touched: list[list[list[int]]] = []  # for each operation the numbers of its places
    for line in lines:
        touched.append([])
        for op in line:
            places = program.parts(op.word) if isinstance(op.word, Place) else []
            touched[-1].append([numbers.setdefault(place, len(numbers)) for place in places])
    start: tuple[tuple[int, ...], tuple[Hashable, ...]] = (
        (0,) * len(lines),
        (None,) * len(numbers),
    )
    seen = {start}
    stack = [start]
    while stack:
        positions, contents = stack.pop()
        is_stuck = True
        for rank, position in enumerate(positions):
            if position == len(lines[rank]):
                continue
            op = lines[rank][position]
            peer, awaited = program.awaited[rank][position]
            if peer >= 0 and positions[peer] <= awaited:
                continue
            following = contents
            if op.verb == "read":
                for number in touched[rank][position]:
                    if contents[number] != op.value:
                        return f"rank {rank} at {positions} reads {contents[number]}: {op}"
            elif op.verb == "write":
                written = list(contents)
                for number in touched[rank][position]:
                    written[number] = op.value
                following = tuple(written)
            is_stuck = False
            state = ((*positions[:rank], position + 1, *positions[rank + 1 :]), following)
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if is_stuck and any(p < len(line) for p, line in zip(positions, lines, strict=True)):
            return f"nobody can go on at {positions}"
    return None


class Access(NamedTuple):
    """A write or read of one place."""

    rank: int
    position: int
    content: Hashable


def check_order(lines: list[list[Op]]) -> str | None:
    """Vector clocks along publish and wait; returns an access that they leave open, or None."""
    program = Program(lines)
    clocks = _clocks(program)
    for rank, line in enumerate(lines):
        if len(clocks[rank]) < len(line):
            return f"rank {rank} waits for ever: {line[len(clocks[rank])]}"

    def is_before(a: Access, b: Access) -> bool:
        return clocks[b.rank][b.position][a.rank] > a.position if a != b else False

    writes: dict[Place, list[Access]] = {}
    reads: dict[Place, list[Access]] = {}
    for rank, line in enumerate(lines):
        for position, op in enumerate(line):
            if isinstance(op.word, Place):
                for place in program.parts(op.word):
                    accesses = writes if op.verb == "write" else reads
                    accesses.setdefault(place, []).append(Access(rank, position, op.value))
    for place, in_place in writes.items():
        # What is ordered at all is ordered as the sums of clocks are.
        in_place.sort(key=lambda access: sum(clocks[access.rank][access.position]))
        for write, following in pairwise(in_place):
            if not is_before(write, following):
                return f"{place}: {write} and {following} are not ordered"
    for place, in_place in reads.items():
        for read in in_place:
            before = [write for write in writes.get(place, []) if is_before(write, read)]
            if not before or before[-1].content != read.content:
                return f"{place}: {read} may find {before[-1:]}"
            for write in writes[place][len(before) : len(before) + 1]:
                if not is_before(read, write):
                    return f"{place}: {read} may find {write}"
    return None


def _clocks(program: Program) -> list[list[list[int]]]:
    """[rank][i][peer]: operations of peer that are done whenever rank's operation i is done."""
    clocks: list[list[list[int]]] = [[] for _ in program.lines]
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, line in enumerate(program.lines):
            known = list(clocks[rank][-1]) if clocks[rank] else [0] * program.world_size
            while len(clocks[rank]) < len(line):
                peer, awaited = program.awaited[rank][len(clocks[rank])]
                if peer >= 0:
                    if awaited >= len(clocks[peer]):
                        break
                    known = [max(pair) for pair in zip(known, clocks[peer][awaited], strict=True)]
                known[rank] = len(clocks[rank]) + 1
                clocks[rank].append(list(known))
                has_progress = True
    return clocks
