"""group_size and order="tree": whatever sums adds in the order that was asked for, bit for bit."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import Format, reduce_bucket
from oracle import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    assert_same,
    bits_of,
    contract,
    name_of,
    ops_of,
    random_inputs,
)
from ranks import Rank, on_ranks, run_ranks
from rota._C import schedule

pytestmark = pytest.mark.same_in_every_build

SLOT_BYTES = 4096
# One mailbox message, and several rounds through slots.
LENGTHS = (129, 20_003)
BUCKET_WIRES = (
    Format(torch.float32, False),
    Format(torch.float16, True),
    Format(torch.bfloat16, False),
)


class Order(NamedTuple):
    world_size: int
    options: dict[str, Any]
    node_size: int | None = None  # of NUMA nodes, which "two_level" adds first

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Some twice, so that slots and flags carry over to and from the others."""
        names = ("one_shot", "two_shot", "auto")
        return names if self.node_size is None else ("two_level", "one_shot", "two_level", *names)

    def communicator(self, rank: Rank) -> rota.Communicator:
        if self.node_size is not None:
            os.environ["ROTA_NUMA_NODE"] = str(rank.rank // self.node_size)
        return rank.communicator(slot_bytes=SLOT_BYTES)

    def __str__(self) -> str:
        name, value = next(iter(self.options.items()))
        nodes = "" if self.node_size is None else f"-nodes-of-{self.node_size}"
        return f"ws{self.world_size}-{name}-{value}{nodes}"


ORDERS = [
    *(Order(size, {"order": "tree"}) for size in (1, 3, 4, 5, 8)),
    *(Order(4 if group != 3 else 6, {"group_size": group}) for group in (1, 2, 3, 4)),
    *(
        Order(size, options, node_size)
        for size, node_size in ((4, 2), (6, 3), (8, 2))
        for options in ({"group_size": node_size}, {"order": "tree"})
    ),
]
each_order = pytest.mark.parametrize("order", ORDERS, ids=str)


def check_all_reduce(rank: Rank, order: Order, dtype: torch.dtype) -> None:
    communicator = order.communicator(rank)
    wires = (None, torch.float16) if dtype == torch.float32 else (None,)
    options = order.options
    for length in LENGTHS:
        inputs = random_inputs(rank.world_size, length, dtype)
        for op, wire_dtype in itertools.product(ops_of(dtype), wires):
            expected = contract(inputs, op, wire_dtype, **options)
            for algorithm in order.algorithms:
                tensor = inputs[rank.rank].clone()
                communicator.all_reduce(tensor, op, algorithm, wire_dtype, **options)
                assert_same(tensor, expected, f"{op} {algorithm} wire {wire_dtype} {length}")


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, FLOAT8_DTYPES[0], torch.int8], ids=name_of)
@each_order
def test_all_reduce_adds_in_order(order: Order, dtype: torch.dtype) -> None:
    run_ranks(order.world_size, check_all_reduce, order, dtype)


def check_bucket(rank: Rank, order: Order) -> None:
    """Against the oracle, and, with what that does not know, each algorithm against the first."""
    communicator = order.communicator(rank)
    for wire, length in itertools.product(BUCKET_WIRES, LENGTHS):
        inputs = random_inputs(communicator.world_size, length, torch.float32)
        expected = reduce_bucket(inputs, wire, divisor=8.0, **order.options)
        firsts: list[torch.Tensor] = []
        cases = [(algorithm, False) for algorithm in order.algorithms]
        cases += [(algorithm, True) for algorithm in sorted(set(order.algorithms))]
        for algorithm, rounds_randomly in cases:
            bucket, stats = inputs[rank.rank].clone(), torch.zeros(2, dtype=torch.float64)
            residual = inputs[rank.rank] * 1e-3 if rounds_randomly else None
            communicator.reduce_bucket(
                bucket,
                stats,
                wire_dtype=wire.dtype,
                block_scaling=wire.block_scaling,
                divisor=8.0,
                residual=residual,
                stochastic_seed=7 if rounds_randomly else None,
                algorithm=algorithm,
                **order.options,
            )
            what = f"{algorithm} {wire} {length}"
            if residual is None:
                assert_same(bucket, expected, what)
                continue
            firsts = firsts or [bucket, stats, residual]
            for got, first in zip((bucket, stats, residual), firsts, strict=True):
                assert_same(got, first, what)


@each_order
def test_bucket_is_added_in_order(order: Order) -> None:
    run_ranks(order.world_size, check_bucket, order)


@on_ranks(4)
def test_backend_adds_in_the_order_of_its_options(rank: Rank) -> None:
    rank.init(pg_options=rota.BackendOptions(order="tree", num_shards=16))
    inputs = random_inputs(rank.world_size, LENGTHS[1] * rank.world_size, torch.float32)
    own, expected = inputs[rank.rank], contract(inputs, "sum", order="tree")
    dist.all_reduce(tensor := own.clone())
    assert_same(tensor, expected, "all_reduce")
    dist.reduce(tensor := own.clone(), 1)
    assert_same(tensor, expected if rank.rank == 1 else own, "reduce")
    dist.reduce_scatter_tensor(part := torch.empty(LENGTHS[1]), own)
    assert_same(part, expected.chunk(rank.world_size)[rank.rank], "reduce_scatter")


# ---- the same bits on any number of ranks


def sum_in_tree(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0].clone()
    half = len(values) // 2
    return sum_in_tree(values[:half]) + sum_in_tree(values[half:])


def reduce_shards(rank: Rank, num_shards: int) -> torch.Tensor:
    """Adds this rank's block, and then all_reduces; odd ranks in another algorithm's slots."""
    shards = random_inputs(num_shards, LENGTHS[1], torch.float32)
    block = schedule.shards_of(num_shards, rank.world_size, rank.rank)
    begin, end = block.first_shard, block.first_shard + block.num_shards
    results = []
    for slot_bytes, algorithm in itertools.product((SLOT_BYTES, None), ("one_shot", "two_shot")):
        communicator = rank.communicator(slot_bytes=slot_bytes)
        tensor = sum_in_tree(shards[begin:end])
        communicator.all_reduce(tensor, "sum", algorithm, order="tree", num_shards=num_shards)
        results.append(tensor)
    for result in results:
        assert_same(result, results[0], "algorithm or slots")
    return bits_of(results[0])


def test_tree_has_the_same_bits_on_any_number_of_ranks() -> None:
    num_shards = 16
    one = run_ranks(1, reduce_shards, num_shards)[0]
    for world_size in (2, 3, 4, 5, 6, 7, 8):
        for result in run_ranks(world_size, reduce_shards, num_shards):
            assert torch.equal(result, one), world_size


@pytest.mark.parametrize("world_size", range(1, 65))
def test_blocks_of_shards_are_aligned_and_complete(world_size: int) -> None:
    for num_shards in (64, 128, 1 << 20):
        end = 0
        for rank in range(world_size):
            block = schedule.shards_of(num_shards, world_size, rank)
            assert block.first_shard == end
            assert block.num_shards.bit_count() == 1
            assert block.first_shard % block.num_shards == 0
            end += block.num_shards
        assert end == num_shards
