"""reduce_bucket on cases that hypothesis makes up, against the numpy oracle, bit for bit.

A few hundred cases, the same ones every time, in `make test`; 10,000 new ones in `make test-long`,
which sets ROTA_PROPERTY_CASES.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucket_oracle import BUCKET_DTYPES, FORMATS, Format, reduce_bucket, stats_of
from oracle import CANONICAL_ALGORITHMS, assert_same
from ranks import Rank, Ranks

NUM_CASES = int(os.environ.get("ROTA_PROPERTY_CASES", "300"))
WORLD_SIZES = (1, 2, 3, 5)
SLOT_BYTES = (4096, 16384, 256 << 10)
FACTORS = (1.0, 2.0**-16, 0.1, 3.0, 1e-3, 7e4)


class Case(NamedTuple):
    """All that ranks need to know; what they reduce follows from it."""

    dtype: torch.dtype
    wire: Format
    shape: tuple[int, ...]
    step: int  # of the last dimension
    offset: int  # elements in front of the tensor
    is_transposed: bool
    magnitudes: tuple[float, ...]  # decimal exponents that blocks take turns with
    special: float | None  # found in one place of one rank
    algorithm: str
    slot: int
    contribution_factor: float
    divisor: float
    result_factor: float
    seed: int

    def bucket(self, rank: int) -> torch.Tensor:
        """The gradients of one rank, as a view of a larger tensor."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        *outer, last = self.shape
        num_elems = math.prod(outer) * last * self.step
        values = torch.randn(self.offset + num_elems, generator=generator, dtype=torch.float64)
        place = torch.arange(len(values)) // 37 % len(self.magnitudes)
        values *= 10 ** torch.tensor(self.magnitudes, dtype=torch.float64)[place]
        if self.special is not None and rank == self.seed % 2 and len(values) > 0:
            values[self.seed % len(values)] = self.special
        memory = values.to(self.dtype)[self.offset :]
        view = memory.view(*outer, last * self.step)[..., :: self.step]
        return view.transpose(0, -1) if self.is_transposed else view


shapes = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(1, 40), st.integers(0, 70)),
    st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 30)),
    st.tuples(st.sampled_from((511, 512, 513, 4095, 4096, 4097, 30_000))),
)
cases = st.builds(
    Case,
    dtype=st.sampled_from(BUCKET_DTYPES),
    wire=st.sampled_from(FORMATS),
    shape=shapes,
    step=st.integers(1, 3),
    offset=st.integers(0, 70),
    is_transposed=st.booleans(),
    magnitudes=st.lists(st.floats(-45, 37), min_size=1, max_size=4).map(tuple),
    special=st.sampled_from((None, math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, 1e-45)),
    algorithm=st.sampled_from(CANONICAL_ALGORITHMS),
    slot=st.integers(0, len(SLOT_BYTES) - 1),
    contribution_factor=st.sampled_from(FACTORS),
    divisor=st.sampled_from((1.0, 2.0, 3.0, 0.75, 5.0)),
    result_factor=st.sampled_from(FACTORS),
    seed=st.integers(0, 2**20),
)


def serve_cases(rank: Rank) -> None:
    """Takes its turns until the test is over."""
    communicators = [rank.communicator(slot_bytes=slot_bytes) for slot_bytes in SLOT_BYTES]
    while (case := rank.hear()) is not None:
        bucket = case.bucket(rank.rank)
        stats = torch.full((2,), -1.0, dtype=torch.float64)
        communicators[case.slot].reduce_bucket(
            bucket,
            stats,
            wire_dtype=case.wire.dtype,
            block_scaling=case.wire.block_scaling,
            contribution_factor=case.contribution_factor,
            divisor=case.divisor,
            result_factor=case.result_factor,
            algorithm=case.algorithm,
        )
        rank.tell((bucket.contiguous(), stats.tolist()))


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Any]]:
    """Ranks that live as long as this module: a group of each size."""
    groups = {
        size: Ranks(size, serve_cases, timeout_s=60 + NUM_CASES * 0.5) for size in WORLD_SIZES
    }
    yield groups
    for size, ranks in groups.items():
        with ranks:
            for rank in range(size):
                ranks.tell(rank, None)


@given(case=cases, world_size=st.sampled_from(WORLD_SIZES))
@settings(
    max_examples=NUM_CASES,
    deadline=None,  # ranks share the cores
    derandomize=NUM_CASES <= 300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_reduce_bucket_of_any_case_follows_oracle(
    groups: dict[int, Ranks], case: Case, world_size: int
) -> None:
    ranks = groups[world_size]
    for rank in range(world_size):
        ranks.tell(rank, case)
    results = [ranks.hear(rank) for rank in range(world_size)]
    expected = reduce_bucket(
        [case.bucket(rank).contiguous() for rank in range(world_size)],
        case.wire,
        contribution_factor=case.contribution_factor,
        divisor=case.divisor,
        result_factor=case.result_factor,
    )
    num_non_finite, squares = stats_of(expected)
    for got, stats in results:
        assert_same(got, expected, str(case))
        assert repr(stats) == repr(results[0][1])  # NaN differs from itself
        assert stats[0] == num_non_finite
        if num_non_finite == 0:
            # float64 sums in another order; what lies below its range may be lost on either side
            assert math.isclose(stats[1], squares, rel_tol=1e-12, abs_tol=1e-300)
