"""Checks of rota.HookState's options; their errors say what is valid."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from rota import _C


def _dtypes(names: tuple[str, ...]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names)


BUCKET_DTYPES = _dtypes(_C.BUCKET_DTYPES)
_WIRE_DTYPES = _dtypes(_C.WIRE_DTYPES)
_NARROW_DTYPES = _dtypes(_C.BLOCK_SCALED_DTYPES)  # the others have float32's range


def is_narrow(wire_dtype: object) -> bool:
    """Whether a wire dtype's range is so small that blocks are scaled by default."""
    return wire_dtype in _NARROW_DTYPES


def check_group(name: str, group: object) -> None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rota.HookState: this rank is not in the {name}; only its members make a state over it"
        )
    raise TypeError(
        f"rota.HookState: {name} is of type {type(group).__name__}, expected a ProcessGroup or None"
    )


def check_wire(wire_dtype: object, block_scaling: bool) -> None:
    if wire_dtype not in _WIRE_DTYPES:
        raise TypeError(
            f"rota.HookState: wire_dtype is {wire_dtype!r}, expected one of {_WIRE_DTYPES}"
        )
    if block_scaling and wire_dtype not in _NARROW_DTYPES:
        raise ValueError(
            f"rota.HookState: block_scaling is for {_NARROW_DTYPES}; {wire_dtype} has the range "
            f"of float32 without it, leave it out"
        )


def check_factor(name: str, factor: float) -> None:
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"rota.HookState: {name} is {factor}, expected finite and positive")


def check_seed(seed: object) -> None:
    if not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise ValueError(f"rota.HookState: seed is {seed!r}, expected an int in [0, 2**64)")


def check_algorithm(algorithm: object) -> None:
    if algorithm not in _C.ALGORITHMS:
        raise ValueError(
            f"rota.HookState: algorithm is {algorithm!r}, expected one of {_C.ALGORITHMS}"
        )


def check_num_shards(num_shards: object) -> None:
    if num_shards is None:
        return
    if not (isinstance(num_shards, int) and num_shards > 0 and num_shards.bit_count() == 1):
        raise ValueError(
            f"rota.HookState: num_shards is {num_shards!r}, expected a power of two or None"
        )
