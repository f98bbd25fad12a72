"""The classic ring: its order of additions is not the canonical one, but depends only on the
numbers of elements and ranks.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from oracle import FLOAT_DTYPES, assert_same, bits_of, contract, ops_of, random_inputs
from ranks import Rank, on_ranks
from rota import _C

pytestmark = pytest.mark.same_in_every_build

SLOT_BYTES = 4096
GRANULE_ELEMS = 64  # shards start at multiples of it


def expected_ring(
    inputs: list[torch.Tensor],
    op: str,
    wire_dtype: torch.dtype | None,
    hop_dtype: torch.dtype,
) -> torch.Tensor:
    """The sum of shard p starts at rank p and adds the other ranks in ring order."""
    world_size = len(inputs)
    rotations = [contract(inputs, op, wire_dtype, hop_dtype, first) for first in range(world_size)]
    result = torch.empty_like(inputs[0])
    for first, rotation in enumerate(rotations):
        shard = _C.schedule.even_shard(len(result), world_size, first, GRANULE_ELEMS)
        end = shard.begin + shard.num_elems
        result[shard.begin : end] = rotation[shard.begin : end]
    return result


@pytest.mark.parametrize(
    ("world_size", "dtype", "wire_dtype", "hop_dtype"),
    [
        *((size, dtype, None, None) for size in (2, 3, 5) for dtype in FLOAT_DTYPES),
        (3, torch.float32, torch.float16, None),
        (3, torch.float32, torch.float16, torch.float32),
        (3, torch.float32, torch.float16, torch.float16),
        (3, torch.float64, torch.bfloat16, torch.bfloat16),
        (3, torch.bfloat16, None, torch.bfloat16),
        (3, torch.float16, None, torch.float16),
    ],
)
@on_ranks()
def test_ring_starts_each_shard_at_its_own_rank_and_rounds_where_it_is_told(
    rank: Rank, dtype: torch.dtype, wire_dtype: torch.dtype | None, hop_dtype: torch.dtype | None
) -> None:
    few_rounds, many_rounds = (rank.communicator(slot_bytes=size) for size in (1 << 20, SLOT_BYTES))
    wire = wire_dtype or dtype
    hop = hop_dtype or (torch.float32 if wire.itemsize == 2 else wire)
    slot = SLOT_BYTES // hop.itemsize
    digest = hashlib.sha256()
    for size in (1, 127, slot + 1, 3 * rank.world_size * slot + 37):
        inputs = random_inputs(rank.world_size, size, dtype)
        for op in ops_of(dtype):
            tensor, again = inputs[rank.rank].clone(), inputs[rank.rank].clone()
            many_rounds.all_reduce(tensor, op, "ring", wire_dtype, hop_dtype)
            few_rounds.all_reduce(again, op, "ring", wire_dtype, hop_dtype)
            assert_same(again, tensor, f"{op} size {size}, the rounds")
            expected = expected_ring(inputs, op, wire_dtype, hop)
            assert_same(tensor, expected, f"{op} size {size}")
            digest.update(bits_of(tensor).numpy().tobytes())
    dist.all_gather_object(digests := [""] * rank.world_size, digest.hexdigest())
    assert len(set(digests)) == 1, "ranks got different bits"


def test_ring_order_can_be_told_from_the_canonical_one() -> None:
    inputs = random_inputs(3, 5000, torch.float32)
    assert not torch.equal(
        expected_ring(inputs, "sum", None, torch.float32), contract(inputs, "sum")
    )
