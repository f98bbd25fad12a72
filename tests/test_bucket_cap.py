"""rota.suggest_bucket_cap: how it reads its table, and what it counts."""

from __future__ import annotations

import pytest
import torch

import rota
from rota import bucket_cap

KIB = 2**10


@pytest.fixture(autouse=True)
def distinct_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in which every size has a cap of its own."""
    table = {1.0: {1: 2.0, 2: 1.0}, 16.0: {4: 5.0, 8: 6.0}, 256.0: {16: 9.0, 32: 8.0}}
    monkeypatch.setattr(bucket_cap, "_STEP_MS", table)


def with_bytes(num_bytes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.empty(num_bytes // dtype.itemsize, dtype=dtype)])


@pytest.mark.parametrize(
    ("kib", "cap"), [(0, 2.0), (1, 2.0), (4095, 2.0), (4097, 4.0), (65_535, 4.0), (65_537, 32.0)]
)
def test_cap_is_the_best_of_the_nearest_size(kib: int, cap: float) -> None:
    assert rota.suggest_bucket_cap(with_bytes(kib * KIB)) == cap


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_bytes_count_not_elements(dtype: torch.dtype) -> None:
    assert rota.suggest_bucket_cap(with_bytes(4097 * KIB, dtype)) == 4.0
    assert rota.suggest_bucket_cap(with_bytes(4095 * KIB, dtype)) == 2.0


def test_only_gradients_count_and_each_once() -> None:
    small, large = with_bytes(2048 * KIB), with_bytes(65_537 * KIB)
    assert rota.suggest_bucket_cap(torch.nn.ModuleList([small] * 4)) == 2.0
    both = torch.nn.ModuleList([small, large])
    assert rota.suggest_bucket_cap(both) == 32.0
    large.requires_grad_(False)
    assert rota.suggest_bucket_cap(both) == 2.0


def test_table_of_the_release_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kib in (1, 13_000, 64 * KIB, KIB * KIB):
        assert 1 <= rota.suggest_bucket_cap(with_bytes(kib * KIB)) <= 100
