"""rota.suggest_bucket_cap: the table that it reads, and what it counts."""

from __future__ import annotations

import pytest
import torch

import rota


def with_bytes(num_bytes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.empty(num_bytes // dtype.itemsize, dtype=dtype)])


def test_larger_models_get_buckets_that_are_no_smaller() -> None:
    caps = [rota.suggest_bucket_cap(with_bytes(2**i)) for i in range(8, 30)]
    assert caps == sorted(caps) and len(set(caps)) > 1
    assert all(isinstance(cap, float) and 0 < cap <= 25 for cap in caps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_bytes_count_not_elements(dtype: torch.dtype) -> None:
    for num_bytes in (2**18, 2**21, 2**24, 2**27, 2**29):
        cap = rota.suggest_bucket_cap(with_bytes(num_bytes))
        assert rota.suggest_bucket_cap(with_bytes(num_bytes, dtype)) == cap


def test_only_gradients_count_and_each_once() -> None:
    small, large = with_bytes(2**18), with_bytes(2**29)
    cap = rota.suggest_bucket_cap(small)
    assert rota.suggest_bucket_cap(torch.nn.ModuleList([small] * 4096)) == cap
    both = torch.nn.ModuleList([small, large])
    assert rota.suggest_bucket_cap(both) > cap
    large.requires_grad_(False)
    assert rota.suggest_bucket_cap(both) == cap
