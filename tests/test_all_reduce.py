"""All-reduce against a float64 or integer oracle, with inputs whose results need no tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranks import Rank, on_ranks, run_ranks


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
