"""All-reduce against a float64 or integer oracle, with inputs whose results need no tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle import ALGORITHMS, DTYPES, assert_same, exact, exact_inputs, name_of, ops_of
from ranks import Rank, on_ranks, run_ranks

MAILBOX_BYTES = 64 << 10  # longer messages go through slots
SMALL_SLOT_BYTES = 4096  # the smallest allowed: many rounds with few bytes
CANARY_ELEMS = 64
CANARY = 1

# Larger groups outnumber the cores of most machines; they get fewer calls.
LARGE_WORLDS = [
    *((world_size, torch.float32) for world_size in range(5, 17)),
    *((world_size, dtype) for world_size in (5, 8, 16) for dtype in (torch.float16, torch.int64)),
]


def interesting_sizes(world_size: int, dtype: torch.dtype) -> list[int]:
    """Sizes around every threshold: world size, slot, several slots, mailbox."""
    slot = SMALL_SLOT_BYTES // dtype.itemsize
    mailbox = MAILBOX_BYTES // dtype.itemsize
    around = [world_size, slot, 2 * slot, world_size * slot, mailbox]
    sizes = {0, 1, 5 * slot + 37, 2 * mailbox + 13}
    return sorted(sizes.union(size + step for size in around for step in (-1, 0, 1)))


class Reducer:
    """All-reduces the same inputs, cut to any size, and compares the results."""

    def __init__(self, rank: Rank, dtype: torch.dtype, slot_bytes: int = SMALL_SLOT_BYTES) -> None:
        self._rank = rank
        self._dtype = dtype
        self._communicator = rank.communicator(slot_bytes=slot_bytes)

    def check(self, op: str, algorithm: str, sizes: list[int], offsets: range = range(1)) -> None:
        """Reduces tensors of these sizes that start `offset` elements into their storage."""
        inputs = exact_inputs(self._rank.world_size, max(sizes), self._dtype, op)
        expected = exact(inputs, op)
        own = inputs[self._rank.rank]
        for size in sizes:
            for offset in offsets:
                case = f"{op} {algorithm} size {size} offset {offset}"
                storage = torch.full((offset + size + CANARY_ELEMS,), CANARY, dtype=self._dtype)
                tensor = storage[offset : offset + size].copy_(own[:size])
                self._communicator.all_reduce(tensor, op, algorithm)
                assert_same(tensor, expected[:size], case)
                outside = (
                    storage[:offset].ne(CANARY).any() or storage[-CANARY_ELEMS:].ne(CANARY).any()
                )
                if outside:
                    raise AssertionError(f"{case}: memory around the tensor was written")


def check_every_size(rank: Rank, dtype: torch.dtype, ops: tuple[str, ...]) -> None:
    reducer = Reducer(rank, dtype)
    sizes = interesting_sizes(rank.world_size, dtype)
    for op in ops:
        for algorithm in ALGORITHMS:
            reducer.check(op, algorithm, sizes)


@pytest.mark.same_in_every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ws{}".format)
def test_all_reduce_every_size_op_and_algorithm_equals_oracle(
    world_size: int, dtype: torch.dtype
) -> None:
    run_ranks(world_size, check_every_size, dtype, ops_of(dtype))


@pytest.mark.same_in_every_build
@pytest.mark.parametrize(
    ("world_size", "dtype"), LARGE_WORLDS, ids=[f"ws{w}-{name_of(d)}" for w, d in LARGE_WORLDS]
)
@on_ranks()
def test_all_reduce_large_world_equals_oracle(rank: Rank, dtype: torch.dtype) -> None:
    reducer = Reducer(rank, dtype)
    slot = SMALL_SLOT_BYTES // dtype.itemsize
    sizes = [rank.world_size - 1, rank.world_size + 1, 3 * slot + 37]
    for algorithm in ALGORITHMS:
        reducer.check(ops_of(dtype)[-1], algorithm, sizes)
        reducer.check("sum", algorithm, sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@on_ranks(2)
def test_all_reduce_any_storage_offset_equals_oracle(rank: Rank, dtype: torch.dtype) -> None:
    reducer = Reducer(rank, dtype)
    offsets = range(64 // dtype.itemsize)
    sizes = [3, 200, SMALL_SLOT_BYTES // dtype.itemsize + 1]
    for algorithm in ALGORITHMS:
        reducer.check("sum", algorithm, sizes, offsets)


@pytest.mark.same_in_every_build
@pytest.mark.parametrize("world_size", [2, 3], ids="ws{}".format)
@on_ranks()
def test_all_reduce_many_slots_equals_oracle(rank: Rank) -> None:
    slot_bytes = 256 << 10
    reducer = Reducer(rank, torch.float32, slot_bytes)
    slot = slot_bytes // 4
    for algorithm in ALGORITHMS:
        reducer.check("avg", algorithm, [slot - 1, slot + 1, 20 * slot + 1025])


def reduce_huge(rank: Rank, num_elems: int) -> int:
    communicator = rank.communicator()
    # A prime period shares no factor with slots or shards, so a shifted block is detected.
    period = torch.arange(251, dtype=torch.uint8)
    tensor = period.repeat(num_elems // 251 + 1)[:num_elems]
    tensor.add_(rank.rank)
    communicator.all_reduce(tensor, "max")
    expected = (period + 1).repeat(1 << 14)
    blocks = tensor.split(len(expected))
    return sum(not torch.equal(block, expected[: len(block)]) for block in blocks)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.same_in_every_build
@pytest.mark.skipif(available_bytes() < 16 << 30, reason="needs 16 GiB of free memory")
def test_all_reduce_more_than_2_31_elements_equals_oracle() -> None:
    assert run_ranks(2, reduce_huge, 2**31 + 1025) == [0, 0]


@on_ranks(2)
def test_all_reduce_leaf_that_requires_grad_is_reduced_in_place(rank: Rank) -> None:
    communicator = rank.communicator()
    tensor = torch.full((3, 5, 7), float(rank.rank + 1), requires_grad=True)
    communicator.all_reduce(tensor, "sum")
    assert bool((tensor == 3).all()) and tensor.shape == (3, 5, 7)
