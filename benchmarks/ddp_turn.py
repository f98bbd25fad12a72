"""A step of DDP training with rota's fused hook as a call to time, on a model given by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from protocol import Turn

DDP_STEP = "DDP step"  # the entry's api

BATCH = 8


class Layers(nn.Module):
    """`num_layers` square linear layers of `width`; forward returns a loss."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.layers(batch)
        return output.square().mean()


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The demo's model, and a batch of the demo's shape: 13 MiB of gradients in 18 tensors."""
    from demo_model import train_gpt

    config = train_gpt.GPTConfig()
    text = torch.randint(train_gpt.BYTES, (2, 4, config.context))
    return train_gpt.GPT(config), (text[0], text[1])


def many_small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """32 MiB of gradients in 256 tensors, so that DDP's cost per parameter matters."""
    return Layers(128, 256), (torch.randn(BATCH, 256),)


def few_large() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """64 MiB of gradients in 8 tensors; at small caps each matrix is a bucket."""
    return Layers(4, 2048), (torch.randn(BATCH, 2048),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": gpt,
    "many_small": many_small,
    "few_large": few_large,
}


def num_parameters(model: str) -> int:
    with torch.device("meta"):
        module, _ = MODELS[model]()
    return sum(parameter.numel() for parameter in module.parameters())


def step_call(turn: Turn) -> Callable[[], object]:
    """Forward, backward with communication, and update of the model that `turn.op` names.

    Makes a new replica for every turn, as kept replicas would each hold parameters and gradients.
    """
    import rota

    torch.manual_seed(0)
    model, batch = MODELS[turn.op]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ddp = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=turn.entry.bucket_cap_mb, gradient_as_bucket_view=True
    )
    ddp.register_comm_hook(rota.HookState(), rota.fused_hook)

    def step() -> None:
        optimizer.zero_grad()
        ddp(*batch).backward()
        optimizer.step()

    return step
