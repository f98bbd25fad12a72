"""What every recipe here trains: a small model on random numbers, for a few steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_STEPS = 8
BATCH_SIZE = 16


class Model(nn.Module):
    """Computes the loss itself, and under the name by which Transformers' Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(inputs) - targets).square().mean()}


def make_dataset(world_size: int) -> TensorDataset:
    """As many samples as all ranks together train on, the same on each."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(world_size * NUM_STEPS * BATCH_SIZE, 32, generator=generator)
    return TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def report(losses: list[float]) -> None:
    """One line from each rank, with every digit."""
    line = f"{dist.get_backend()} rank {dist.get_rank()} losses {losses}\n"
    print(line, end="", flush=True)
