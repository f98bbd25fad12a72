"""Checks of rota.HookState's options, and of arguments that others take like it; their errors say
what is valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from rota import _C


def _dtypes(names: tuple[str, ...]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names)


BUCKET_DTYPES = _dtypes(_C.BUCKET_DTYPES)
_WIRE_DTYPES = _dtypes(_C.WIRE_DTYPES)
_NARROW_DTYPES = _dtypes(_C.BLOCK_SCALED_DTYPES)  # the others have float32's range

MAX_NUM_SHARDS = 2**30  # they are counted in 32 bits


def scales_blocks(wire_dtype: object, block_scaling: bool | None = None) -> bool:
    """What block_scaling means, wherever it is an argument: None is where the wire is narrow."""
    return wire_dtype in _NARROW_DTYPES if block_scaling is None else block_scaling


def check_model(caller: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{caller}: model is of type {type(model).__name__}, expected a torch.nn.Module"
        )


def check_wire(
    caller: str, wire_dtype: object, block_scaling: bool, name: str = "wire_dtype"
) -> None:
    if wire_dtype not in _WIRE_DTYPES:
        raise TypeError(f"{caller}: {name} is {wire_dtype!r}, expected one of {_WIRE_DTYPES}")
    if block_scaling and wire_dtype not in _NARROW_DTYPES:
        raise ValueError(
            f"{caller}: block_scaling is for {_NARROW_DTYPES}; {wire_dtype} has the range of "
            f"float32 without it, leave it out"
        )


def check_inter(caller: str, inter_wire_dtype: object, inter_block_scaling: object) -> None:
    """What travels between hosts; the extension checks whether both go together."""
    if not isinstance(inter_block_scaling, bool | None):
        raise TypeError(
            f"{caller}: inter_block_scaling is {inter_block_scaling!r}, expected True, False or "
            f"None"
        )
    if inter_wire_dtype is not None and inter_wire_dtype not in (*_WIRE_DTYPES, torch.float64):
        raise TypeError(
            f"{caller}: inter_wire_dtype is {inter_wire_dtype!r}, expected one of {_WIRE_DTYPES}"
        )


def check_factor(name: str, factor: float) -> None:
    try:
        is_usable = math.isfinite(factor) and factor > 0
    except TypeError as error:
        raise TypeError(f"rota.HookState: {name} is {factor!r}, expected a number") from error
    if not is_usable:
        raise ValueError(f"rota.HookState: {name} is {factor}, expected finite and positive")


def check_seed(caller: str, seed: object) -> None:
    if not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise ValueError(f"{caller}: seed is {seed!r}, expected an int in [0, 2**64)")


def check_algorithm(algorithm: object) -> None:
    if algorithm not in _C.ALGORITHMS:
        raise ValueError(
            f"rota.HookState: algorithm is {algorithm!r}, expected one of {_C.ALGORITHMS}"
        )


def check_num_shards(num_shards: object) -> None:
    if num_shards is None:
        return
    if not (
        isinstance(num_shards, int)
        and 0 < num_shards <= MAX_NUM_SHARDS
        and num_shards.bit_count() == 1
    ):
        raise ValueError(
            f"rota.HookState: num_shards is {num_shards!r}, expected a power of two up to 2**30, "
            f"or None"
        )


def listed(caller: str, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, torch.nn.Module) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"{caller}: parameters is of type {type(parameters).__name__}, expected tensors; pass "
            f"model.parameters()"
        )
    tensors = list(parameters)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{caller}: parameters holds a {type(tensor).__name__}, expected tensors; pass "
                f"model.parameters()"
            )
    return tensors


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_state_dict(caller: str, state_dict: object, keys: Iterable[str]) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{caller}.load_state_dict: state_dict is of type {type(state_dict).__name__}, "
            f"expected what {caller}.state_dict() gave"
        )
    if missing := [key for key in keys if key not in state_dict]:
        raise ValueError(
            f"{caller}.load_state_dict: state_dict lacks {missing}, expected what "
            f"{caller}.state_dict() gave"
        )
