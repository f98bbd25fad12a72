"""Checks of what ParameterServer is given; errors say what is valid. Nothing here waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rota import options
from rota.errors import TransportError
from rota.rendezvous import alike
from rota.sharding import as_dtensor

MODES = ("sync", "async", "stale")
_NAME = "rota.ParameterServer"


def named_parameters(
    parameters_or_module: Iterable[torch.Tensor] | nn.Module,
) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor]
    if isinstance(parameters_or_module, nn.Module):
        module = parameters_or_module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    elif isinstance(parameters_or_module, torch.Tensor):
        raise TypeError(f"{_NAME}: parameters is a tensor, expected a module or several parameters")
    elif not isinstance(parameters_or_module, Iterable):
        raise TypeError(
            f"{_NAME}: parameters is of type {type(parameters_or_module).__name__}, expected a "
            f"module or several parameters"
        )
    else:
        named = {
            f"parameter {i}": p
            for i, p in enumerate(parameters_or_module)
            if not isinstance(p, nn.Parameter) or p.requires_grad
        }
    if not named:
        raise ValueError(f"{_NAME}: there is no parameter that requires a gradient")
    if len({id(p) for p in named.values()}) < len(named):
        raise ValueError(f"{_NAME}: a parameter is given twice; give each once")
    for name, parameter in named.items():
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"{_NAME}: {name} is of type {type(parameter).__name__}, expected a tensor"
            )
        if as_dtensor(parameter) is not None:
            raise TypeError(
                f"{_NAME}: {name} is a DTensor, of which each rank may hold another shard, "
                f"expected a tensor that every worker has whole"
            )
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            raise TypeError(
                f"{_NAME}: {name} is {parameter.layout} on {parameter.device}, expected a dense "
                f"tensor on the CPU"
            )
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"{_NAME}: {name} is {parameter.dtype}, expected float32, bfloat16 or float16: "
                f"servers keep float32 copies"
            )
    return named


def check_mode(mode: object, staleness: object, delay_compensation: float) -> None:
    if mode not in MODES:
        raise ValueError(f"{_NAME}: mode is {mode!r}, expected one of {MODES}")
    if mode == "stale":
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ValueError(
                f"{_NAME}: staleness is {staleness!r}, expected an int of 0 or more: the clocks "
                f"that the fastest worker may be ahead of the slowest"
            )
    elif staleness is not None:
        raise ValueError(
            f"{_NAME}: staleness is {staleness!r} with mode={mode!r}, expected None; it is for "
            f'mode="stale"'
        )
    if not isinstance(delay_compensation, int | float):
        raise TypeError(
            f"{_NAME}: delay_compensation is {delay_compensation!r}, expected a number of 0 or more"
        )
    if not (math.isfinite(delay_compensation) and delay_compensation >= 0):
        raise ValueError(
            f"{_NAME}: delay_compensation is {delay_compensation}, expected a finite number of 0 "
            f"or more"
        )
    if mode == "sync" and delay_compensation != 0:
        raise ValueError(
            f'{_NAME}: delay_compensation is {delay_compensation} with mode="sync", in which no '
            f"gradient is delayed; expected 0"
        )


def check_weights(
    average_weights: bool,
    make_optimizer: object,
    error_feedback: bool,
    delay_compensation: float,
    lr_lambda: object,
) -> None:
    if not average_weights:
        if not callable(make_optimizer):
            raise TypeError(
                f"{_NAME}: make_optimizer is {make_optimizer!r}, expected a function that makes a "
                f"torch.optim.Optimizer of a list of parameters"
            )
        return
    given = {
        "make_optimizer": make_optimizer is not None,
        "error_feedback": error_feedback,
        "delay_compensation": delay_compensation != 0,
        "lr_lambda": lr_lambda is not None,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ValueError(
            f"{_NAME}: {', '.join(wrong)} with average_weights; that is for gradients: leave it "
            f"out (make_optimizer=None)"
        )


def check_wire(
    wire_dtype: torch.dtype | None, block_scaling: bool, error_feedback: bool
) -> torch.dtype | None:
    """The dtype to round to; None if nothing is rounded."""
    if wire_dtype is not None:
        options.check_wire(_NAME, wire_dtype, block_scaling)
    if wire_dtype in (None, torch.float32):
        if block_scaling or error_feedback:
            raise ValueError(
                f"{_NAME}: block_scaling is {block_scaling} and error_feedback {error_feedback} "
                f"with wire_dtype {wire_dtype}, which rounds nothing; leave them out, or give a "
                f"narrower wire_dtype"
            )
        return None
    return wire_dtype


def ranks_that_serve(servers: Sequence[int] | None, world_size: int) -> list[int]:
    if servers is None:
        return list(range(world_size))
    ranks = list(servers)
    if not ranks or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
        raise ValueError(f"{_NAME}: servers is {servers!r}, expected one or more ranks, or None")
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise ValueError(
            f"{_NAME}: servers has {outside}, but the group's ranks are 0 to {world_size - 1}"
        )
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"{_NAME}: servers is {servers!r}, in which a rank comes twice")
    if len(ranks) == world_size:
        raise ValueError(
            f"{_NAME}: servers has {len(ranks)} of the group's {world_size} ranks, so no worker is "
            f"left; servers=None has every rank serve and work"
        )
    return sorted(ranks)


def num_replicas(replicas: object, num_servers: int) -> int:
    if replicas is None:
        return min(1, num_servers - 1)
    if isinstance(replicas, bool) or replicas not in (0, 1):
        raise ValueError(f"{_NAME}: replicas is {replicas!r}, expected 0, 1 or None")
    if replicas == 1 and num_servers == 1:
        raise ValueError(
            f"{_NAME}: replicas is 1, but there is 1 server, and a replica needs another one; "
            f"expected 0"
        )
    return int(replicas)


def check_pushed(
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    pushed: Sequence[torch.Tensor | None],
) -> None:
    if len(pushed) != len(parameters):
        raise ValueError(
            f"{_NAME}.push: {len(pushed)} tensors, expected {len(parameters)}, one for each "
            f"parameter (None for zeroes)"
        )
    for name, parameter, tensor in zip(names, parameters, pushed, strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{_NAME}.push: the tensor for {name} is of type {type(tensor).__name__}"
            )
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{_NAME}.push: the tensor for {name} has shape {list(tensor.shape)}, the "
                f"parameter {list(parameter.shape)}"
            )
        expected = {torch.float32, parameter.dtype}
        if tensor.dtype not in expected:
            raise TypeError(
                f"{_NAME}.push: the tensor for {name} is {tensor.dtype}, expected "
                f"{' or '.join(str(dtype) for dtype in expected)}"
            )
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise TypeError(
                f"{_NAME}.push: the tensor for {name} is {tensor.layout} on {tensor.device}, "
                f"expected a dense one on the CPU"
            )


def check_alike(described: Sequence[dict[str, object]]) -> None:
    if difference := alike.sides([str(of_rank.pop("host")) for of_rank in described], "has"):
        raise TransportError(
            f"{_NAME}: ranks are on several hosts: {difference}; make a group of the ranks of one"
        )
    alike.check_alike(_NAME, described)
