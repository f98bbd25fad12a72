"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rota import _C
from rota.gradients.state import HookState
from rota.optim.sharded import ShardedOptimizer


class Adam(ShardedOptimizer):
    """torch.optim.Adam, each rank with the state of its part of the parameters; see AdamW."""

    _DECOUPLES = False

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        state: HookState,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        keep_gradients: bool = False,
    ) -> None:
        name = f"rota.optim.{type(self).__name__}"
        for what, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name}: {what} is {value}, expected 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas is {betas}, expected two numbers in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self._DECOUPLES,
        }
        super().__init__(params, state, defaults, keep_gradients=keep_gradients)

    def _step_of(self, group: Mapping[str, Any], number: int, factor: float) -> _C.UpdateStep:
        lr, decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        return _C.UpdateStep(
            is_adam=True,
            gradient_factor=-factor if group["maximize"] else factor,
            l2=0 if self._DECOUPLES else decay,
            kept=1 - lr * decay if self._DECOUPLES else 1,
            size=lr / (1 - beta1**number),
            momentum=beta1,
            fresh=1 - beta1,
            beta2=beta2,
            fresh_square=1 - beta2,
            correction=math.sqrt(1 - beta2**number),
            eps=group["eps"],
        )

    def _states_of(self, group: Mapping[str, Any]) -> dict[str, str]:
        states = {"momentum": "exp_avg", "squares": "exp_avg_sq"}
        return states | ({"largest": "max_exp_avg_sq"} if group["amsgrad"] else {})


class AdamW(Adam):
    """torch.optim.AdamW that updates each parameter on the one rank that has the sum of its
    gradients, and sends parameters to all ranks instead of sums.

    The time of the step and the memory of its state are divided by the number of ranks.
    Contributions travel in the state's wire dtype; sums are float32 and are not rounded again.
    Parameters have the same bits on all ranks.

    From the end of backward() on, `p.grad` is None. Call clip_grad_norm_() of this optimizer
    instead of torch's or rota's. With a rota.amp.GradScaler, call scaler.step(optimizer).

    Args:
        params: all parameters of the model that require a gradient, or torch's parameter groups;
            float32, float16 or bfloat16 on the CPU. The two narrow ones are updated in float32
            copies, of which each rank has its part.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch's, which explains them.
        state: a rota.HookState of the model. With model=ddp, its hook is registered on that
            DistributedDataParallel; otherwise call rota.reduce_gradients after backward().
        foreach, capturable, differentiable, fused: refused unless they are torch's defaults.
        keep_gradients: leave the averaged gradients in `p.grad`, for logging; that sends them, too.

    Raises:
        TypeError, ValueError: an argument cannot be used; the text says what can.

    Source of the idea: Rajbhandari et al. 2020 (ZeRO, stage 2), with the update between the two
    halves of an all-reduce.

    Example:
        >>> state = rota.HookState(model=ddp)
        >>> optimizer = rota.optim.AdamW(ddp.parameters(), state=state, lr=1e-3)
        >>> loss.backward()
        >>> norm = optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _DECOUPLES = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        state: HookState,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        keep_gradients: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            state=state,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            keep_gradients=keep_gradients,
        )
