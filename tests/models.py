"""Models for DDP tests; most have small integers as gradients, so that sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import rota

SMALL_BUCKETS_MB = 0.004  # several buckets; the first one is even smaller
TINY_BUCKETS_MB = 1e-6  # one bucket per parameter


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 48)]
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(48, 8)).to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype)


def fused_ddp(
    model: torch.nn.Module, state: rota.HookState, **options: Any
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS_MB} | options)
    ddp.register_comm_hook(state, rota.fused_hook)
    return ddp


class ExactGradients(torch.nn.Module):
    """The gradient of each parameter is the start of the batch."""

    def __init__(
        self,
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        sizes: Sequence[int] = (3, 700, 64, 1, 2050),
    ) -> None:
        super().__init__()
        dtypes = [dtype] * len(sizes) if isinstance(dtype, torch.dtype) else dtype
        self.weights = torch.nn.ParameterList(
            torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)
        )

    def forward(self, batch: torch.Tensor, used: Sequence[int] | None = None) -> torch.Tensor:
        weights = [self.weights[i] for i in used] if used is not None else list(self.weights)
        terms = [(weight * batch[: weight.numel()]).sum() for weight in weights]
        return torch.stack([term.real.float() for term in terms]).sum()


def exact_batch(rank: int, step: int, num_elems: int = 2050) -> torch.Tensor:
    """Small integers, different for every step and rank."""
    return ((torch.arange(num_elems) * 3 + rank * 5 + step) % 17 - 8).float()


def gradients_of(model: torch.nn.Module) -> torch.Tensor:
    """All existing gradients, concatenated, in float64."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    reals = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    return torch.cat([gradient.flatten().double() for gradient in reals])


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    """The norm of all gradients as float32, rounded only once if the gradients are small."""
    return gradients_of(model).square().sum().sqrt().float()
