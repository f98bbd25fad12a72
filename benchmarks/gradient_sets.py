"""Gradients for testing hooks: some recorded from the demo, and some made to be hard.

Each set is a float32 tensor (ranks, elements) with every rank's contribution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from demo_model import train_gpt

NUM_ELEMS = 1 << 18  # of a generated set
MIN_MAGNITUDE_LOG10, MAX_MAGNITUDE_LOG10 = -12, 12
TYPICAL = 1e-3  # magnitude of a gradient


def recorded(num_ranks: int, steps: tuple[int, ...]) -> dict[str, Tensor]:
    """The demo's gradients, with a batch per rank, after `steps` training steps of rank 0."""
    train, _ = train_gpt.read_corpus()
    config = train_gpt.GPTConfig()
    torch.manual_seed(0)
    model = train_gpt.GPT(config)
    optimizer = train_gpt.make_optimizer(model)

    def backward(rank: int, step: int) -> None:
        optimizer.zero_grad()
        model(*train_gpt.sample_batch(train, 4, config.context, (0, rank, step))).backward()

    sets = {}
    for step in range(max(steps) + 1):
        if step in steps:
            contributions = []
            for rank in range(num_ranks):
                backward(rank, step)
                grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                contributions.append(torch.cat(grads))
            sets[f"demo, step {step}"] = torch.stack(contributions)
        for param_group in optimizer.param_groups:
            param_group["lr"] = train_gpt.learning_rate(step, 320, 2e-3)
        backward(0, step)
        optimizer.step()
    return sets


def log_uniform(num_ranks: int) -> Tensor:
    """Magnitudes from 1e-12 to 1e12, mixed in every block."""
    span = MAX_MAGNITUDE_LOG10 - MIN_MAGNITUDE_LOG10
    exponents = torch.rand(num_ranks, NUM_ELEMS) * span + MIN_MAGNITUDE_LOG10
    signs = torch.randint(0, 2, exponents.shape) * 2 - 1
    return signs * 10**exponents


def log_uniform_sorted(num_ranks: int) -> Tensor:
    """The same in ascending order of magnitude, so that a block's values are close."""
    values = log_uniform(num_ranks)
    return values.gather(1, values.abs().argsort(dim=1))


def denormals(num_ranks: int) -> Tensor:
    """Positive numbers below float32's smallest normal one, magnitudes mixed in every block."""
    bits = torch.randint(0, 1 << 23, (num_ranks, NUM_ELEMS), dtype=torch.int32)
    shift = torch.randint(0, 23, bits.shape, dtype=torch.int32)
    return (bits >> shift).view(torch.float32)


def one_special(value: float) -> Callable[[int], Tensor]:
    """Typical gradients, with `value` once, on the last of two ranks."""

    def make(num_ranks: int) -> Tensor:
        values = torch.randn(num_ranks, NUM_ELEMS) * TYPICAL
        values[1, NUM_ELEMS // 3] = value
        return values

    return make


MADE: dict[str, Callable[[int], Tensor]] = {
    "1e-12 to 1e12, mixed": log_uniform,
    "1e-12 to 1e12, sorted": log_uniform_sorted,
    "denormals": denormals,
    "one Inf": one_special(torch.inf),
    "one NaN": one_special(torch.nan),
}


def made(num_ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: make(num_ranks) for name, make in MADE.items()}
