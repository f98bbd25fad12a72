"""The fused all-reduce of a gradient bucket, against the numpy oracle, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import FORMATS, Format, error_bound
from oracle import CANONICAL_ALGORITHMS, assert_same, to_numpy
from ranks import Rank, on_ranks

pytestmark = pytest.mark.same_in_every_build

SMALL_SLOT = 4096  # several rounds with only thousands of elements


def gradients(num_ranks: int, num_elems: int) -> list[torch.Tensor]:
    """Blocks of narrow and of wide range, zeros, denormals, and some Inf and NaN."""
    generator = torch.Generator().manual_seed(num_elems)
    buckets = []
    for rank in range(num_ranks):
        values = torch.randn(num_elems, generator=generator, dtype=torch.float64) * 1e-3
        wild = torch.rand(num_elems, generator=generator, dtype=torch.float64) * 60 - 30
        place = torch.arange(num_elems) // 100 % 7
        values = torch.where(place == 1, values * 10**wild, values)
        values = torch.where(place == 2, values * 1e-38, values)
        values = torch.where(place == 3, torch.zeros(()), values)
        values = torch.where(place == 4, values * 1e30, values)
        values[rank + 5 :: 907] = math.inf
        values[2 * rank + 300 :: 911] = -math.inf
        values[rank + 417 :: 1301] = math.nan
        buckets.append(values.float())
    return buckets


def reduce_once(
    comm: rota.Communicator, bucket: torch.Tensor, wire: Format, **options: Any
) -> tuple[torch.Tensor, list[float]]:
    result, stats = bucket.clone(), torch.full((2,), -1.0, dtype=torch.float64)
    comm.reduce_bucket(
        result, stats, wire_dtype=wire.dtype, block_scaling=wire.block_scaling, **options
    )
    return result, stats.tolist()


@on_ranks(3)
def test_reduce_bucket_norm_and_random_bits_depend_on_no_algorithm_or_slot(rank: Rank) -> None:
    bucket = torch.randn(100_003, generator=torch.Generator().manual_seed(rank.rank))
    results = []
    for slot_bytes in (SMALL_SLOT, 64 << 10, None):
        comm = rank.communicator(slot_bytes=slot_bytes)
        for algorithm in CANONICAL_ALGORITHMS:
            result, stats = reduce_once(
                comm,
                bucket,
                Format(torch.float16, True),
                algorithm=algorithm,
                divisor=3.0,
                stochastic_seed=99,
            )
            results.append((result.numpy().tobytes(), stats[1]))
    dist.all_gather_object(of_ranks := [None] * rank.world_size, results[0])
    assert all(result == of_ranks[0] for result in (*results, *of_ranks))


@pytest.mark.parametrize("wire", [wire for wire in FORMATS if not wire.block_scaling], ids=str)
@on_ranks(3)
def test_reduce_bucket_without_block_scaling_depends_on_no_bucket_layout(
    rank: Rank, wire: Format
) -> None:
    comm = rank.communicator()
    gradient = gradients(rank.world_size, 20_000)[rank.rank]
    whole, _ = reduce_once(comm, gradient, wire, divisor=3.0)
    for lengths in ((1, 19_999), (77, 4096, 15_827), (10_000, 10_000)):
        parts = [reduce_once(comm, part, wire, divisor=3.0)[0] for part in gradient.split(lengths)]
        assert_same(torch.cat(parts), whole, str(lengths))


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8, 16], ids="ws{}".format)
@on_ranks()
def test_reduce_bucket_error_is_within_bound(rank: Rank, wire: Format) -> None:
    comm = rank.communicator()
    generator = torch.Generator().manual_seed(5)
    shape = (rank.world_size, 20_000)
    wild = torch.rand(shape, generator=generator, dtype=torch.float64) * 24 - 12
    wild = (10**wild * torch.randn(shape, generator=generator, dtype=torch.float64)).float()
    calm = torch.randn(shape, generator=generator)
    tiny = torch.randn(shape, generator=generator) * 1e-41
    for name, buckets in {"wild": wild, "calm": calm, "tiny": tiny}.items():
        if not wire.block_scaling and name != "calm":
            continue  # beyond the format's range; needs block scaling
        inputs = list(buckets)
        got, _ = reduce_once(comm, inputs[rank.rank], wire, divisor=float(rank.world_size))
        exact, bound = error_bound(inputs, wire)
        errors = np.abs(to_numpy(got) - exact)
        assert (errors <= bound).all(), (name, (errors / bound).max())


@pytest.mark.parametrize("wire", [wire for wire in FORMATS if wire.dtype != torch.float32], ids=str)
@on_ranks(2, timeout_s=120)
def test_stochastic_rounding_is_unbiased_and_repeatable(rank: Rank, wire: Format) -> None:
    comm = rank.communicator()
    # One 1 in every block fixes the scale; all other values lie between two representable ones.
    values = torch.linspace(0.1, 0.9, 3200)
    values[::32] = 1.0
    mean = torch.zeros(values.numel(), dtype=torch.float64)
    results = set()
    num_draws = 400
    for seed in range(num_draws):
        got, _ = reduce_once(comm, values, wire, divisor=2.0, stochastic_seed=seed)
        again, _ = reduce_once(comm, values, wire, divisor=2.0, stochastic_seed=seed)
        assert torch.equal(got, again)
        results.add(got.numpy().tobytes())
        mean += got.double() / num_draws
    assert len(results) == num_draws
    nearest, _ = reduce_once(comm, values, wire, divisor=2.0)
    # Three independent, unbiased roundings, each within one unit, so the mean of many is close.
    error = (mean - values.double()).mean().abs()
    bias = (nearest.double() - values.double()).abs().mean()
    assert error < bias / 20, (error, bias)
    assert ((mean - values.double()).abs() < bias).double().mean() > 0.99
