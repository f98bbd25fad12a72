"""GradientBucket: gradients to the wire format and back, against the definition in numpy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from bucket_oracle import BUCKET_DTYPES, FORMATS, Format, stats_of, through_wire
from on_gpu import DEVICE, Guarded, capture, check_refused
from oracle import assert_same, name_of, round_to, to_numpy
from rota.gpu import GradientBucket

SIZES = (1, 2, 31, 33, 63, 64, 65, 511, 512, 513, 1024, 4097, 40_001)


def values_of(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Blocks of narrow and of wide range, and zeros."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    place = torch.arange(size) // 100 % 4
    wild = torch.rand(size, generator=generator, dtype=torch.float64) * 12 - 6
    values = torch.where(place == 1, values * 10**wild, values)
    values = torch.where(place == 2, torch.zeros(()), values)
    return values.to(dtype)


def expected_of(
    source: torch.Tensor, wire: Format, contribution_factor: float, result_factor: float
) -> torch.Tensor:
    """The result by definition; every step that rota does in float32 is rounded to float32."""
    gradients = round_to(to_numpy(source), torch.float32)
    wanted = round_to(gradients * float(np.float32(contribution_factor)), torch.float32)
    decoded = through_wire(wanted, wire)
    result = round_to(decoded * float(np.float32(result_factor)), torch.float32)
    return torch.from_numpy(round_to(result, source.dtype)).to(source.dtype)


def both_ways(
    sources: Sequence[torch.Tensor],
    wire: Format,
    contribution_factor: float = 1.0,
    result_factor: float = 1.0,
    offset: int = 0,
) -> GradientBucket:
    """Packs, overwrites the gradients, unpacks, and compares bits and stats."""
    guarded = [Guarded(source, offset) for source in sources]
    bucket = GradientBucket(
        [one.tensor for one in guarded], wire_dtype=wire.dtype, block_scaling=wire.block_scaling
    )
    bucket.wire.copy_(torch.full(bucket.wire.shape, 255, dtype=torch.uint8))
    bucket.pack(contribution_factor=contribution_factor)
    for one in guarded:
        one.tensor.copy_(torch.full(one.tensor.shape, math.nan, dtype=one.tensor.dtype))
    bucket.unpack(result_factor=result_factor)
    num_non_finite, squares = 0, 0.0
    for i, (one, source) in enumerate(zip(guarded, sources, strict=True)):
        case = f"{wire}, tensor {i} of {source.numel()} elements"
        expected = expected_of(source, wire, contribution_factor, result_factor)
        assert_same(one.get(case), expected, case)
        stats = stats_of(expected)
        num_non_finite += stats[0]
        squares += stats[1]
    got = bucket.stats.cpu().tolist()
    assert got[0] == num_non_finite
    if num_non_finite == 0:
        # The sum of squares may have another order of additions.
        assert math.isclose(got[1], squares, rel_tol=1e-12, abs_tol=1e-300)
    else:
        assert not math.isfinite(got[1])
    return bucket


@pytest.mark.parametrize("dtype", BUCKET_DTYPES, ids=name_of)
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_bucket_of_mixed_sizes_follows_oracle(wire: Format, dtype: torch.dtype) -> None:
    both_ways([values_of(size, dtype) for size in SIZES], wire, 0.5, 1 / 1024)


@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_bucket_of_misaligned_tensors_follows_oracle(wire: Format) -> None:
    sources = [values_of(size, torch.float32) for size in SIZES]
    for offset in (1, 2, 3):
        both_ways(sources, wire, offset=offset)


@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_bucket_counts_inf_and_nan(wire: Format) -> None:
    sources = [values_of(size, torch.float32) for size in (700, 5, 2000)]
    sources[0][13], sources[1][4], sources[2][1999] = math.inf, math.nan, -math.inf
    both_ways(sources, wire)


def test_bucket_of_300_tensors_follows_oracle_and_tells_its_bytes() -> None:
    sources = [values_of(1 + (i * i * 37) % 5003, torch.float32, i) for i in range(300)]
    bucket = both_ways(sources, Format(torch.float16, True))
    num_elems = sum(source.numel() for source in sources)
    assert bucket.num_bytes == 4 * num_elems
    # Each tensor starts a new tile of 512 elements; each block of 64 has a scale of one byte.
    assert 2 * num_elems < bucket.num_wire_bytes <= (2 * 512 + 8) * (num_elems // 512 + 300)
    assert bucket.wire.dtype == torch.uint8 and bucket.wire.device == DEVICE


def test_bucket_can_be_packed_again_and_counts_anew() -> None:
    sources = [values_of(size, torch.float32) for size in (600, 10)]
    gradients = [source.to(DEVICE) for source in sources]
    bucket = GradientBucket(gradients)
    wire = Format(torch.float16, True)
    for turn in range(3):
        for gradient, source in zip(gradients, sources, strict=True):
            gradient.copy_(source * 2**turn)
        bucket.pack()
        bucket.unpack()
        expected = [expected_of(source * 2**turn, wire, 1.0, 1.0) for source in sources]
        squares = sum(stats_of(one)[1] for one in expected)
        assert bucket.stats.cpu().tolist() == [0.0, pytest.approx(squares, rel=1e-12)]


def test_bucket_can_be_unpacked_again_and_without_a_pack() -> None:
    sources = [values_of(size, torch.float32) for size in (600, 10)]
    packed = GradientBucket([source.to(DEVICE) for source in sources])
    packed.pack()
    gradients = [torch.zeros_like(source).to(DEVICE) for source in sources]
    bucket = GradientBucket(gradients)
    bucket.wire.copy_(packed.wire)
    expected = [expected_of(source, Format(torch.float16, True), 1.0, 1.0) for source in sources]
    squares = sum(stats_of(one)[1] for one in expected)
    for _ in range(2):
        bucket.unpack()
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert_same(gradient.cpu(), wanted, "without a pack")
        assert bucket.stats.cpu().tolist() == [0.0, pytest.approx(squares, rel=1e-12)]


def test_bucket_in_a_graph_takes_the_values_of_each_replay() -> None:
    gradients = [torch.zeros(size).to(DEVICE) for size in (600, 10)]
    bucket = GradientBucket(gradients)
    bucket.pack()
    bucket.unpack()

    def body() -> None:
        bucket.pack(contribution_factor=2.0)
        bucket.unpack(result_factor=0.25)

    graph = capture(body)
    for replay in range(4):
        sources = [values_of(gradient.numel(), torch.float32, replay) for gradient in gradients]
        for gradient, source in zip(gradients, sources, strict=True):
            gradient.copy_(source)
        graph.replay()
        for gradient, source in zip(gradients, sources, strict=True):
            expected = expected_of(source, Format(torch.float16, True), 2.0, 0.25)
            assert_same(gradient.cpu(), expected, f"replay {replay}")


def test_bucket_stochastic_rounding_depends_on_the_seed_alone() -> None:
    source = values_of(10_000, torch.float32)
    results = []
    for seed in (1, 1, 2):
        gradient = source.to(DEVICE)
        bucket = GradientBucket([gradient], wire_dtype=torch.bfloat16)
        bucket.pack(stochastic_seed=seed)
        bucket.unpack()
        results.append(gradient.cpu())
        # Rounded to one of the two neighbours; bfloat16 has eight significant bits.
        assert ((results[-1] - source).abs() <= source.abs() * 2.0**-7).all()
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.skipif("SIMULATED_GPUS" in os.environ, reason="no profiler sees a simulated GPU")
def test_bucket_of_300_tensors_is_one_launch_each_way() -> None:
    bucket = GradientBucket([torch.zeros(1 + 13 * i).to(DEVICE) for i in range(300)])
    bucket.pack()
    bucket.unpack()
    torch.cuda.synchronize()
    for call in (bucket.pack, bucket.unpack):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        if not names:
            pytest.skip("torch's profiler sees no kernels here")
        assert len([name for name in names if "kernel" in name]) == 1, names


def test_bucket_refuses_what_it_does_not_take() -> None:
    good = torch.zeros(600).to(DEVICE)
    bad_calls: dict[str, Callable[[], object]] = {
        "on the CPU": lambda: GradientBucket([good, torch.zeros(3)]),
        "two dtypes": lambda: GradientBucket([good, good.cpu().half().to(DEVICE)]),
        "integers": lambda: GradientBucket([torch.zeros(3, dtype=torch.int32).to(DEVICE)]),
        "strided": lambda: GradientBucket([good[::2]]),
        "integers on the wire": lambda: GradientBucket([good], wire_dtype=torch.int8),
        "blocks of float32": lambda: GradientBucket(
            [good], wire_dtype=torch.float32, block_scaling=True
        ),
        "factor 0": lambda: GradientBucket([good]).pack(contribution_factor=0.0),
        "factor Inf": lambda: GradientBucket([good]).unpack(result_factor=math.inf),
    }
    check_refused(bad_calls, "ValueError", "TypeError")
