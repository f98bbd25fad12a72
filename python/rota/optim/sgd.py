"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rota import _C
from rota.gradients.state import HookState
from rota.optim.sharded import ShardedOptimizer


class SGD(ShardedOptimizer):
    """torch.optim.SGD, each rank with the state of its part of the parameters; see AdamW."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        state: HookState,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        keep_gradients: bool = False,
    ) -> None:
        name = "rota.optim.SGD"
        for what, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name}: {what} is {value}, expected 0 or more")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"{name}: nesterov needs a momentum, and no dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, state, defaults, keep_gradients=keep_gradients)

    def _step_of(self, group: Mapping[str, Any], number: int, factor: float) -> _C.UpdateStep:
        return _C.UpdateStep(
            is_adam=False,
            gradient_factor=-factor if group["maximize"] else factor,
            l2=group["weight_decay"],
            size=float(group["lr"]),
            momentum=group["momentum"],
            fresh=1 - group["dampening"],
            is_nesterov=group["nesterov"],
            is_first=number == 1,
        )

    def _states_of(self, group: Mapping[str, Any]) -> dict[str, str]:
        return {"momentum": "momentum_buffer"} if group["momentum"] else {}
