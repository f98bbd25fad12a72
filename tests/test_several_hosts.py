"""Communicator and backend over several hosts: results, bits, disagreements, bytes on the wire.

Most ranks only claim, by ROTA_HOST_ID, to be on different hosts; the last tests simulate them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import rota
import rota.fsdp
from bucket_oracle import Format, stats_of, through_wire
from host_network import Traffic
from hosts import Hosts
from models import SMALL_BUCKETS_MB, batch_of, gradients_of, make_model
from oracle import (
    DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    assert_same,
    bits_of,
    exact,
    exact_inputs,
    ops_of,
    random_inputs,
    random_patterns,
    reduce_in_order,
    round_to,
    to_numpy,
)
from ranks import Rank, error_of, run_ranks
from rota import doctor_hosts

# Several chunks, the last of which is odd. One is 2 MiB of float32 in a sum, and 1 MiB of each
# rank's part in a copy (kChunkBytes in csrc/tensor/hosts/).
MANY_CHUNKS = 1_200_003
STAR_BYTES = 64 << 10  # kStarBytes: a longer broadcast goes from host to host
SHORT = 4096  # in float32 it goes with the greeting (kMaxShortBytes)


class Layout(NamedTuple):
    """The host of each rank, by rank."""

    host_of: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.host_of)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host; hosts are in the order of their lowest ranks."""
        numbers = list(dict.fromkeys(self.host_of))
        return [[r for r, host in enumerate(self.host_of) if host == n] for n in numbers]

    def __str__(self) -> str:
        return "hosts" + "".join(map(str, self.host_of))

    def run(self, function: Callable[..., Any], *args: object, timeout_s: float = 60) -> list[Any]:
        """Runs `function(rank, layout, *args)` on every rank and returns what each returned."""
        return run_ranks(self.world_size, _run_on_host, self, function, *args, timeout_s=timeout_s)


def _run_on_host(rank: Rank, layout: Layout, function: Callable[..., Any], *args: object) -> Any:
    os.environ["ROTA_HOST_ID"] = f"host{layout.host_of[rank.rank]}"
    result = function(rank, layout, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


TWO_BY_TWO = Layout((0, 0, 1, 1))
ONE_BY_ONE = Layout((0, 1))
UNEVEN = Layout((0, 0, 0, 1))
THREE_UNEVEN = Layout((0, 1, 1, 2))
THREE_BY_TWO = Layout((0, 0, 1, 1, 2, 2))
INTERLEAVED = Layout((0, 1, 0, 1))
LAYOUTS = [TWO_BY_TWO, ONE_BY_ONE, UNEVEN, THREE_UNEVEN, THREE_BY_TWO, INTERLEAVED]
of_every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def flat_communicator(rank: Rank) -> rota.Communicator:
    """Of the same ranks, as if they were on one host."""
    own = os.environ["ROTA_HOST_ID"]
    os.environ["ROTA_HOST_ID"] = "one for all"
    try:
        communicator = rank.communicator()
        assert communicator.hosts == [list(range(rank.world_size))]
        return communicator
    finally:
        os.environ["ROTA_HOST_ID"] = own


def default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# ---- the contract, in torch and numpy

_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": lambda a, b: torch.where((a < b) | a.isnan(), a, b),
    "max": lambda a, b: torch.where((a > b) | a.isnan(), a, b),
}


def _rounded(values: torch.Tensor, wire: Format | None) -> torch.Tensor:
    if wire is None:
        return values
    return torch.from_numpy(through_wire(to_numpy(values), wire)).to(values.dtype)


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once; torch converts float64 to 16 bits by way of float32, which rounds twice."""
    if values.dtype == dtype:
        return values
    return torch.from_numpy(round_to(to_numpy(values), dtype)).to(dtype)


def by_hosts(
    inputs: Sequence[torch.Tensor],
    layout: Layout,
    op: str = "sum",
    wire: Format | None = None,
    *,
    order: str = "rank",
    contribution_factor: float = 1.0,
    divisor: float | None = None,
    result_factor: float = 1.0,
) -> torch.Tensor:
    """What every rank holds after a sum over several hosts.

    Each host sums its ranks' contributions in the accumulate dtype and rounds the sum to the wire
    format; the hosts' sums are added, divided, and rounded once more.

    Args:
        inputs: by rank.
        wire: between hosts; None: the accumulate dtype.
        order: as in Communicator.all_reduce, within a host and over the hosts.
        contribution_factor, divisor, result_factor: as in Communicator.reduce_bucket.
    """
    dtype = inputs[0].dtype
    if not dtype.is_floating_point:
        return exact(inputs, op)
    is_double = dtype == torch.float64 and not (wire and wire.block_scaling)
    local = torch.float64 if is_double else torch.float32
    above = local if wire is None or wire.dtype == torch.float64 else torch.float32
    add = functools.partial(reduce_in_order, _OPS[op], group_size=None, order=order)
    contributions = [tensor.to(local) * contribution_factor for tensor in inputs]
    sums = [add([contributions[rank] for rank in ranks]) for ranks in layout.hosts]
    total = add([_rounded(partial, wire).to(above) for partial in sums])
    if divisor is None and op == "avg":
        divisor = len(inputs)
    if divisor is not None:
        total = total / torch.tensor(divisor, dtype=above)
    return _converted(_rounded(total, wire) * result_factor, dtype)


def wires_of(dtype: torch.dtype) -> Iterator[Format]:
    """The formats that are narrower than a dtype, or as wide."""
    for wire in (torch.float32, torch.float16, torch.bfloat16, *FLOAT8_DTYPES):
        if wire.itemsize <= dtype.itemsize:
            yield Format(wire, False)


# ---- all_reduce


def check_exact(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    assert communicator.hosts == layout.hosts
    n = rank.world_size
    for dtype in DTYPES:
        for op in ops_of(dtype):
            sizes = [63, 8193]
            if (dtype, op) in ((torch.float32, "sum"), (torch.uint8, "bxor")):
                sizes = [0, 1, n - 1, n + 1, 63, 65_535, 65_537]
            for size in sizes:
                inputs = exact_inputs(n, size, dtype, op)
                communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
                assert_same(tensor, exact(inputs, op), f"{dtype} {op} {size}")
    for dtype in (torch.float32, torch.float16, torch.int64):
        inputs = exact_inputs(n, MANY_CHUNKS, dtype)
        communicator.all_reduce(tensor := inputs[rank.rank].clone())
        assert_same(tensor, exact(inputs, "sum"), f"{dtype} {MANY_CHUNKS}")


@of_every_layout
def test_all_reduce_of_exact_inputs_equals_oracle(layout: Layout) -> None:
    layout.run(check_exact)


def check_order(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    for dtype in (*FLOAT_DTYPES, *FLOAT8_DTYPES):
        for op, size in itertools.product(ops_of(dtype), (129, 20_001)):
            inputs = random_inputs(rank.world_size, size, dtype)
            communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
            assert_same(tensor, by_hosts(inputs, layout, op), f"{dtype} {op} {size}")
    for dtype, op in itertools.product((torch.float16, torch.float32), ("sum", "min", "product")):
        inputs = random_patterns(rank.world_size, 20_001, dtype)
        communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
        assert_same(tensor, by_hosts(inputs, layout, op), f"patterns of {dtype} {op}")
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone(), "avg")
    assert_same(tensor, by_hosts(inputs, layout, "avg"), "many chunks")


@of_every_layout
def test_all_reduce_adds_ranks_of_a_host_and_then_hosts(layout: Layout) -> None:
    layout.run(check_order)


def check_strided(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.t(),
        lambda t: t[3:, 5:71:2],
        lambda t: t.flatten()[1:20_000],
        lambda t: t[:0],
    ]
    for dtype, view in itertools.product((torch.float32, torch.bfloat16), views):
        inputs = [t.view(150, 160) for t in random_inputs(rank.world_size, 24_000, dtype)]
        memory = inputs[rank.rank].clone()
        expected = memory.clone()
        view(expected).copy_(by_hosts([view(t).contiguous() for t in inputs], layout))
        communicator.all_reduce(view(memory))
        assert_same(memory, expected, f"view of {dtype}")


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_all_reduce_of_strided_tensor_writes_only_the_view(layout: Layout) -> None:
    layout.run(check_strided)


def compare_with_flat(rank: Rank, layout: Layout) -> None:
    over_hosts, flat = rank.communicator(), flat_communicator(rank)
    assert over_hosts.hosts == layout.hosts
    group_size = len(layout.hosts[0])
    for dtype, size in itertools.product(FLOAT_DTYPES, (1, SHORT, 100_003)):
        own = random_inputs(rank.world_size, size, dtype)[rank.rank]
        for op in ("sum", "avg", "product"):
            flat.all_reduce(expected := own.clone(), op, group_size=group_size)
            over_hosts.all_reduce(tensor := own.clone(), op)
            assert_same(tensor, expected, f"{dtype} {op} {size}")
            over_hosts.all_reduce(tensor := own.clone(), op, group_size=group_size)
            assert_same(tensor, expected, f"{dtype} {op} {size} with group_size")


@pytest.mark.parametrize("layout", [TWO_BY_TWO, ONE_BY_ONE, THREE_BY_TWO], ids=str)
def test_all_reduce_has_the_bits_of_a_flat_run_in_groups(layout: Layout) -> None:
    layout.run(compare_with_flat)


def compare_with_flat_tree(rank: Rank, layout: Layout) -> None:
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


NODES_OF_TREES = [
    TWO_BY_TWO,
    ONE_BY_ONE,
    Layout((0, 0, 1)),
    Layout((0, 1, 2, 3)),
    Layout((0, 0, 1, 2, 2)),
    Layout((0, 0, 0, 0, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("layout", NODES_OF_TREES, ids=str)
def test_all_reduce_in_a_tree_has_the_bits_of_a_flat_run(layout: Layout) -> None:
    layout.run(compare_with_flat_tree)


def errors_and_sum(
    rank: Rank, calls: Sequence[Callable[[], object]]
) -> tuple[list[tuple[str, str]], float]:
    """What each call raises, and a sum of ones afterwards, which shows that the group is alive."""
    errors = [error_of(call) for call in calls]
    rank.communicator().all_reduce(ones := torch.ones(3))
    return errors, ones[0].item()


def ask_for_tree(rank: Rank, layout: Layout) -> Any:
    communicator, tensor = rank.communicator(), torch.ones(8)
    stats = torch.zeros(2, dtype=torch.float64)
    wire = {"wire_dtype": torch.float16, "block_scaling": False}
    errors = errors_and_sum(
        rank,
        [
            lambda: communicator.all_reduce(tensor, order="tree"),
            lambda: communicator.reduce(tensor, order="tree", num_shards=8),
            lambda: communicator.reduce_bucket(tensor, stats, order="tree", **wire),
        ],
    )
    assert torch.equal(tensor, torch.ones(8))
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((8,), float(rank.world_size)))
    return errors


@pytest.mark.parametrize("layout", [INTERLEAVED, UNEVEN, THREE_UNEVEN, THREE_BY_TWO], ids=str)
def test_tree_is_refused_where_hosts_are_no_nodes_of_it(layout: Layout) -> None:
    for errors, total in layout.run(ask_for_tree):
        assert total == layout.world_size
        for error, text in errors:
            assert error == "ValueError", text
            assert "order='tree'" in text and "no subtree" in text and "order='rank'" in text


def ask_for_groups(rank: Rank, layout: Layout, group_sizes: list[int]) -> Any:
    communicator, tensor = rank.communicator(), torch.ones(rank.world_size)
    calls: list[Callable[[], object]] = []
    for group_size in group_sizes:
        calls += [
            functools.partial(communicator.all_reduce, tensor, group_size=group_size),
            functools.partial(communicator.reduce, tensor, group_size=group_size),
            functools.partial(
                communicator.reduce_scatter, torch.empty(1), tensor, group_size=group_size
            ),
        ]
    return errors_and_sum(rank, calls)


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
def test_group_size_other_than_the_hosts_is_refused(layout: Layout, group_sizes: list[int]) -> None:
    for errors, total in layout.run(ask_for_groups, group_sizes):
        assert total == layout.world_size
        for error, text in errors:
            assert error == "ValueError", text
            assert "group_size is " in text and "host" in text


def ask_for_algorithms(rank: Rank, layout: Layout) -> Any:
    communicator, tensor = rank.communicator(), torch.ones(8)
    stats = torch.zeros(2, dtype=torch.float64)
    calls: list[Callable[[], object]] = []
    for algorithm in ("one_shot", "two_shot", "ordered_ring", "ring"):
        calls.append(functools.partial(communicator.all_reduce, tensor, "sum", algorithm))
        calls.append(
            functools.partial(
                communicator.reduce_bucket,
                tensor,
                stats,
                wire_dtype=torch.float16,
                block_scaling=False,
                algorithm=algorithm,
            )
        )
    communicator.all_reduce(tensor, "max", "auto")
    return errors_and_sum(rank, calls)


def test_explicit_algorithm_is_refused() -> None:
    for errors, total in TWO_BY_TWO.run(ask_for_algorithms):
        assert total == 4
        assert len(errors) == 8
        for error, text in errors:
            assert error == "ValueError", text
            assert "algorithm='" in text and "several hosts" in text and '"auto"' in text


# ---- rounding between hosts


def check_wires(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    for dtype in FLOAT_DTYPES:
        for wire, size in itertools.product(wires_of(dtype), (129, 10_001)):
            inputs = random_inputs(rank.world_size, size, dtype)
            for op in ("sum", "avg", "max"):
                expected = by_hosts(inputs, layout, op, wire)
                tensor = inputs[rank.rank].clone()
                communicator.all_reduce(tensor, op, wire_dtype=wire.dtype)
                assert_same(tensor, expected, f"{dtype} {op} {size} in {wire}")
    wire = Format(torch.bfloat16, False)
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone(), wire_dtype=wire.dtype)
    assert_same(tensor, by_hosts(inputs, layout, "sum", wire), "many chunks")
    # A wire of one call does not stay.
    communicator.all_reduce(tensor := inputs[rank.rank][:99].clone())
    assert_same(tensor, by_hosts([t[:99] for t in inputs], layout), "no wire")


@of_every_layout
def test_wire_dtype_rounds_each_hosts_sum_and_the_result_once(layout: Layout) -> None:
    layout.run(check_wires)


INTER_WIRES = [
    Format(torch.float16, False),
    Format(torch.bfloat16, False),
    Format(torch.float8_e5m2, False),
    Format(torch.float16, True),
    Format(torch.float8_e4m3fn, True),
    Format(torch.float8_e5m2, True),
]


def check_inter_wires(rank: Rank, layout: Layout) -> None:
    rank.init()
    for wire in INTER_WIRES:
        communicator = rota.Communicator(
            inter_wire_dtype=wire.dtype, inter_block_scaling=wire.block_scaling
        )
        for dtype in FLOAT_DTYPES:
            # Of 16-bit tensors, sums travel in float32; of floats as wide as the wire, likewise.
            wire_here = wire if wire.dtype.itemsize < dtype.itemsize else None
            for op, size in (("sum", 129), ("avg", 10_001), ("max", 1001), ("product", 1001)):
                # Beyond float16's range, which scaled blocks have to cope with.
                inputs = [t * 1e4 for t in random_inputs(rank.world_size, size, dtype)]
                expected = by_hosts(inputs, layout, op, wire_here if op in ("sum", "avg") else None)
                communicator.all_reduce(tensor := inputs[rank.rank].clone(), op)
                assert_same(tensor, expected, f"{dtype} {op} {size} in {wire}")
        # What a call asks for goes before what the communicator was made with.
        inputs = random_inputs(rank.world_size, 1001, torch.float32)
        communicator.all_reduce(tensor := inputs[rank.rank].clone(), wire_dtype=torch.bfloat16)
        asked_for = Format(torch.bfloat16, False)
        assert_same(tensor, by_hosts(inputs, layout, "sum", asked_for), f"not in {wire}")
        integers = exact_inputs(rank.world_size, 1001, torch.int32)
        communicator.all_reduce(tensor := integers[rank.rank].clone())
        assert_same(tensor, exact(integers, "sum"), f"integers, {wire}")


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN, INTERLEAVED], ids=str)
def test_inter_wire_dtype_rounds_each_hosts_sum_and_the_result_once(layout: Layout) -> None:
    layout.run(check_inter_wires)


def check_inter_wire_of_scatter(rank: Rank, layout: Layout) -> None:
    """A part is a multiple of 64 elements, so its scaled blocks are those of the whole tensor."""
    rank.init()
    for wire in INTER_WIRES:
        communicator = rota.Communicator(
            inter_wire_dtype=wire.dtype, inter_block_scaling=wire.block_scaling
        )
        for part_elems in (64, 6400):
            size = part_elems * rank.world_size
            inputs = [t * 1e4 for t in random_inputs(rank.world_size, size, torch.float32)]
            expected = by_hosts(inputs, layout, "avg", wire)
            own = inputs[rank.rank]
            communicator.reduce_scatter(part := torch.empty(part_elems), own, "avg")
            expected_part = expected.chunk(rank.world_size)[rank.rank]
            assert_same(part, expected_part, f"reduce_scatter {part_elems} in {wire}")
            communicator.reduce(tensor := own.clone(), 1, "avg")
            assert_same(tensor, expected if rank.rank == 1 else own, f"reduce {size} in {wire}")


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_reduce_scatter_and_reduce_in_inter_wire_have_the_bits_of_all_reduce(
    layout: Layout,
) -> None:
    layout.run(check_inter_wire_of_scatter)


def check_backend_options(rank: Rank, layout: Layout) -> None:
    wire = Format(torch.float8_e4m3fn, True)
    rank.init(pg_options=rota.BackendOptions(inter_wire_dtype=wire.dtype, inter_block_scaling=True))
    inputs = random_inputs(rank.world_size, 10_001, torch.float32)
    dist.all_reduce(tensor := inputs[rank.rank].clone())
    assert_same(tensor, by_hosts(inputs, layout, "sum", wire), "of the default group")
    plain = dist.new_group(backend="rota", pg_options=rota.BackendOptions(order="tree"))
    dist.all_reduce(tensor := inputs[rank.rank].clone(), group=plain)
    assert_same(tensor, by_hosts(inputs, layout, order="tree"), "of another group")
    coarse = dist.new_group(
        backend="rota", pg_options=rota.BackendOptions(wire_dtype=torch.bfloat16)
    )
    dist.all_reduce(tensor := inputs[rank.rank].clone(), group=coarse)
    in_bfloat16 = Format(torch.bfloat16, False)
    assert_same(tensor, by_hosts(inputs, layout, "sum", in_bfloat16), "wire_dtype")


def test_backend_options_choose_wire_and_order() -> None:
    TWO_BY_TWO.run(check_backend_options)


# ---- the other collectives


def check_other_sums(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    n = rank.world_size
    for dtype, part_elems in itertools.product(FLOAT_DTYPES, (0, 1, 63, 513, 40_001)):
        inputs = random_inputs(n, part_elems * n, dtype)
        own = inputs[rank.rank]
        for op in ("sum", "avg"):
            expected = by_hosts(inputs, layout, op)
            part = torch.empty(part_elems, dtype=dtype)
            whole = own.clone()
            communicator.reduce_scatter(part, whole, op)
            assert_same(part, expected[part_elems * rank.rank :][:part_elems], f"scatter {dtype}")
            assert_same(whole, own, "the input is left as it is")
            for root in {0, n // 2, n - 1}:
                communicator.reduce(whole, root, op)
                assert_same(whole, expected if rank.rank == root else own, f"reduce {dtype}")
                whole.copy_(own)
    for dtype in (torch.float32, torch.float16):
        part_elems = 300_007  # more than one chunk
        inputs = random_inputs(n, part_elems * n, dtype)
        whole = inputs[rank.rank].clone()
        place = whole[part_elems * rank.rank :][:part_elems]
        communicator.reduce_scatter(place, whole)  # into the own part of the input
        expected = by_hosts(inputs, layout)
        assert_same(place, expected[part_elems * rank.rank :][:part_elems], f"in place {dtype}")


@of_every_layout
def test_reduce_and_reduce_scatter_have_the_bits_of_all_reduce(layout: Layout) -> None:
    layout.run(check_other_sums)


LENGTHS = (0, 1, 70_001, 20, 300_007, 64)  # of uneven parts, by rank


def check_uneven(rank: Rank, layout: Layout) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    for dtype, shift in itertools.product((torch.float32, torch.bfloat16, torch.int8), (0, 3)):
        lengths = [LENGTHS[(i + shift) % len(LENGTHS)] for i in range(n)]
        parts = [
            p[:length]
            for p, length in zip(random_patterns(n, max(lengths), dtype), lengths, strict=True)
        ]
        outputs = [torch.zeros(length, dtype=dtype) for length in lengths]
        dist.all_gather(outputs, parts[own_rank])
        for r, output in enumerate(outputs):
            assert_same(output, parts[r], f"all_gather {dtype} {lengths} from {r}")

        inputs = random_inputs(n, sum(lengths), dtype)
        output = torch.zeros(lengths[own_rank], dtype=dtype)
        dist.reduce_scatter(output, list(inputs[own_rank].split(lengths)))
        expected = by_hosts(inputs, layout).split(lengths)[own_rank]
        assert_same(output, expected, f"reduce_scatter {dtype} {lengths}")


@of_every_layout
def test_all_gather_and_reduce_scatter_of_uneven_parts(layout: Layout) -> None:
    layout.run(check_uneven)


def check_wire_of_fsdp(rank: Rank, layout: Layout) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    cases = list(itertools.product(rota.fsdp.PARAMETER_WIRE_DTYPES, (0, 1, 63, 5001)))
    for wire, elems in [*cases, (torch.bfloat16, 600_001)]:
        inputs = random_inputs(n, elems, torch.float32)
        form = Format(wire, wire.itemsize == 1)
        expected = torch.cat([_rounded(part, form) for part in inputs])
        output = torch.zeros(n * elems)
        rota.fsdp.AllGather(wire)(output, inputs[own_rank], default_group())
        assert_same(output, expected, f"all_gather {elems} in {wire}")
    for wire, elems in itertools.product(rota.fsdp.GRADIENT_WIRE_DTYPES, (0, 1, 63, 10_001)):
        inputs = random_inputs(n, elems * n, torch.float32)
        for op, reduce_op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
            expected = by_hosts(inputs, layout, op, Format(wire, False))
            output = torch.zeros(elems)
            work = rota.fsdp.ReduceScatter(wire)(
                output, inputs[own_rank], default_group(), reduce_op, async_op=True
            )
            assert work is not None
            work.wait()
            part = expected[elems * own_rank :][:elems]
            assert_same(output, part, f"reduce_scatter {op} {elems} in {wire}")


@of_every_layout
def test_fsdp_collectives_round_once_to_the_wire(layout: Layout) -> None:
    layout.run(check_wire_of_fsdp)


def check_copies(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    dtype = torch.int16
    star = STAR_BYTES // dtype.itemsize
    for size in (0, 1, 63, star, star + 1, 1_200_003):
        inputs = random_patterns(n, size, dtype)
        for root in range(n) if size <= star + 1 else (0, n - 1):
            communicator.broadcast(tensor := inputs[own_rank].clone(), root)
            assert_same(tensor, inputs[root], f"broadcast {size} from {root}")
        output = torch.zeros(n * size, dtype=dtype)
        communicator.all_gather(output, inputs[own_rank])
        assert_same(output, torch.cat(inputs), f"all_gather {size}")
        in_place = torch.zeros(n, size, dtype=dtype)
        in_place[own_rank] = inputs[own_rank]
        communicator.all_gather(in_place, in_place[own_rank])
        assert_same(in_place.flatten(), torch.cat(inputs), f"all_gather in place {size}")
    for other in (torch.complex64, torch.uint64, torch.bool, torch.float8_e4m3fn):
        tensors = [p.view(torch.uint8) % 2 for p in random_patterns(n, 5000, torch.int64)]
        inputs = [t.view(other) for t in tensors]
        communicator.broadcast(tensor := inputs[own_rank].clone(), 1)
        assert torch.equal(tensor.view(torch.uint8), inputs[1].view(torch.uint8)), other
        strided = torch.zeros(n, inputs[0].numel(), 2, dtype=other)[..., 0]
        communicator.all_gather(strided, inputs[own_rank])
        assert torch.equal(strided.contiguous().view(torch.uint8).flatten(), torch.cat(tensors))


@of_every_layout
def test_broadcast_and_all_gather_copy_all_bytes(layout: Layout) -> None:
    layout.run(check_copies)


def numbers(source: int, target: int, num_elems: int) -> torch.Tensor:
    return torch.arange(num_elems, dtype=torch.float64) + 1e7 * source + 1e9 * target


def check_exchanges(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    float64 = torch.float64
    for size in (0, 1, 1000, 200_003):
        for root in range(n):
            is_root = own_rank == root
            output = torch.zeros(n * size, dtype=float64) if is_root else None
            communicator.gather(output, numbers(own_rank, root, size), root)
            if output is not None:
                expected = torch.cat([numbers(r, root, size) for r in range(n)])
                assert_same(output, expected, f"gather {size} to {root}")
            whole = torch.cat([numbers(root, r, size) for r in range(n)]) if is_root else None
            communicator.scatter(part := torch.zeros(size, dtype=float64), whole, root)
            assert_same(part, numbers(root, own_rank, size), f"scatter {size} from {root}")
        whole = torch.cat([numbers(own_rank, r, size) for r in range(n)])
        communicator.all_to_all(output := torch.zeros_like(whole), whole)
        expected = torch.cat([numbers(r, own_rank, size) for r in range(n)])
        assert_same(output, expected, f"all_to_all {size}")
        communicator.all_to_all(whole, whole)
        assert_same(whole, expected, f"all_to_all {size} in place")

    def length(source: int, target: int) -> int:
        return (source * 7 + target * 3) % 5 * 20_011 if (source + target) % 3 else 0

    sent = [length(own_rank, r) for r in range(n)]
    received = [length(r, own_rank) for r in range(n)]
    whole = torch.cat([numbers(own_rank, r, sent[r]) for r in range(n)])
    output = torch.zeros(sum(received), dtype=float64)
    communicator.all_to_all(output, whole, output_splits=received, input_splits=sent)
    expected = torch.cat([numbers(r, own_rank, received[r]) for r in range(n)])
    assert_same(output, expected, "all_to_all with splits")
    outputs = [torch.zeros(elems, dtype=float64) for elems in received]
    dist.all_to_all(outputs, [numbers(own_rank, r, sent[r]) for r in range(n)])
    assert_same(torch.cat(outputs), expected, "all_to_all of lists")
    communicator.barrier()
    dist.barrier()


@of_every_layout
def test_gather_scatter_and_all_to_all_move_every_part(layout: Layout) -> None:
    layout.run(check_exchanges)


def check_backend(rank: Rank, layout: Layout) -> None:
    """What DDP, FSDP and users call beside the plain collectives."""
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    own = float(own_rank + 1)
    total = n * (n + 1) / 2

    work = dist.all_reduce(tensor := torch.full((70_001,), own), async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait()[-1].item() == 2 * total
    assert future.wait()[0].data_ptr() == tensor.data_ptr()
    assert work.wait() and work.is_completed()

    works = [
        dist.all_reduce(reduced := torch.full((2,), own), async_op=True),
        dist.broadcast(sent := torch.full((2,), own), n - 1, async_op=True),
        dist.all_gather_into_tensor(whole := torch.zeros(n), torch.tensor([own]), async_op=True),
        dist.barrier(async_op=True),
    ]
    dist.all_reduce(behind := torch.full((9,), own), dist.ReduceOp.MAX)  # keeps its place
    for work in reversed(works):
        work.wait()
    assert reduced.tolist() == [total] * 2
    assert sent.tolist() == [float(n)] * 2
    assert whole.tolist() == [r + 1.0 for r in range(n)]
    assert behind[0].item() == n

    dist.all_reduce(premul := torch.full((1000,), own), dist._make_nccl_premul_sum(0.5))
    assert premul.unique().tolist() == [total / 2]

    tensors = [torch.full((size,), own * size) for size in (1, 3, 50_000)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t[-1].item() for t in tensors] == [total * len(t) for t in tensors]
    outputs = [torch.zeros(n * size) for size in (1, 3)]
    with _coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((len(output) // n,), own))
    for output in outputs:
        assert output.view(n, -1)[:, 0].tolist() == [r + 1.0 for r in range(n)]
    dist.all_reduce_coalesced(pair := [torch.full((1,), own), torch.full((2,), own)])
    assert [t.tolist() for t in pair] == [[total], [total] * 2]

    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": own_rank, "text": "x" * 60_000 * own_rank})
    assert [(one["rank"], len(one["text"])) for one in gathered] == [
        (r, 60_000 * r) for r in range(n)
    ]
    objects = ["from the last", {"a": 1}] if own_rank == n - 1 else [None, None]
    dist.broadcast_object_list(objects, src=n - 1)
    assert objects == ["from the last", {"a": 1}]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(n)] if own_rank == 0 else None)
    assert scattered == [f"for {own_rank}"]
    collected: list[Any] | None = [None] * n if own_rank == 1 else None
    dist.gather_object("x" * own_rank, collected, dst=1)
    assert collected is None or collected == ["x" * r for r in range(n)]

    for places in ([], [0], [3, 1, 3]):
        indices = [[[place + r for place in places]] * 2 for r in range(n)]
        values = torch.full((len(places), 2), 3.0)
        shape = (3 + n, 3 + n, 2)
        sparse = [
            torch.sparse_coo_tensor(torch.tensor(i, dtype=torch.int64), values, shape)
            for i in indices
        ]
        dist.all_reduce(tensor := sparse[own_rank].clone())
        assert torch.equal(tensor.to_dense(), torch.stack([s.to_dense() for s in sparse]).sum(0))


@pytest.mark.parametrize("layout", [TWO_BY_TWO, THREE_UNEVEN, INTERLEAVED], ids=str)
def test_backend_async_coalesced_object_and_sparse_calls(layout: Layout) -> None:
    layout.run(check_backend)


# ---- messages between two ranks


def check_messages(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    # Every pair, both first, within and across hosts.
    for size in (0, 1, 63, 5000, 300_001):
        for shift in range(1, n):
            to, source = (own_rank + shift) % n, (own_rank - shift) % n
            works = [communicator.isend(numbers(own_rank, to, size), to)]
            output = torch.full((size,), -1.0, dtype=torch.float64)
            assert communicator.recv(output, source) == source
            works[0].wait()
            assert_same(output, numbers(source, own_rank, size), f"{size} from {source}")
    # Tags out of order, and the order of those with one tag.
    if own_rank in (0, n - 1):
        peer = n - 1 - own_rank
        works = [dist.isend(numbers(own_rank, tag, 10 + tag), peer, tag=tag) for tag in range(40)]
        works += [dist.isend(torch.tensor([i]), peer, tag=50) for i in range(20)]
        outputs = [torch.zeros(10 + tag, dtype=torch.float64) for tag in range(40)]
        in_turn = [torch.zeros(1, dtype=torch.int64) for _ in range(20)]
        works += [dist.irecv(output, peer, tag=50) for output in in_turn]
        works += [dist.irecv(outputs[tag], peer, tag=tag) for tag in reversed(range(40))]
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        for tag, output in enumerate(outputs):
            assert_same(output, numbers(peer, tag, 10 + tag), f"tag {tag}")
        assert [int(value) for value in in_turn] == list(range(20))
    # Beside collectives, which do not wait for them.
    to, source = (own_rank + 1) % n, (own_rank - 1) % n
    recv = communicator.irecv(output := torch.zeros(7, dtype=torch.float64), source, tag=9)
    communicator.all_reduce(torch.ones(100))
    communicator.send(numbers(own_rank, to, 7), to, tag=9)
    recv.wait()
    assert_same(output, numbers(source, own_rank, 7), "beside a collective")
    # A ring, as pipeline stages and ring attention have, of strided tensors.
    matrix = numbers(own_rank, 0, 20_000).view(100, 200).t()
    for lap in range(1, 4):
        received = torch.zeros(200, 100, dtype=torch.float64)
        operations = [
            dist.P2POp(dist.isend, matrix, to),
            dist.P2POp(dist.irecv, received, source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        expected = numbers((own_rank - lap) % n, 0, 20_000).view(100, 200).t()
        assert torch.equal(received, expected), f"lap {lap}"
        matrix = received
    objects = [{"from": own_rank}]
    if own_rank == 0:
        dist.send_object_list(objects, dst=n - 1)
    elif own_rank == n - 1:
        dist.recv_object_list(objects, src=0)
        assert objects == [{"from": 0}]


@of_every_layout
def test_messages_reach_the_recv_with_their_tag(layout: Layout) -> None:
    layout.run(check_messages)


def send_first(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    for size in (1, 1000, 150_001):
        peer = n - 1 - own_rank
        dist.send(numbers(own_rank, peer, size), peer)
        dist.recv(output := torch.zeros(size, dtype=torch.float64), peer)
        assert_same(output, numbers(peer, own_rank, size), f"{size} of another host")
        peer = own_rank ^ 1
        communicator.send(numbers(own_rank, peer, size), peer)
        communicator.recv(output, peer)
        assert_same(output, numbers(peer, own_rank, size), f"{size} of a neighbour")
    if own_rank == 0:
        communicator.send(torch.ones(1), n - 1, tag=1)
    communicator.barrier()  # a short message needs nobody to receive it
    if own_rank == n - 1:
        communicator.recv(one := torch.zeros(1), 0, tag=1)
        assert one.item() == 1


def test_send_both_ranks_first_does_not_hang() -> None:
    TWO_BY_TWO.run(send_first)


def serve_any(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    num_messages = 10
    if rank.rank != 1:
        for number in range(num_messages):
            dist.send(torch.tensor([rank.rank, number]), 1)
        for number in range(num_messages):
            communicator.send(torch.tensor([rank.rank, number]), 1, tag=3)
    else:
        recvs: list[Callable[[torch.Tensor], int]] = [
            lambda output: dist.recv(output),
            lambda output: communicator.recv(output, tag=3),
        ]
        for recv in recvs:
            counts = [0] * rank.world_size
            for _ in range(num_messages * (rank.world_size - 1)):
                output = torch.zeros(2, dtype=torch.int64)
                source = recv(output)
                assert output.tolist() == [source, counts[source]]
                counts[source] += 1
    communicator.barrier()


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN, INTERLEAVED], ids=str)
def test_recv_from_any_source_takes_messages_of_every_host(layout: Layout) -> None:
    layout.run(serve_any)


# ---- subgroups


def check_subgroups(rank: Rank, layout: Layout) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    # Within a host, one rank of each host, most of them, and all in another order.
    members_of = [*layout.hosts, [host[0] for host in layout.hosts], list(range(1, n))]
    groups = [dist.new_group(members, backend="rota") for members in members_of]
    for members, group in zip(members_of, groups, strict=True):
        if own_rank not in members:
            continue
        place = {layout.host_of[r] for r in members}
        assert len(rota.Communicator(group).hosts) == len(place)
        inputs = random_inputs(n, 10_001, torch.float32)
        dist.all_reduce(tensor := inputs[own_rank].clone(), group=group)
        part = Layout(tuple(layout.host_of[r] for r in members))
        assert_same(tensor, by_hosts([inputs[r] for r in members], part), f"{members}")
        dist.broadcast(tensor := inputs[own_rank].clone(), members[-1], group=group)
        assert_same(tensor, inputs[members[-1]], f"broadcast in {members}")
        if len(members) > 1 and own_rank == members[0]:
            dist.send(inputs[own_rank], members[-1], group=group)
        elif len(members) > 1 and own_rank == members[-1]:
            dist.recv(tensor := torch.zeros(10_001), members[0], group=group)
            assert_same(tensor, inputs[members[0]], f"message in {members}")
    split = default_group().split_group([0, n - 1], group_name="ends")
    assert (split is None) == (own_rank not in (0, n - 1))
    if split is not None:
        work = split._get_backend(torch.device("cpu")).allreduce([tensor := torch.ones(3)])
        work.wait()
        assert tensor[0].item() == 2
    everyone = [dist.new_group(backend="rota") for _ in range(3)]
    tensors = [torch.full((50_000,), float(i + own_rank)) for i in range(3)]
    order = [0, 1, 2] if own_rank % 2 else [2, 1, 0]
    works = [dist.all_reduce(tensors[i], group=everyone[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    assert [t[-1].item() for t in tensors] == [i * n + n * (n - 1) / 2 for i in range(3)]
    dist.destroy_process_group(everyone[1])
    dist.all_reduce(tensor := torch.ones(1))  # the others still work
    dist.all_reduce(tensor, group=everyone[2])
    assert tensor.item() == n * n


@pytest.mark.parametrize("layout", [TWO_BY_TWO, THREE_UNEVEN, INTERLEAVED], ids=str)
def test_subgroups_within_and_across_hosts(layout: Layout) -> None:
    layout.run(check_subgroups)


def init_twice_over_one_store(rank: Rank, layout: Layout) -> None:
    """Like torchrun, whose agent keeps one store for all groups."""
    store = rank.make_store()
    for _ in range(3):
        dist.init_process_group("rota", store=store, rank=rank.rank, world_size=rank.world_size)
        group = dist.new_group(backend="rota")
        dist.all_reduce(tensor := torch.ones(2))
        dist.all_reduce(tensor, group=group)
        assert tensor[0].item() == rank.world_size**2
        dist.destroy_process_group()


def test_group_can_be_made_again_over_the_same_store() -> None:
    TWO_BY_TWO.run(init_twice_over_one_store, timeout_s=20)


# ---- gradient buckets


BUCKET_WIRES = [
    Format(torch.float32, False),
    Format(torch.float16, True),
    Format(torch.bfloat16, False),
    Format(torch.float8_e4m3fn, True),
    Format(torch.float8_e5m2, True),
]


def check_buckets(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    stats = torch.full((2,), -1.0, dtype=torch.float64)
    for wire, size in itertools.product(BUCKET_WIRES, (0, 1, 511, 513, 9001)):
        for dtype in (torch.float32, torch.float16):
            inputs = random_inputs(rank.world_size, size, dtype)
            for i in range(0, size, 907):
                inputs[i % rank.world_size][i] = (math.inf, -math.inf, math.nan)[i % 3]
            options = {
                "contribution_factor": 0.5,
                "divisor": rank.world_size / 2,
                "result_factor": 1 / 1024,
            }
            expected = by_hosts(inputs, layout, "avg", wire, **options)
            bucket = inputs[rank.rank].clone()
            communicator.reduce_bucket(
                bucket,
                stats,
                wire_dtype=wire.dtype,
                block_scaling=wire.block_scaling,
                **options,
            )
            assert_same(bucket, expected, f"{wire} {dtype} {size}")
            num_non_finite, _ = stats_of(expected)
            assert stats[0].item() == num_non_finite
            assert num_non_finite > 0 or size == 0
    for wire in BUCKET_WIRES:
        size = MANY_CHUNKS if wire.dtype == torch.bfloat16 else 10_001
        inputs = random_inputs(rank.world_size, size, torch.float32)
        bucket = inputs[rank.rank].clone()
        communicator.reduce_bucket(
            bucket,
            stats,
            wire_dtype=wire.dtype,
            block_scaling=wire.block_scaling,
            divisor=float(rank.world_size),
        )
        assert_same(bucket, by_hosts(inputs, layout, "avg", wire), f"{wire} {size}")
        norm = torch.linalg.vector_norm(bucket, dtype=torch.float64).item()
        assert stats[0].item() == 0
        # float64 sums in another order; each of the additions rounds once.
        assert math.isclose(math.sqrt(stats[1].item()), norm, rel_tol=1e-12)


@of_every_layout
def test_reduce_bucket_rounds_each_hosts_sum_and_the_result_once(layout: Layout) -> None:
    layout.run(check_buckets)


def compare_bucket_with_flat(rank: Rank, layout: Layout) -> tuple[bytes, bytes]:
    over_hosts, flat = rank.communicator(), flat_communicator(rank)
    results = []
    for size, orders in itertools.product((1001, 300_007), ({"group_size": 2}, {"order": "tree"})):
        own = random_inputs(rank.world_size, size, torch.float32)[rank.rank]
        stats = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
        buckets = [own.clone() for _ in range(2)]
        for communicator, bucket, stat in zip((flat, over_hosts), buckets, stats, strict=True):
            communicator.reduce_bucket(
                bucket,
                stat,
                wire_dtype=torch.float32,
                block_scaling=False,
                contribution_factor=0.3,
                divisor=7.0,
                result_factor=1.1,
                **orders,
            )
        assert_same(buckets[1], buckets[0], f"{size} {orders}")
        assert torch.equal(stats[1], stats[0]), "norms are a fixed tree"
        results.append(stats[1].numpy().tobytes())
    bucket = random_inputs(rank.world_size, 100_003, torch.float32)[rank.rank]
    noisy = [bucket.clone() for _ in range(3)]
    for seed, one in zip((5, 5, 6), noisy, strict=True):
        over_hosts.reduce_bucket(
            one,
            torch.zeros(2, dtype=torch.float64),
            wire_dtype=torch.float16,
            block_scaling=True,
            stochastic_seed=seed,
        )
    assert torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[0], noisy[2])
    return b"".join(results), noisy[0].numpy().tobytes()


def test_reduce_bucket_in_float32_has_the_bits_of_a_flat_run() -> None:
    results = TWO_BY_TWO.run(compare_bucket_with_flat)
    assert all(result == results[0] for result in results), "bits differ between ranks"


def feed_errors_back(rank: Rank, layout: Layout) -> None:
    communicator = rank.communicator()
    size, num_steps = 5000, 48
    inputs = [t * 1e-2 for t in random_inputs(rank.world_size, size, torch.float32)]
    inputs[0][7] = math.inf
    finite = torch.arange(size) != 7
    exact_mean = torch.stack([t.double() for t in inputs]).mean(0)
    for wire in BUCKET_WIRES[1:]:
        format_options: dict[str, Any] = {
            "wire_dtype": wire.dtype,
            "block_scaling": wire.block_scaling,
            "divisor": float(rank.world_size),
        }
        residual = torch.zeros(size)
        total = torch.zeros(size, dtype=torch.float64)
        stats = torch.zeros(2, dtype=torch.float64)
        for step in range(num_steps):
            scale = 2.0 ** (step % 5)  # the loss scale may change from step to step
            bucket = inputs[rank.rank] * scale
            communicator.reduce_bucket(
                bucket, stats, result_factor=1 / scale, residual=residual, **format_options
            )
            total += bucket.double()
            assert stats[0].item() == 1
        assert bool(residual.isfinite().all())
        if layout.host_of[rank.rank] == layout.host_of[0]:  # whose sum is infinite there
            assert residual[7] == 0
        plain = inputs[rank.rank].clone()
        communicator.reduce_bucket(plain, stats, **format_options)
        # The remaining error is the last residual, averaged over all steps, and the rounding of
        # the results, which nothing makes up for.
        drift = (total / num_steps - exact_mean)[finite].abs().mean()
        plain_error = (plain.double() - exact_mean)[finite].abs().mean()
        assert drift < 0.8 * plain_error, wire


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_error_feedback_makes_up_for_what_rounding_lost(layout: Layout) -> None:
    layout.run(feed_errors_back)


def train(rank: Rank, layout: Layout) -> list[bytes]:
    rank.init()
    results = []
    for wire, options in (
        (torch.float32, {}),
        (torch.float16, {"loss_scale": 8.0}),
        (torch.bfloat16, {"gradient_predivide_factor": 2.0}),
        (torch.float8_e4m3fn, {"error_feedback": True}),
        (torch.float8_e5m2, {"stochastic_rounding": True}),
    ):
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SMALL_BUCKETS_MB)
        state = rota.HookState(wire_dtype=wire, model=ddp, **options)
        ddp.register_comm_hook(state, rota.fused_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = ddp(batch_of(rank.rank, step)).square().mean()
            (loss * options.get("loss_scale", 1.0)).backward()
            assert not state.found_inf
            norm = torch.linalg.vector_norm(gradients_of(ddp)).float()
            assert torch.isclose(state.grad_norm(), norm, rtol=1e-6)
            optimizer.step()
        parameters = torch.cat([p.detach().flatten() for p in ddp.parameters()])
        results.append(parameters.numpy().tobytes())
    return results


@pytest.mark.parametrize("layout", [TWO_BY_TWO, THREE_UNEVEN], ids=str)
def test_fused_hook_keeps_parameters_equal_on_all_ranks(layout: Layout) -> None:
    results = layout.run(train)
    assert all(result == results[0] for result in results), "parameters differ between ranks"
    exactly, *rounded = (np.frombuffer(bits, np.float32) for bits in results[0])
    for other in rounded:
        # float8 has 3 or 4 significant bits, and four steps of 0.1 times a gradient below 1.
        assert np.abs(other - exactly).max() < 0.02


# ---- disagreements


class Called(NamedTuple):
    """A collective of ranks 0 to 3, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, list[torch.Tensor]], object]
    sizes: tuple[int, ...] = (8,)  # of its tensors
    dtype: torch.dtype = torch.float32


def _sum(text: str, size: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> Called:
    return Called(f"all_reduce({text}", lambda c, t: c.all_reduce(t[0], **options), (size,), dtype)


def _bucket(**options: Any) -> Called:
    choices = {"wire_dtype": torch.float16, "block_scaling": False, **options}
    stats = torch.zeros(2, dtype=torch.float64)
    return Called("reduce_bucket(", lambda c, t: c.reduce_bucket(t[0], stats, **choices))


SUM = _sum("sum, float32[8]")
MISMATCHES = {
    "op": (SUM, _sum("max, float32[8]", op="max")),
    "dtype": (SUM, _sum("sum, float64[8]", dtype=torch.float64)),
    "dtype-of-same-size": (SUM, _sum("sum, int32[8]", dtype=torch.int32)),
    "num_elems": (SUM, _sum("sum, float32[9]", 9)),
    "no-elems": (SUM, _sum("sum, float32[0]", 0)),
    "many-elems": (
        _sum("sum, float32[700000]", 700_000),
        _sum("sum, float32[700001]", 700_001),
    ),
    "wire": (SUM, _sum("sum, float32[8]", wire_dtype=torch.float16)),
    "order": (SUM, _sum("sum, float32[8]", order="tree")),
    "bucket": (SUM, _bucket()),
    "bucket-divisor": (_bucket(), _bucket(divisor=3.0)),
    "bucket-scaling": (_bucket(), _bucket(block_scaling=True)),
    "root": (
        Called("broadcast(float32[8], root 0)", lambda c, t: c.broadcast(t[0], 0)),
        Called("broadcast(float32[8], root 3)", lambda c, t: c.broadcast(t[0], 3)),
    ),
    "reduce-or-all_reduce": (SUM, Called("reduce(", lambda c, t: c.reduce(t[0], 1))),
    "barrier": (SUM, Called("barrier()", lambda c, t: c.barrier(), ())),
    "gather-length": (
        Called("all_gather(float32[8])", lambda c, t: c.all_gather(*t), (32, 8)),
        Called("all_gather(float32[9])", lambda c, t: c.all_gather(*t), (36, 9)),
    ),
    "scatter-length": (
        Called("reduce_scatter(", lambda c, t: c.reduce_scatter(*t), (8, 32)),
        Called("reduce_scatter(", lambda c, t: c.reduce_scatter(*t), (9, 36)),
    ),
    "exchange": (
        Called("all_to_all(", lambda c, t: c.all_to_all(*t), (16, 16)),
        Called("all_gather(float32[4])", lambda c, t: c.all_gather(*t), (16, 4)),
    ),
}
# Who calls the second of a pair: a whole host, one rank, one rank of each host.
ODD_RANKS = {"host": [2, 3], "rank": [3], "first": [0], "each-host": [1, 3]}


def call_differently(rank: Rank, layout: Layout, odd_ranks: list[int]) -> dict[str, Any]:
    communicator = rank.communicator()
    seen = {}
    for name, calls in MISMATCHES.items():
        call = calls[rank.rank in odd_ranks]
        for _ in range(2):
            tensors = [torch.full((size,), rank.rank + 1, dtype=call.dtype) for size in call.sizes]
            error = error_of(functools.partial(call.run, communicator, tensors))
            untouched = all(bool((tensor == rank.rank + 1).all()) for tensor in tensors)
            communicator.all_reduce(total := torch.full((9000,), float(rank.rank)))
            seen[name] = (*error, untouched, total[-1].item())
    return seen


@pytest.mark.parametrize("odd", ODD_RANKS)
def test_mismatch_raises_on_every_rank_and_the_group_goes_on(odd: str) -> None:
    results = TWO_BY_TWO.run(call_differently, ODD_RANKS[odd])
    wrong = []
    for name, (usual, other) in MISMATCHES.items():
        for rank, result in enumerate(results):
            error, text, untouched, total = result[name]
            is_told = error == "Mismatch" and usual.text in text and other.text in text
            if not (is_told and untouched and total == 6.0):
                wrong.append(f"{name}, rank {rank}: {error} {text} {untouched} {total}")
    assert not wrong, "\n".join(wrong)


def test_mismatch_names_hosts_and_ranks() -> None:
    for result in TWO_BY_TWO.run(call_differently, [2, 3]):
        text = result["op"][1]
        assert "rota." in text and "disagree" in text and "nothing was written" in text
        assert "host 0 (ranks 0 1)" in text and "host 1 (ranks 2 3)" in text
    for result in TWO_BY_TWO.run(call_differently, [3]):
        text = result["op"][1]
        assert "rank 2 called all_reduce(sum" in text and "rank 3 called all_reduce(max" in text


def mismatch_on_backend(rank: Rank, layout: Layout) -> list[tuple[str, str]]:
    rank.init()
    is_odd = layout.host_of[rank.rank] == 1
    tensor = torch.ones(9 if is_odd else 8)
    errors = [error_of(lambda: dist.all_reduce(tensor))]
    work = dist.all_reduce(tensor, async_op=True)
    errors.append(error_of(work.wait))
    errors.append(error_of(work.get_future().wait))
    outputs = [torch.zeros(3 + (is_odd and i == 0)) for i in range(rank.world_size)]
    errors.append(error_of(lambda: dist.all_gather(outputs, outputs[rank.rank].clone())))
    tensors = [torch.ones(4), torch.ones(5 + is_odd), torch.ones(6)]
    errors.append(error_of(lambda: dist.all_reduce_coalesced(tensors)))
    sparse = torch.eye(3 + is_odd).to_sparse()
    errors.append(error_of(lambda: dist.all_reduce(sparse)))
    dist.all_reduce(good := torch.ones(3))
    assert good.tolist() == [float(rank.world_size)] * 3
    assert [float(t[0]) for t in tensors] == [float(rank.world_size), 1.0, 1.0]
    return errors


def test_backend_mismatch_raises_from_call_wait_and_future() -> None:
    for errors in TWO_BY_TWO.run(mismatch_on_backend):
        for error, text in errors:
            assert error == "Mismatch", text


def disagree_on_messages(rank: Rank, layout: Layout) -> list[tuple[str, str]]:
    communicator = rank.communicator()
    n = rank.world_size
    errors = []
    if rank.rank == 0:
        for _ in range(4):
            communicator.send(torch.ones(10), n - 1, tag=4)
        communicator.send(torch.ones(0), n - 1, tag=4)
        communicator.send(torch.ones(300_000), n - 1, tag=4)
        communicator.send(torch.full((2,), 5.0), n - 1, tag=4)
    elif rank.rank == n - 1:
        for output in (
            torch.full((11,), 7.0),
            torch.full((10,), 7.0, dtype=torch.float64),
            torch.full((10,), 7, dtype=torch.int32),
            torch.full((0,), 7.0),
            torch.full((3,), 7.0),
            torch.full((300_001,), 7.0),
        ):
            errors.append(error_of(lambda output=output: communicator.recv(output, 0, tag=4)))
            assert (output == 7).all()
        communicator.recv(output := torch.zeros(2), 0, tag=4)
        assert output.tolist() == [5.0, 5.0]
    communicator.all_reduce(ones := torch.ones(5))
    assert ones[0].item() == n
    return errors


@pytest.mark.parametrize("layout", [TWO_BY_TWO, ONE_BY_ONE], ids=str)
def test_recv_of_another_length_or_dtype_names_both_sides(layout: Layout) -> None:
    errors = layout.run(disagree_on_messages)[-1]
    sent = ["float32[10]"] * 4 + ["float32[0]", "float32[300000]"]
    expected = ["float32[11]", "float64[10]", "int32[10]", "float32[0]", "float32[3]"]
    expected.append("float32[300001]")
    assert len(errors) == len(sent)
    last = layout.world_size - 1
    for (error, text), theirs, own in zip(errors, sent, expected, strict=True):
        assert error == "Mismatch", text
        assert theirs in text and own in text and "rank 0" in text and f"rank {last}" in text


def split_differently(
    rank: Rank, layout: Layout, sender: int, receiver: int
) -> tuple[str, str, bool, tuple[str, str], float]:
    """`receiver` expects one element more of `sender` than are sent."""
    communicator = rank.communicator(timeout_s=5)
    sent, received = [20_000] * rank.world_size, [20_000] * rank.world_size
    if rank.rank == receiver:
        received[sender] += 1
    output = torch.full((sum(received),), 7.0)
    error = error_of(
        lambda: communicator.all_to_all(
            output, torch.ones(sum(sent)), output_splits=received, input_splits=sent
        )
    )
    total = torch.ones(5)
    later = error_of(lambda: communicator.all_reduce(total))
    return *error, bool((output == 7).all()), later, total[0].item()


@pytest.mark.parametrize(("sender", "receiver"), [(0, 3), (3, 0), (1, 2), (0, 1), (3, 2)])
def test_all_to_all_of_unequal_splits_is_a_mismatch_on_every_rank(
    sender: int, receiver: int
) -> None:
    results = TWO_BY_TWO.run(split_differently, sender, receiver)
    for error, text, untouched, _, _ in results:
        assert error == "Mismatch", text
        assert f"rank {sender}" in text and f"rank {receiver}" in text
        assert untouched
    for _, _, _, later, total in results:
        assert (later[0], total) == ("nothing", 4.0), later[1]


# ---- simulated hosts


SOME_HOSTS = [(2, 2), (1, 1), (1, 2, 1)]


def use_simulated_hosts(rank: Rank, num_ranks_per_host: tuple[int, ...]) -> None:
    host_of = [host for host, num in enumerate(num_ranks_per_host) for _ in range(num)]
    layout = Layout(tuple(host_of))
    rank.init()
    communicator = rank.communicator()
    assert communicator.hosts == layout.hosts
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone())
    assert_same(tensor, by_hosts(inputs, layout), "all_reduce")
    dist.broadcast(tensor := inputs[rank.rank].clone(), rank.world_size - 1)
    assert_same(tensor, inputs[-1], "broadcast")
    to, source = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    work = dist.isend(inputs[rank.rank], to)
    dist.recv(tensor, source)
    work.wait()
    assert_same(tensor, inputs[source], "message")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks_per_host", SOME_HOSTS, ids=str)
def test_simulated_hosts_give_the_same_results(num_ranks_per_host: tuple[int, ...]) -> None:
    with Hosts(num_ranks_per_host) as hosts:
        hosts.run(use_simulated_hosts, num_ranks_per_host)


NUM_ELEMS = 3 << 20  # of float32, a multiple of every number of ranks here
NUM_BYTES = 4 * NUM_ELEMS
# Headers of TCP and signs of life; a frame's would be 4.5 % without the long packets of veth.
OVERHEAD = 1.08
CONSTANT_BYTES = 100_000


def count_bytes(rank: Rank) -> dict[str, Traffic]:
    """What each collective sends and receives on this rank's host."""
    rank.init()
    communicator = rank.communicator()
    flat = dist.new_group(backend="gloo")
    n = rank.world_size
    part, whole = torch.ones(NUM_ELEMS // n), torch.ones(NUM_ELEMS)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: communicator.all_reduce(whole),
        "all_reduce in 16 bits": lambda: communicator.all_reduce(whole, wire_dtype=torch.float16),
        "reduce_scatter": lambda: communicator.reduce_scatter(part, whole),
        "all_gather": lambda: communicator.all_gather(whole, part),
        "broadcast": lambda: communicator.broadcast(whole),
        "flat all_reduce": lambda: dist.all_reduce(whole, group=flat),
        "flat all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=flat),
    }
    counts = {}
    for name, call in calls.items():
        call()  # connects
        communicator.barrier()
        before = Traffic.now()
        communicator.barrier()
        call()
        communicator.barrier()
        after = Traffic.now()
        communicator.barrier()  # nobody begins with the next one
        counts[name] = Traffic(after.sent - before.sent, after.received - before.received)
    dist.barrier()
    dist.destroy_process_group()
    return counts


@pytest.mark.parametrize("num_ranks_per_host", [(2, 2), (2, 2, 2)], ids=str)
def test_bytes_between_hosts_are_those_of_hierarchical_algorithms(
    num_ranks_per_host: tuple[int, ...],
) -> None:
    with Hosts(num_ranks_per_host) as hosts:
        results = hosts.run(count_bytes)
        firsts = [results[hosts.ranks_of(host)[0]] for host in range(len(num_ranks_per_host))]
    num_hosts = len(num_ranks_per_host)
    rest = (num_hosts - 1) / num_hosts  # of the tensor belongs to other hosts
    fewest = {
        "all_reduce": 2 * rest * NUM_BYTES,
        "all_reduce in 16 bits": rest * NUM_BYTES,
        "reduce_scatter": rest * NUM_BYTES,
        "all_gather": rest * NUM_BYTES,
        "broadcast": NUM_BYTES,
    }
    for name, num_bytes in fewest.items():
        most = OVERHEAD * num_bytes + CONSTANT_BYTES
        for host, counts in enumerate(firsts):
            assert counts[name].sent < most, f"{name} of host {host}"
            assert counts[name].received < most, f"{name} of host {host}"
        total = sum(counts[name].sent for counts in firsts)
        # What is counted is what was sent: the test would notice if it saw nothing.
        assert total > (num_hosts - 1 if name == "broadcast" else num_hosts) * num_bytes
    assert sum(counts["broadcast"].sent for counts in firsts) < (
        OVERHEAD * (num_hosts - 1) * NUM_BYTES + num_hosts * CONSTANT_BYTES
    )
    # Flat ones break these limits.
    for name in ("all_reduce", "all_gather"):
        flat = max(counts[f"flat {name}"].sent for counts in firsts)
        assert flat > OVERHEAD * fewest[name] + CONSTANT_BYTES, f"flat {name}"


def test_results_are_the_same_bits_on_every_rank() -> None:
    """Of everything that rounds, whatever the rank."""
    results = THREE_BY_TWO.run(results_of_rounding)
    assert all(result == results[0] for result in results)


def results_of_rounding(rank: Rank, layout: Layout) -> list[bytes]:
    communicator = rank.communicator()
    results = []
    for dtype, wire in itertools.product(
        (torch.float32, torch.bfloat16), (None, torch.float16, torch.bfloat16)
    ):
        tensor = random_inputs(rank.world_size, 50_001, dtype)[rank.rank].clone()
        communicator.all_reduce(tensor, "avg", wire_dtype=wire)
        results.append(bits_of(tensor).numpy().tobytes())
    return results


def ask_doctor(rank: Rank, layout: Layout) -> str:
    rank.init("gloo")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert doctor_hosts.run() == 0
    return output.getvalue()


def test_doctor_prints_the_hosts_and_their_levels() -> None:
    text, *others = UNEVEN.run(ask_doctor)
    assert not any(others)
    for fact in (
        "hosts: 2, ranks: 4, rails between hosts: 1",
        "host 0 (host0): ranks 0 1 2",
        "host 1 (host1): ranks 3",
        "within host 0: all_reduce of 8 bytes",
        "within host 1: one rank",
        "host 0 to host 1: a message of 8 bytes",
    ):
        assert fact in text, text
