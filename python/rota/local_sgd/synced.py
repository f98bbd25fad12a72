"""The tensors of a model that workers keep alike, and how they are cut into fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from rota import options
from rota.sharding import local_of


class Synced(NamedTuple):
    """A parameter or buffer of the model, and its copy, which is the same on all workers."""

    name: str
    module: nn.Module
    parameter: nn.Parameter | None  # None: a buffer, in whose place modules assign new ones
    copy: nn.Parameter  # what lies on this rank; its gradient is the difference

    @property
    def tensor(self) -> torch.Tensor:
        return self.module.get_buffer(self.name) if self.parameter is None else self.parameter

    @property
    def local(self) -> torch.Tensor:
        """What lies on this rank of the model's tensor, sharing its memory."""
        return local_of(self.tensor.detach())


def tensors_to_sync(caller: str, module: nn.Module) -> dict[str, torch.Tensor]:
    options.check_model(caller, module)
    saved = module.state_dict().keys()
    tensors: dict[str, torch.Tensor] = {}
    tensors |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not tensors:
        raise ValueError(f"{caller}: the model has no parameter that requires a gradient")
    for name, buffer in module.named_buffers():
        if name in saved and (buffer.is_floating_point() or buffer.is_complex()):
            tensors[name] = buffer
    return tensors


def copy_of(tensor: torch.Tensor) -> nn.Parameter:
    local = local_of(tensor.detach())
    # 16-bit parameters would lose small outer steps.
    dtype = torch.promote_types(local.dtype, torch.float32)
    return nn.Parameter(local.to(dtype, copy=True))


def cut(synced: Sequence[Synced], num_fragments: int) -> list[list[Synced]]:
    """Consecutive fragments of about the same size; none is empty."""
    fragments: list[list[Synced]] = []
    rest = list(synced)
    for num_left in range(num_fragments, 1, -1):
        share = sum(s.copy.numel() for s in rest) / num_left
        size, num_taken = 0, 0
        while num_taken == 0 or (size < share and len(rest) - num_taken >= num_left):
            size += rest[num_taken].copy.numel()
            num_taken += 1
        fragments.append(rest[:num_taken])
        rest = rest[num_taken:]
    return [*fragments, rest]
