"""Sums over several hosts: order, and rounding between hosts."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import FORMATS, Format
from oracle import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    assert_same,
    contract,
    exact,
    exact_inputs,
    ops_of,
    random_inputs,
    random_patterns,
)
from ranks import Rank, check_error, error_of
from several_hosts import (
    INTERLEAVED,
    MANY_CHUNKS,
    ONE_BY_ONE,
    THREE_BY_TWO,
    THREE_UNEVEN,
    TWO_BY_TWO,
    UNEVEN,
    Layout,
    by_hosts,
    flat_communicator,
    of_every_layout,
    of_layouts,
    on_layout,
    wires_of,
)

# ---- all_reduce


@of_every_layout
@on_layout()
def test_all_reduce_adds_ranks_of_a_host_and_then_hosts(rank: Rank) -> None:
    communicator = rank.communicator()
    assert communicator.hosts == rank.layout.hosts
    for dtype in (*FLOAT_DTYPES, *FLOAT8_DTYPES, torch.int8):  # whose sums wrap
        for op, size in itertools.product(ops_of(dtype), (129, 20_001)):
            inputs = random_inputs(rank.world_size, size, dtype)
            communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
            assert_same(tensor, by_hosts(inputs, rank.layout, op), f"{dtype} {op} {size}")
    for dtype, op in itertools.product((torch.float16, torch.float32), ("sum", "min", "product")):
        inputs = random_patterns(rank.world_size, 20_001, dtype)
        communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
        assert_same(tensor, by_hosts(inputs, rank.layout, op), f"patterns of {dtype} {op}")
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone(), "avg")
    assert_same(tensor, by_hosts(inputs, rank.layout, "avg"), "many chunks")
    if rank.layout in (TWO_BY_TWO, THREE_BY_TWO):
        communicator.all_reduce(tensor := inputs[rank.rank].clone(), group_size=2)
        assert_same(tensor, contract(inputs, "sum", group_size=2), "as groups on one host")


NODES_OF_TREES = [
    TWO_BY_TWO,
    ONE_BY_ONE,
    Layout((0, 0, 1)),
    Layout((0, 1, 2, 3)),
    Layout((0, 0, 1, 2, 2)),
    Layout((0, 0, 0, 0, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("layout", NODES_OF_TREES, ids=str)
@on_layout()
def test_all_reduce_in_a_tree_has_the_bits_of_a_flat_run(rank: Rank) -> None:
    over_hosts, flat = rank.communicator(), flat_communicator(rank)
    for dtype, num_shards in itertools.product(FLOAT_DTYPES, (None, 8, 16)):
        for op, size in (("sum", 20_001), ("avg", 129)):
            own = random_inputs(rank.world_size, size, dtype)[rank.rank]
            flat.all_reduce(expected := own.clone(), op, order="tree", num_shards=num_shards)
            over_hosts.all_reduce(tensor := own.clone(), op, order="tree", num_shards=num_shards)
            assert_same(tensor, expected, f"{dtype} {op} {size} {num_shards}")
    own = random_inputs(rank.world_size, 60 * rank.world_size, torch.float32)[rank.rank]
    flat.all_reduce(expected := own.clone(), order="tree")
    over_hosts.reduce(tensor := own.clone(), 1, order="tree")
    assert_same(tensor, expected if rank.rank == 1 else own, "reduce")
    over_hosts.reduce_scatter(part := torch.empty(60), own, order="tree")
    assert_same(part, expected.chunk(rank.world_size)[rank.rank], "reduce_scatter")


def check_untouched(communicator: rota.Communicator, ones: torch.Tensor) -> None:
    """Refused calls have written nothing, and the group goes on."""
    assert ones.eq(1).all()
    communicator.all_reduce(ones)
    assert ones.eq(communicator.world_size).all()


@of_layouts(INTERLEAVED, UNEVEN, THREE_UNEVEN, THREE_BY_TWO)
@on_layout()
def test_tree_is_refused_where_hosts_are_no_nodes_of_it(rank: Rank) -> None:
    communicator, tensor = rank.communicator(), torch.ones(8)
    stats = torch.zeros(2, dtype=torch.float64)
    wire = {"wire_dtype": torch.float16, "block_scaling": False}
    for error in (
        error_of(communicator.all_reduce, tensor, order="tree"),
        error_of(communicator.reduce, tensor, order="tree", num_shards=8),
        error_of(communicator.reduce_bucket, tensor, stats, order="tree", **wire),
    ):
        check_error(error, "ValueError", "order='tree'", "no subtree", "order='rank'")
    check_untouched(communicator, tensor)


@pytest.mark.parametrize(
    ("layout", "group_sizes"),
    [
        (THREE_BY_TWO, [3]),
        (INTERLEAVED, [2]),
        (UNEVEN, [2]),
        (Layout((0, 0, 0, 0, 1, 1, 1, 1)), [2]),
        # Both are the plain ascending order, which several hosts of several ranks do not have.
        (TWO_BY_TWO, [1, 4]),
        (THREE_BY_TWO, [1, 6]),
    ],
    ids=str,
)
@on_layout()
def test_group_size_other_than_the_hosts_is_refused(rank: Rank, group_sizes: list[int]) -> None:
    communicator, tensor = rank.communicator(), torch.ones(rank.world_size)
    for group_size in group_sizes:
        for error in (
            error_of(communicator.all_reduce, tensor, group_size=group_size),
            error_of(communicator.reduce, tensor, group_size=group_size),
            error_of(communicator.reduce_scatter, torch.empty(1), tensor, group_size=group_size),
        ):
            check_error(error, "ValueError", "group_size is ", "host")
    check_untouched(communicator, tensor)


@on_layout(TWO_BY_TWO)
def test_explicit_algorithm_is_refused(rank: Rank) -> None:
    communicator, tensor = rank.communicator(), torch.ones(8)
    stats = torch.zeros(2, dtype=torch.float64)
    wire = {"wire_dtype": torch.float16, "block_scaling": False}
    for algorithm in ("one_shot", "two_shot", "ordered_ring", "ring"):
        for error in (
            error_of(communicator.all_reduce, tensor, "sum", algorithm),
            error_of(communicator.reduce_bucket, tensor, stats, algorithm=algorithm, **wire),
        ):
            check_error(error, "ValueError", "algorithm='", "several hosts", '"auto"')
    communicator.all_reduce(tensor, "max", "auto")
    check_untouched(communicator, tensor)


# ---- rounding between hosts


@of_every_layout
@on_layout()
def test_wire_dtype_rounds_each_hosts_sum_and_the_result_once(rank: Rank) -> None:
    communicator = rank.communicator()
    for dtype in FLOAT_DTYPES:
        for wire, size in itertools.product(wires_of(dtype), (129, 10_001)):
            inputs = random_inputs(rank.world_size, size, dtype)
            for op in ("sum", "avg", "max"):
                expected = by_hosts(inputs, rank.layout, op, wire)
                tensor = inputs[rank.rank].clone()
                communicator.all_reduce(tensor, op, wire_dtype=wire.dtype)
                assert_same(tensor, expected, f"{dtype} {op} {size} in {wire}")
    wire = Format(torch.bfloat16, False)
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone(), wire_dtype=wire.dtype)
    assert_same(tensor, by_hosts(inputs, rank.layout, "sum", wire), "many chunks")
    # A wire of one call does not stay.
    communicator.all_reduce(tensor := inputs[rank.rank][:99].clone())
    assert_same(tensor, by_hosts([t[:99] for t in inputs], rank.layout), "no wire")


@of_layouts(TWO_BY_TWO, UNEVEN, INTERLEAVED)
@on_layout()
def test_inter_wire_dtype_rounds_each_hosts_sum_and_the_result_once(rank: Rank) -> None:
    rank.init()
    for wire in FORMATS[1:]:  # narrower than float32
        communicator = rota.Communicator(
            inter_wire_dtype=wire.dtype, inter_block_scaling=wire.block_scaling
        )
        for dtype in FLOAT_DTYPES:
            # Sums of 16-bit tensors travel in float32, as do those of floats as wide as the wire.
            wire_here = wire if wire.dtype.itemsize < dtype.itemsize else None
            for op, size in (("sum", 129), ("avg", 10_001), ("max", 1001), ("product", 1001)):
                # Beyond float16's range, which scaled blocks have to cope with.
                inputs = [t * 1e4 for t in random_inputs(rank.world_size, size, dtype)]
                wire_of_op = wire_here if op in ("sum", "avg") else None
                expected = by_hosts(inputs, rank.layout, op, wire_of_op)
                communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
                assert_same(tensor, expected, f"{dtype} {op} {size} in {wire}")
        # What a call asks for goes before what the communicator was made with.
        inputs = random_inputs(rank.world_size, 1001, torch.float32)
        communicator.all_reduce(tensor := inputs[rank.rank].clone(), wire_dtype=torch.bfloat16)
        asked_for = Format(torch.bfloat16, False)
        assert_same(tensor, by_hosts(inputs, rank.layout, "sum", asked_for), f"not in {wire}")
        integers = exact_inputs(rank.world_size, 1001, torch.int32)
        communicator.all_reduce(tensor := integers[rank.rank].clone())
        assert_same(tensor, exact(integers, "sum"), f"integers, {wire}")


@on_layout(TWO_BY_TWO)
def test_backend_options_choose_wire_and_order(rank: Rank) -> None:
    wire = Format(torch.float8_e4m3fn, True)
    rank.init(pg_options=rota.BackendOptions(inter_wire_dtype=wire.dtype, inter_block_scaling=True))
    inputs = random_inputs(rank.world_size, 10_001, torch.float32)
    dist.all_reduce(tensor := inputs[rank.rank].clone())
    assert_same(tensor, by_hosts(inputs, rank.layout, "sum", wire), "of the default group")
    plain = dist.new_group(backend="rota", pg_options=rota.BackendOptions(order="tree"))
    dist.all_reduce(tensor := inputs[rank.rank].clone(), group=plain)
    assert_same(tensor, by_hosts(inputs, rank.layout, order="tree"), "of another group")
    coarse = dist.new_group(
        backend="rota", pg_options=rota.BackendOptions(wire_dtype=torch.bfloat16)
    )
    dist.all_reduce(tensor := inputs[rank.rank].clone(), group=coarse)
    in_bfloat16 = Format(torch.bfloat16, False)
    assert_same(tensor, by_hosts(inputs, rank.layout, "sum", in_bfloat16), "wire_dtype")
