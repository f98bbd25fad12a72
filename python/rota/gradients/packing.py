"""Flat buckets of gradients for training loops without DDP, laid out like DDP's buckets.

This module copies gradients in and out; reduction.py decides when, and reduces them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from rota import options
from rota.gradients.layout import num_reals, shaped
from rota.gradients.state import HookState
from rota.sharding import as_dtensor, like, local_of


class _Kind(NamedTuple):
    """What a parameter must have in common with the others of its bucket."""

    device: torch.device
    dtype: torch.dtype  # of the real numbers in its gradient


class _Shape(NamedTuple):
    """What a plan has to know of a parameter; another one needs another plan."""

    kind: _Kind
    size: torch.Size  # on this rank
    stride: tuple[int, ...]


def _shape_of(parameter: torch.Tensor) -> _Shape:
    local = local_of(parameter)
    dtype = parameter.grad_dtype or parameter.dtype
    kind = _Kind(local.device, dtype.to_real() if dtype.is_complex else dtype)
    return _Shape(kind, local.size(), local.stride())


class PackedBucket:
    """Gradients of one dtype on one device; has what rota.fused_hook reads of a dist.GradBucket."""

    def __init__(self, parameters: Sequence[torch.Tensor], kind: _Kind, index: int) -> None:
        self._refs = [weakref.ref(parameter) for parameter in parameters]
        lengths = [num_reals(parameter) for parameter in parameters]
        self._buffer = torch.empty(sum(lengths), dtype=kind.dtype, device=kind.device)
        self._parts = self._buffer.split(lengths)
        self._index = index

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for ref in self._refs if (parameter := ref()) is not None]

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def _views(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for parameter, part in zip(self.parameters(), self._parts, strict=True):
            yield parameter, shaped(part, parameter)

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the gradients in; zeros for parameters without one."""
        for parameter, view in self._views():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(local_of(parameter.grad))

    @torch.no_grad()
    def unpack(self, wanted: set[int]) -> None:
        """Copies the buffer to the gradients of the wanted parameters, which are given by id()."""
        for parameter, view in self._views():
            if parameter.grad is not None:
                local_of(parameter.grad).copy_(view)
            elif id(parameter) in wanted:
                parameter.grad = like(view.clone(), parameter)


class Plan:
    """How a list of parameters is cut into buckets, in the reverse of its order.

    Gradients come in about that order in a backward pass. Every rank makes the same plan from the
    same list, whichever gradients exist.

    Its digest is of names, where the state knows them, of shapes, and of their order.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], bucket_cap_bytes: int, state: HookState
    ) -> None:
        """Raises TypeError: a dtype cannot be reduced."""
        self._refs = [weakref.ref(parameter) for parameter in parameters]
        self._shapes = [_shape_of(parameter) for parameter in parameters]
        self._bucket_cap_bytes = bucket_cap_bytes
        listed = [(state.name_of(p, ""), *local_of(p).shape) for p in parameters]
        self.digest = hashlib.blake2b(repr(listed).encode(), digest_size=8).digest()
        groups: list[tuple[_Kind, list[torch.Tensor]]] = []
        filling: dict[_Kind, tuple[list[torch.Tensor], int]] = {}
        for i in reversed(range(len(parameters))):
            kind = self._shapes[i].kind
            if kind.dtype not in options.BUCKET_DTYPES:
                raise TypeError(
                    f"rota.reduce_gradients: the gradient of {state.name_of(parameters[i], str(i))}"
                    f" is {kind.dtype}, expected one of {options.BUCKET_DTYPES}; leave it out"
                )
            group, num_bytes = filling.setdefault(kind, ([], 0))
            group.append(parameters[i])
            num_bytes += num_reals(parameters[i]) * kind.dtype.itemsize
            filling[kind] = group, num_bytes
            if num_bytes >= bucket_cap_bytes:
                groups.append((kind, group))
                del filling[kind]
        groups += [(kind, group) for kind, (group, _) in filling.items()]
        self.buckets = [
            PackedBucket(group, kind, index) for index, (kind, group) in enumerate(groups)
        ]

    def fits(self, parameters: Sequence[torch.Tensor], bucket_cap_bytes: int) -> bool:
        return (
            bucket_cap_bytes == self._bucket_cap_bytes
            and len(parameters) == len(self._shapes)
            and all(
                ref() is parameter and shape == _shape_of(parameter)
                for ref, shape, parameter in zip(self._refs, self._shapes, parameters, strict=True)
            )
        )


def check_gradient(parameter: torch.Tensor, name: str) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"rota.reduce_gradients: the gradient of {name} is {gradient.layout}, expected a "
            f"dense one; make its layer with sparse=False, or leave it out"
        )
    as_parameter, as_gradient = as_dtensor(parameter), as_dtensor(gradient)
    placements = as_parameter.placements if as_parameter is not None else None
    placements_now = as_gradient.placements if as_gradient is not None else None
    if placements_now != placements:
        raise ValueError(
            f"rota.reduce_gradients: the gradient of {name} is placed {placements_now}, the "
            f"parameter {placements}; give both the same placements (DTensor.redistribute) first"
        )
    size, expected_size = local_of(gradient).size(), local_of(parameter).size()
    if size != expected_size:
        raise ValueError(
            f"rota.reduce_gradients: the gradient of {name} has shape {list(size)}, the parameter "
            f"{list(expected_size)}; call zero_grad() after changing a parameter's shape"
        )
