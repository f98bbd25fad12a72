"""Collectives without graph breaks: functions over the operators `torch.ops.rota.*`.

Under torch.compile use these instead of the methods of `rota.Communicator`, at which Dynamo breaks
the graph. Operators take a communicator by its name, so graphs hold no objects.

If a compiler drops or reorders a collective on one rank, the ranks wait for each other forever. Two
collectives need not share a tensor that keeps them in order. So every operator declares that it
writes to `_order`, although none of them touches it: each then depends on all before it, whatever
its communicator, and none can be dropped, because a write to an input counts as a result. torch has
effect tokens for this purpose (torch/_library/effects.py), but inductor 2.11 to 2.13 reorders
operators that have them.

A compiled operator does not mutate users' tensors either: when inductor 2.11 to 2.15 considers the
copy of a slice superfluous, it passes such an operator the wrong elements. So an in-place
collective is compiled as one that returns a new tensor, followed by a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rota import _torch
from rota.communicator import Communicator, communicator_named

__all__ = ["all_gather", "all_reduce", "all_reduce_", "barrier", "broadcast", "broadcast_"]

# On the CPU for collectives on all devices, so that they share one order. For this reason inductor
# leaves collectives out of the CUDA graphs that it makes itself.
_order = torch.zeros(1, dtype=torch.float32, device="cpu")
_rota = torch.ops.rota


def all_reduce(
    tensor: Tensor,
    communicator: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduces `tensor` over all ranks into a new tensor, with the same bits on every rank.

    Differentiable for "sum" and "avg": gradients are those of the sum of all ranks' losses, reduced
    in the same way. The backward pass is then a collective on every rank.

    Args:
        tensor: any shape, strided; dtype and device as `Communicator.all_reduce` takes them.
        communicator: over the ranks; keep it alive as long as compiled code may run.
        op, algorithm, wire_dtype: as `Communicator.all_reduce`.

    Returns:
        a contiguous tensor of the same shape, dtype and device.

    Raises:
        rota.RotaError: the communicator is gone; and what `Communicator.all_reduce` raises.
        NotImplementedError: in the backward pass, for ops other than "sum" and "avg".

    Blocks, and uses streams, as `Communicator.all_reduce` does.

    Example:
        >>> @torch.compile(fullgraph=True)
        ... def row_parallel(x):
        ...     return rota.ops.all_reduce(x @ own_rows_of_weight, communicator)
    """
    out: Tensor = _AllReduce.apply(tensor, op, algorithm, wire_dtype, _name_of(communicator))
    return out


def all_reduce_(
    tensor: Tensor,
    communicator: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduces `tensor` over all ranks in place and returns it; otherwise as `all_reduce`.

    When compiled, it costs up to two copies of the tensor; `all_reduce` saves one or both.
    """
    if _needs_gradient(tensor):
        return tensor.copy_(all_reduce(tensor, communicator, op, algorithm, wire_dtype))
    _rota.all_reduce_(tensor, _order, op, algorithm, wire_dtype, _name_of(communicator))
    return tensor


def broadcast(tensor: Tensor, communicator: Communicator, root: int = 0) -> Tensor:
    """Returns rank `root`'s values in a new tensor; other ranks' `tensor` only gives the shape.

    Differentiable: the root gets the sum of all ranks' gradients, the others zeros. All else is as
    in `all_reduce`, with `Communicator.broadcast`.
    """
    out: Tensor = _Broadcast.apply(tensor, root, _name_of(communicator))
    return out


def broadcast_(tensor: Tensor, communicator: Communicator, root: int = 0) -> Tensor:
    """Copies rank `root`'s values into every rank's `tensor`, returns it; else as `broadcast`."""
    if _needs_gradient(tensor):
        return tensor.copy_(broadcast(tensor, communicator, root))
    _rota.broadcast_(tensor, _order, root, _name_of(communicator))
    return tensor


def all_gather(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Concatenates the tensors of all ranks, in ascending rank.

    Differentiable: each rank gets its part of the sum of all ranks' gradients.

    Args:
        tensor: (length, ...), same shape and dtype on every rank, strided; a scalar counts as (1,).

    Returns:
        (world_size * length, ...), contiguous, of the same dtype and device.

    All else is as in `all_reduce`, with `Communicator.all_gather`.
    """
    out: Tensor = _AllGather.apply(tensor, _name_of(communicator))
    return out


def barrier(communicator: Communicator) -> None:
    """Returns once every rank has called it; when compiled, stays in order with collectives."""
    _rota.barrier(_order, _name_of(communicator))


def _name_of(communicator: Communicator) -> str:
    name: object = getattr(communicator, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"rota.ops: communicator is of type {type(communicator).__name__}, expected a "
            f"rota.Communicator"
        )
    return name


def _needs_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _rank_of(communicator: str) -> int:
    return communicator_named(communicator).rank


# Names are never reused, so the rank is a constant of the graph.
_torch.assume_constant(_rank_of)


# ---- the implementations: one for all devices, because a communicator takes tensors of each


def _run_all_reduce_(
    tensor: Tensor,
    _order: Tensor,
    op: str,
    algorithm: str,
    wire_dtype: torch.dtype | None,
    communicator: str,
) -> None:
    communicator_named(communicator).all_reduce(tensor, op, algorithm, wire_dtype)


def _run_broadcast_(tensor: Tensor, _order: Tensor, root: int, communicator: str) -> None:
    communicator_named(communicator).broadcast(tensor, root)


def _empty_for_all_gather(tensor: Tensor, _order: Tensor, communicator: str) -> Tensor:
    length, *rest = tensor.shape or (1,)
    return tensor.new_empty((communicator_named(communicator).world_size * length, *rest))


def _run_all_gather(tensor: Tensor, order: Tensor, communicator: str) -> Tensor:
    out = _empty_for_all_gather(tensor, order, communicator)
    communicator_named(communicator).all_gather(out, tensor)
    return out


def _run_barrier(_order: Tensor, communicator: str) -> None:
    communicator_named(communicator).barrier()


# ---- registration with torch; not by torch.library.custom_op, whose calls cost 10 us more

_library = torch.library.Library("rota", "DEF")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = _implement(schema, run)
    torch.library.register_fake(f"rota::{name}", fake, lib=_library)


def _define_both_forms(name: str, arguments: str, run: Callable[..., None]) -> None:
    """Defines `name`, which returns a new tensor, and the in-place `name_`, which calls `run`."""

    def run_on_copy(tensor: Tensor, *args: Any) -> Tensor:
        out = tensor.clone(memory_format=torch.contiguous_format)
        run(out, *args)
        return out

    def fake(tensor: Tensor, *args: Any) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def run_in_place(tensor: Tensor, *args: Any) -> None:
        run(tensor, *args)
        if not tensor.is_inference():  # tells autograd that a saved tensor has changed
            torch.autograd.graph.increment_version(tensor)

    def replace(tensor: Tensor, *args: Any) -> None:
        tensor.copy_(getattr(_rota, name)(tensor, *args))

    _define(f"{name}(Tensor tensor, Tensor(a!) order, {arguments}) -> Tensor", run_on_copy, fake)
    _implement(f"{name}_(Tensor(a!) tensor, Tensor(b!) order, {arguments}) -> ()", run_in_place)
    # Compilers decompose it into this.
    _library.impl(f"{name}_", replace, "CompositeImplicitAutograd")


def _implement(schema: str, run: Callable[..., Any]) -> str:
    _library.define(schema)
    name = schema.partition("(")[0]
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    return name


_define_both_forms(
    "all_reduce",
    "str op, str algorithm, ScalarType? wire_dtype, str communicator",
    _run_all_reduce_,
)
_define_both_forms("broadcast", "int root, str communicator", _run_broadcast_)
_define(
    "all_gather(Tensor tensor, Tensor(a!) order, str communicator) -> Tensor",
    _run_all_gather,
    _empty_for_all_gather,
)
_define("barrier(Tensor(a!) order, str communicator) -> ()", _run_barrier, lambda *args: None)


# ---- gradients: those of the sum of all ranks' losses; autograd has no type for its ctx


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        op: str,
        algorithm: str,
        wire_dtype: torch.dtype | None,
        communicator: str,
    ) -> Tensor:
        ctx.arguments = (op, algorithm, wire_dtype, communicator)
        out: Tensor = _rota.all_reduce(tensor, _order, op, algorithm, wire_dtype, communicator)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.arguments[0] not in ("sum", "avg"):
            raise NotImplementedError(
                f"rota.ops.all_reduce: op '{ctx.arguments[0]}' has no gradient, expected 'sum' or "
                f"'avg'; detach the tensor"
            )
        return _AllReduce.apply(gradient, *ctx.arguments), None, None, None, None


def _sum_over_ranks(gradient: Tensor, communicator: str) -> Tensor:
    total: Tensor = _AllReduce.apply(gradient, "sum", "auto", None, communicator)
    return total


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, communicator: str) -> Tensor:
        ctx.arguments = (root, communicator)
        out: Tensor = _rota.broadcast(tensor, _order, root, communicator)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        root, communicator = ctx.arguments
        total = _sum_over_ranks(gradient, communicator)
        return total if _rank_of(communicator) == root else torch.zeros_like(total), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: str) -> Tensor:
        ctx.communicator, ctx.shape = communicator, tensor.shape
        out: Tensor = _rota.all_gather(tensor, _order, communicator)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = _sum_over_ranks(gradient, ctx.communicator)
        length = ctx.shape[0] if ctx.shape else 1
        own = total.narrow(0, _rank_of(ctx.communicator) * length, length)
        return own.view(ctx.shape), None
