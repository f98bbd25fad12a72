"""The optimizers of rota.optim in numpy, an operation at a time, on whole parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

F = np.float32


def adam_step(
    parameter: np.ndarray[Any, Any],
    gradient: np.ndarray[Any, Any],
    state: dict[str, Any],
    options: dict[str, Any],
    factor: float = 1.0,
) -> np.ndarray[Any, Any]:
    """The parameter after a step; `state` is kept from one to the next."""
    number = state["step"] = state.get("step", 0) + 1
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    lr, decay = options.get("lr", 1e-3), options["weight_decay"]
    size, correction = lr / (1 - beta1**number), math.sqrt(1 - beta2**number)
    is_decoupled = options["is_decoupled"]
    gradient = gradient * F(-factor if options.get("maximize") else factor)
    gradient = gradient + parameter * F(0 if is_decoupled else decay)
    first = state.get("exp_avg", np.zeros_like(parameter))
    second = state.get("exp_avg_sq", np.zeros_like(parameter))
    first = state["exp_avg"] = first + (gradient - first) * F(1 - beta1)
    second = second * F(beta2) + gradient * gradient * F(1 - beta2)
    state["exp_avg_sq"] = second
    if options.get("amsgrad"):
        second = np.maximum(state.get("max_exp_avg_sq", np.zeros_like(parameter)), second)
        state["max_exp_avg_sq"] = second
    scale = np.sqrt(second) / F(correction) + F(options.get("eps", 1e-8))
    kept = parameter * F(1 - lr * decay if is_decoupled else 1)
    return kept - first / scale * F(size)


def sgd_step(
    parameter: np.ndarray[Any, Any],
    gradient: np.ndarray[Any, Any],
    state: dict[str, Any],
    options: dict[str, Any],
    factor: float = 1.0,
) -> np.ndarray[Any, Any]:
    """As adam_step()."""
    gradient = gradient * F(-factor if options.get("maximize") else factor)
    gradient = gradient + parameter * F(options.get("weight_decay", 0))
    momentum = options.get("momentum", 0)
    if momentum:
        buffer = state.get("momentum_buffer")
        fresh = F(1 - options.get("dampening", 0))
        buffer = gradient if buffer is None else buffer * F(momentum) + gradient * fresh
        state["momentum_buffer"] = buffer
        gradient = gradient + buffer * F(momentum) if options.get("nesterov") else buffer
    return parameter - gradient * F(options["lr"])
