"""Small trainings with LocalSGD and DiLoCo, for several tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import batch_of
from oracle import assert_same
from ranks import Rank
from rota.local_sgd import DiLoCo, LocalSGD

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_diloco(model: nn.Module, sync_every: int, **options: Any) -> DiLoCo:
    outer_optimizer = torch.optim.SGD(model.parameters(), **NESTEROV)
    return DiLoCo(model, outer_optimizer, sync_every, **options)


def flat(model: nn.Module) -> torch.Tensor:
    """Parameters and floating-point buffers, as float64."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([tensor.detach().flatten().double() for tensor in reals])


def train(
    rank: Rank,
    model: nn.Module,
    outer: LocalSGD | None,
    steps: range,
    lr: float = 0.125,
    momentum: float = 0.0,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for step in steps:
        model(batch_of(rank.rank, step)).float().square().mean().backward()
        optimizer.step()
        if outer is not None:
            outer.step()
        optimizer.zero_grad()


def check_equal_on_all_ranks(model: nn.Module, what: str) -> None:
    mine = flat(model)
    first = mine.clone()
    dist.broadcast(first, 0)
    assert_same(mine, first, what)
