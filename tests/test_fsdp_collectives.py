"""rota.fsdp's all-gather and reduce-scatter without a model: their bits and their buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
import rota.fsdp
from bucket_oracle import Format, reduce_bucket, through_wire
from check_groups import CheckGroup, check_groups, in_group
from heap import heap_bytes, heap_range
from oracle import (
    assert_same,
    contract,
    name_of,
    random_inputs,
    random_patterns,
    round_to,
    to_numpy,
)
from ranks import Rank, on_ranks
from several_hosts import default_group


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, CheckGroup]]:
    with check_groups(2, 3) as made:
        yield made


def in_memory(values: torch.Tensor, comm: Any, in_heap: bool) -> torch.Tensor:
    if not in_heap:
        return values.clone()
    return comm.allocate(values.shape, dtype=values.dtype, device=values.device).copy_(values)


# A mailbox is 64 KiB and a slot is 256 KiB: one message, several rounds, and an odd end.
PART_ELEMS = (0, 1, 63, 513, 150_001)


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=name_of,
)
@in_group(3)
def test_reduce_scatter_rounds_contributions_and_sum_once(
    rank: Rank, dtype: torch.dtype, wire: torch.dtype
) -> None:
    comm = rota.fsdp.ReduceScatter(wire)
    for elems, in_heap in itertools.product(PART_ELEMS, (True, False)):
        inputs = random_patterns(rank.world_size, elems * rank.world_size, dtype)
        for op, divisor in ((dist.ReduceOp.AVG, rank.world_size), (dist.ReduceOp.SUM, 1)):
            expected = reduce_bucket(list(inputs), Format(wire, False), divisor=divisor)
            output = torch.zeros(elems, dtype=dtype)
            whole = in_memory(inputs[rank.rank], comm, in_heap)
            work = comm(output, whole, default_group(), op, async_op=in_heap)
            assert (work is not None) == in_heap
            if work is not None:
                work.wait()
            part = expected[rank.rank * elems : (rank.rank + 1) * elems]
            assert_same(output, part, f"{op} of {elems}, in_heap={in_heap}")
            assert_same(whole, inputs[rank.rank], "the input is left as it is")


@on_ranks(4)
def test_reduce_scatter_adds_in_the_order_of_the_backend(rank: Rank) -> None:
    rank.init(pg_options=rota.BackendOptions(order="tree", num_shards=8))
    inputs = random_inputs(rank.world_size, 5001 * rank.world_size, torch.float32)
    for wire in (None, torch.float32, torch.bfloat16):
        comm = rota.fsdp.ReduceScatter(wire)
        expected = contract(inputs, "avg", wire, order="tree")
        if wire != torch.bfloat16:  # sums of so few 8-bit fractions are exact
            assert not torch.equal(expected, contract(inputs, "avg", wire))
        comm(part := torch.empty(5001), inputs[rank.rank], default_group(), dist.ReduceOp.AVG)
        assert_same(part, expected.chunk(rank.world_size)[rank.rank], f"wire {wire}")


@in_group(2)
def test_reduce_scatter_of_inputs_that_peers_cannot_read_in_place(rank: Rank) -> None:
    """The output lies where peers would read: in place they would see it half written."""
    elems = 100_000
    comm = rota.fsdp.ReduceScatter()
    inputs = [torch.full((2 * elems,), float(i + 1)) for i in range(2)]
    whole = in_memory(inputs[rank.rank], comm, in_heap=True)
    comm(whole[:elems], whole, default_group(), dist.ReduceOp.SUM)
    assert torch.equal(whole[:elems], torch.full((elems,), 3.0))
    own = in_memory(inputs[rank.rank], comm, in_heap=True)
    part = own[rank.rank * elems :][:elems]
    comm(part, own, default_group(), dist.ReduceOp.SUM)
    assert torch.equal(part, torch.full((elems,), 3.0))
    # Lists of parts that are no one tensor, some of them in the heap.
    parts = [in_memory(inputs[rank.rank][:elems], comm, in_heap=i == 0) for i in range(2)]
    output = torch.zeros(elems)
    dist.reduce_scatter(output, parts)
    assert torch.equal(output, torch.full((elems,), 3.0))


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=name_of,
)
@in_group(3)
def test_all_gather_gives_all_ranks_the_values_of_the_wire(
    rank: Rank, dtype: torch.dtype, wire: torch.dtype
) -> None:
    comm = rota.fsdp.AllGather(wire)
    form = Format(wire, wire.itemsize == 1)
    for elems, is_async in itertools.product(PART_ELEMS, (True, False)):
        inputs = random_patterns(rank.world_size, elems, dtype)
        parts = [
            round_to(through_wire(round_to(to_numpy(part), torch.float32), form), dtype)
            for part in inputs
        ]
        expected = torch.cat([torch.from_numpy(part).to(dtype) for part in parts])
        output = comm.allocate((rank.world_size * elems,), dtype=dtype, device=torch.device("cpu"))
        own = output.narrow(0, rank.rank * elems, elems)
        own.copy_(inputs[rank.rank])
        work = comm(output, own, default_group(), async_op=is_async)
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
        assert_same(output, expected, f"{elems}, async={is_async}")


@in_group(2)
def test_ranks_with_different_wires_are_a_mismatch(rank: Rank) -> None:
    wires = (torch.bfloat16, torch.float16)
    tensor = torch.ones(20)
    with pytest.raises(rota.Mismatch, match=r"wire bfloat16.*wire float16"):
        rota.fsdp.AllGather(wires[rank.rank])(tensor, torch.zeros(10), default_group())
    with pytest.raises(rota.Mismatch, match=r"wire bfloat16.*wire float16"):
        rota.fsdp.ReduceScatter(wires[rank.rank])(
            torch.zeros(10), tensor, default_group(), dist.ReduceOp.SUM
        )
    assert torch.equal(tensor, torch.ones(20))


def test_buffers_are_read_in_place_and_used_again() -> None:
    comm = rota.fsdp.AllGather()
    cpu = torch.device("cpu")
    first = comm.allocate((1000, 3), dtype=torch.float32, device=cpu)
    assert first.shape == (1000, 3) and first.is_contiguous()
    assert first.data_ptr() in heap_range()
    view = first.fill_(7)[10:]
    address = first.data_ptr()
    del first
    second = comm.allocate((3000,), dtype=torch.float32, device=cpu)
    assert second.data_ptr() != address  # the view still uses it
    del view
    third = comm.allocate((6000,), dtype=torch.bfloat16, device=cpu)
    assert third.data_ptr() == address and third.dtype == torch.bfloat16
    assert third.count_nonzero() > 0  # new memory would be zeroes
    assert comm.allocate((0,), dtype=torch.float32, device=cpu).shape == (0,)
    before = heap_bytes()
    del comm, second, third
    assert before - heap_bytes() >= 24000
