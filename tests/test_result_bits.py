"""The bits of sums, held against a record: whatever changes them shows here, by name.

tests/result_bits.txt has a line for each dtype, op and wire, and a column for each order and number
of ranks; "3+2" are ranks of two hosts. An entry begins the SHA-256 of a result. Calls that promise
the same bits are held against one entry: algorithms, reduce, reduce_scatter (docs/numerics.md). NaN
payloads are left out; all other bits are the same on every processor.

    ROTA_RESULT_BITS=all python -m pytest tests/test_result_bits.py     # every number of ranks
    ROTA_RESULT_BITS=record python -m pytest tests/test_result_bits.py  # writes the record
"""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import rota
from bucket_oracle import BLOCKS, BUCKET_DTYPES, FORMATS, Format
from oracle import DTYPES, FLOAT8_DTYPES, FLOAT_DTYPES, bits_of, name_of, ops_of, round_to
from ranks import Rank, isas_of_this_cpu
from several_hosts import MANY_CHUNKS, Layout, wires_of

pytestmark = pytest.mark.same_in_every_build

MODE = os.environ.get("ROTA_RESULT_BITS", "few")
RECORD = Path(__file__).with_name("result_bits.txt")
DIGITS = 6

SLOT_BYTES = 4096
SHORT_ELEMS = 130
LONG_BYTES = 72 << 10  # more than a mailbox takes, so that it goes through slots
BLOCK_ELEMS = 64  # of the longest block that has a scale
GROUP_SIZE = 2


class Sum(NamedTuple):
    """A line of the record."""

    dtype: torch.dtype
    op: str  # "bucket": reduce_bucket
    wire: Format | None = None

    def __str__(self) -> str:
        return "-".join([name_of(self.dtype), self.op, *([str(self.wire)] if self.wire else [])])


SUMS = [
    *(Sum(dtype, op) for dtype in (*DTYPES, *FLOAT8_DTYPES) for op in ops_of(dtype)),
    *(
        Sum(dtype, op, wire)
        for dtype in FLOAT_DTYPES
        for wire in wires_of(dtype)
        if wire.dtype != dtype
        for op in ("sum", "avg", "max")
    ),
    *(Sum(torch.float32, op, Format(wire, True)) for wire in BLOCKS for op in ("sum", "avg")),
    *(Sum(dtype, "bucket", wire) for dtype in BUCKET_DTYPES for wire in FORMATS),
]
# Hosts exchange these in several chunks, too.
LONGER = [Sum(torch.float32, "sum")]
LONGER += [Sum(torch.float32, op, Format(torch.float16, True)) for op in ("sum", "bucket")]


class Order(NamedTuple):
    name: str
    algorithms: tuple[str, ...]  # on one host; several have only "auto"
    options: dict[str, Any]


RANK = Order("rank", ("one_shot", "two_shot", "ordered_ring"), {})
RING = Order("ring", ("ring",), {})
TREE = Order("tree", ("one_shot", "two_shot"), {"order": "tree"})
GROUPS = Order("groups", ("one_shot", "two_shot", "two_level"), {"group_size": GROUP_SIZE})


class Place(NamedTuple):
    """How many ranks each host has."""

    hosts: tuple[int, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.hosts))

    @property
    def layout(self) -> Layout:
        return Layout(tuple(host for host, size in enumerate(self.hosts) for _ in range(size)))

    @property
    def orders(self) -> list[Order]:
        if len(self.hosts) > 1:
            orders = [RANK, TREE] if self.hosts in ((1, 1), (2, 2), (4, 4)) else [RANK]
            return [order._replace(algorithms=("auto",)) for order in orders]
        return [RANK, RING, TREE, *([GROUPS] if self.hosts[0] in (4, 6, 8) else [])]

    def lengths(self, what: Sum) -> list[int]:
        """Each rank's part has whole blocks, so that reduce_scatter scales them as all_reduce."""
        wanted = [SHORT_ELEMS, LONG_BYTES // what.dtype.itemsize]
        wanted += [MANY_CHUNKS] if len(self.hosts) > 1 and what in LONGER else []
        multiple = BLOCK_ELEMS * sum(self.hosts)
        return [-(-length // multiple) * multiple for length in wanted]


FEW = [Place((3,)), Place((8,)), Place((2, 1)), Place((2, 2))]
ALL = [Place((size,)) for size in range(1, 9)]
ALL += [Place((size - size // 2, size // 2)) for size in range(2, 9)]


@functools.cache
def input_of(rank: int, dtype: torch.dtype, num_elems: int) -> torch.Tensor:
    """Similar magnitudes, so that the order of sums matters; one in eight is any bit pattern.

    Made of a hash: neither numpy nor torch promises the same random numbers in every version.
    """
    noise = hashlib.shake_256(f"{rank} {dtype} {num_elems}".encode()).digest(8 * num_elems)
    numbers = np.frombuffer(noise, dtype="<i8")
    any_bits = torch.from_numpy(numbers.astype(f"<i{dtype.itemsize}"))
    if dtype == torch.bool:
        return any_bits % 2 == 1
    any_bits = any_bits.view(dtype)
    if not dtype.is_floating_point:
        return any_bits
    mantissas = (numbers >> 11).astype(np.float64)  # below 2**52, so exact
    values = round_to(np.ldexp(mantissas, numbers % 13 - 58), dtype)
    is_any = torch.from_numpy(numbers >> 8 & 7 == 0)
    return torch.where(is_any, any_bits, torch.from_numpy(values).to(dtype))


# By what they round to between hosts where a call names no wire.
Communicators = Mapping[Format | None, rota.Communicator]


def communicators(rank: Rank, place: Place) -> Communicators:
    if GROUPS in place.orders:
        os.environ["ROTA_NUMA_NODE"] = str(rank.rank // GROUP_SIZE)  # two_level needs nodes
    made: dict[Format | None, rota.Communicator] = {None: rank.communicator(slot_bytes=SLOT_BYTES)}
    for wire in FORMATS if len(place.hosts) > 1 else ():
        made[wire] = rota.Communicator(
            slot_bytes=SLOT_BYTES,
            inter_wire_dtype=wire.dtype,
            inter_block_scaling=wire.block_scaling,
        )
    return made


def results(
    by_wire: Communicators, what: Sum, order: Order, own: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each call that promises the same bits, and its result where this rank has one. Collective."""
    op, wire, communicator = what.op, what.wire, by_wire[None]
    is_scaled = wire is not None and wire.block_scaling
    tensor = own if is_scaled else own[:-1]  # of an odd length
    for algorithm in order.algorithms:
        result = tensor.clone()
        if wire is not None and op == "bucket":
            communicator.reduce_bucket(
                result,
                torch.zeros(2, dtype=torch.float64),
                wire_dtype=wire.dtype,
                block_scaling=is_scaled,
                contribution_factor=0.75,
                divisor=3.0,
                algorithm=algorithm,
                **order.options,
            )
            yield algorithm, result
        elif not is_scaled:
            wire_dtype = None if wire is None else wire.dtype
            communicator.all_reduce(result, op, algorithm, wire_dtype, **order.options)
            yield algorithm, result
    if wire is not None:  # between hosts, of narrower sums alone
        if op not in ("sum", "avg") or wire.dtype.itemsize >= what.dtype.itemsize:
            return
        if wire not in by_wire:
            return
        communicator = by_wire[wire]
        communicator.all_reduce(result := tensor.clone(), op, **order.options)
        yield "the communicator's wire", result
    if order is not RING:
        root = communicator.world_size - 1
        communicator.reduce(result := tensor.clone(), root, op, **order.options)
        if communicator.rank == root:
            yield "reduce", result
        part = torch.empty(len(own) // communicator.world_size, dtype=own.dtype)
        communicator.reduce_scatter(part, own, op, **order.options)
        communicator.all_gather(result := torch.empty_like(own), part)
        yield "reduce_scatter", result[: len(tensor)]


def digests(rank: Rank, place: Place, isa: str) -> dict[tuple[str, str], dict[str, str]]:
    """By line and column, and by call."""
    if isa:
        os.environ["ROTA_ISA"] = isa
    by_wire = communicators(rank, place)
    assert isa in ("", rota._C.isa())
    found = {}
    for what, order in itertools.product(SUMS, place.orders):
        hashes: dict[str, Any] = defaultdict(hashlib.sha256)
        for length in place.lengths(what):
            own = input_of(rank.rank, what.dtype, length)
            for call, result in results(by_wire, what, order, own):
                bits = bits_of(result)
                if result.is_floating_point():
                    bits.masked_fill_(result.isnan(), -1 if bits.dtype.is_signed else 255)
                hashes[call].update(bits.numpy())
        if hashes:
            found[str(what), f"{order.name}.{place}"] = {
                call: value.hexdigest()[:DIGITS] for call, value in hashes.items()
            }
    return found


@functools.cache
def record() -> dict[str, dict[str, str]]:
    """By line and column; at first empty where it is to be written."""
    if MODE == "record":
        return {str(what): {"sum": str(what)} for what in SUMS}
    with RECORD.open() as file:
        return {line["sum"]: line for line in csv.DictReader(file, delimiter=" ")}


def write_record() -> None:
    columns = [f"{order.name}.{place}" for place in ALL for order in place.orders]
    with RECORD.open("w") as file:
        writer = csv.DictWriter(
            file, ["sum", *columns], restval="-", delimiter=" ", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(record().values())


@pytest.mark.parametrize(
    ("place", "isa"),
    [
        *((place, "") for place in (FEW if MODE == "few" else ALL)),
        *((Place((2,)), isa) for isa in isas_of_this_cpu()),
    ],
    ids=str,
)
def test_sums_have_the_recorded_bits(place: Place, isa: str) -> None:
    """With the CPU's own instruction set, or one that is forced."""
    by_rank = place.layout.run(digests, place, isa, timeout_s=180)
    if MODE == "record":
        for (line, column), by_call in by_rank[0].items():
            record()[line][column] = next(iter(by_call.values()))
        write_record()
    differing = [
        f"{line} {column}: {call} on rank {rank} has {digest}, recorded {record()[line][column]}"
        for rank, found in enumerate(by_rank)
        for (line, column), by_call in found.items()
        for call, digest in by_call.items()
        if digest != record()[line][column]
    ]
    assert not differing, "\n".join(differing[:20])
