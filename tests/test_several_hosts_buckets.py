"""Gradient buckets over several hosts."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from bucket_oracle import BLOCKS, Format, stats_of
from oracle import assert_same, random_inputs
from ranks import Rank
from several_hosts import (
    MANY_CHUNKS,
    PAIR,
    TWO_BY_TWO,
    UNEVEN,
    by_hosts,
    flat_communicator,
    of_every_layout,
    of_layouts,
    on_layout,
)
from test_reduce_bucket import reduce_once

NARROW_WIRES = [Format(torch.bfloat16, False), *(Format(dtype, True) for dtype in BLOCKS)]
BUCKET_WIRES = [Format(torch.float32, False), *NARROW_WIRES]


@of_every_layout
@on_layout()
def test_reduce_bucket_rounds_each_hosts_sum_and_the_result_once(rank: Rank) -> None:
    communicator = rank.communicator()
    options = {
        "contribution_factor": 0.5,
        "divisor": rank.world_size / 2,
        "result_factor": 1 / 1024,
    }
    dtypes, sizes = (torch.float32, torch.float16), (0, 1, 511, 513, 9001)
    cases = [(*case, True) for case in itertools.product(BUCKET_WIRES, dtypes, sizes)]
    for wire in BUCKET_WIRES:
        size = MANY_CHUNKS if wire.dtype == torch.bfloat16 else 10_001
        cases.append((wire, torch.float32, size, False))
    for wire, dtype, size, has_inf in cases:
        inputs = random_inputs(rank.world_size, size, dtype)
        for i in range(0, size if has_inf else 0, 907):
            inputs[i % rank.world_size][i] = (math.inf, -math.inf, math.nan)[i % 3]
        bucket, stats = reduce_once(communicator, inputs[rank.rank], wire, **options)
        expected = by_hosts(inputs, rank.layout, "avg", wire, **options)
        assert_same(bucket, expected, f"{wire} {dtype} {size}")
        num_non_finite, _ = stats_of(expected)
        assert stats[0] == num_non_finite
        assert (num_non_finite > 0) == (has_inf and size > 0)
        if num_non_finite > 0:
            continue
        norm = torch.linalg.vector_norm(bucket, dtype=torch.float64).item()
        # float64 sums in another order; each of the additions rounds once.
        assert math.isclose(math.sqrt(stats[1]), norm, rel_tol=1e-12)


@on_layout(TWO_BY_TWO)
def test_reduce_bucket_in_float32_has_the_bits_of_a_flat_run(rank: Rank) -> None:
    over_hosts, flat = rank.communicator(), flat_communicator(rank)
    wire, factors = Format(torch.float32, False), {"contribution_factor": 0.3, "result_factor": 1.1}
    results: list[object] = []
    for size, orders in itertools.product((1001, 300_007), ({"group_size": 2}, {"order": "tree"})):
        own = random_inputs(rank.world_size, size, torch.float32)[rank.rank]
        (expected, stats), (bucket, own_stats) = (
            reduce_once(communicator, own, wire, divisor=7.0, **factors, **orders)
            for communicator in (flat, over_hosts)
        )
        assert_same(bucket, expected, f"{size} {orders}")
        assert own_stats == stats, "norms are a fixed tree"
        results.append(stats)
    own = random_inputs(rank.world_size, 100_003, torch.float32)[rank.rank]
    noisy = [
        reduce_once(over_hosts, own, Format(torch.float16, True), stochastic_seed=seed)[0]
        for seed in (5, 5, 6)
    ]
    assert torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[0], noisy[2])
    results.append(noisy[0].numpy().tobytes())
    dist.all_gather_object(of_ranks := [None] * rank.world_size, results)
    assert of_ranks == [results] * rank.world_size, "bits differ between ranks"


@of_layouts(PAIR, TWO_BY_TWO, UNEVEN)
@on_layout()
def test_error_feedback_makes_up_for_what_rounding_lost(rank: Rank) -> None:
    communicator = rank.communicator()
    size, num_steps = 5000, 48
    inputs = [t * 1e-2 for t in random_inputs(rank.world_size, size, torch.float32)]
    inputs[0][7] = math.inf
    finite = torch.arange(size) != 7
    exact_mean = torch.stack([t.double() for t in inputs]).mean(0)
    for wire in NARROW_WIRES:
        residual = torch.zeros(size)
        total = torch.zeros(size, dtype=torch.float64)
        options = {"divisor": float(rank.world_size)}
        for step in range(num_steps):
            scale = 2.0 ** (step % 5)  # the loss scale may change from step to step
            own = inputs[rank.rank] * scale
            bucket, stats = reduce_once(
                communicator, own, wire, result_factor=1 / scale, residual=residual, **options
            )
            total += bucket.double()
            assert stats[0] == 1
        assert bool(residual.isfinite().all())
        # Rank 0's contribution is infinite there, and so is the sum of several hosts' first.
        if rank.rank == 0 or (len(rank.layout.hosts) > 1 and rank.rank in rank.layout.hosts[0]):
            assert residual[7] == 0
        plain, _ = reduce_once(communicator, inputs[rank.rank], wire, **options)
        # The remaining error is the last residual, averaged over all steps, and the rounding of
        # the results, which nothing makes up for.
        drift = (total / num_steps - exact_mean)[finite].abs().mean()
        plain_error = (plain.double() - exact_mean)[finite].abs().mean()
        assert drift < 0.8 * plain_error, wire
