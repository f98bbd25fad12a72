"""FSDP2 with a narrow wire: its all-gather and reduce-scatter, and one call that installs them.

They are the custom communication that torch's FSDPModule takes (`set_custom_all_gather` and
`set_custom_reduce_scatter`, torch/distributed/fsdp/_fully_shard/_fsdp_api.py; the protocol is the
same in torch 2.11 to 2.15).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from rota import _C, _torch

__all__ = ["AllGather", "ReduceScatter", "use"]

# float8 travels in scaled blocks; the others are plain roundings.
PARAMETER_WIRE_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
GRADIENT_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Collective:
    """Keeps FSDP's buffers on the CPU for the next of their lengths, in memory of `rota.empty`,
    where peers read them in place."""

    _wire_dtypes: tuple[torch.dtype, ...]

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        _check_dtype(type(self).__name__, "wire_dtype", wire_dtype, self._wire_dtypes)
        self._pool = _C.HeapPool()
        self.wire_dtype = wire_dtype

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer for FSDP, of any values; on a GPU that of `torch.empty`."""
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        lengths = [int(length) for length in size]
        return self._pool.empty(math.prod(lengths), dtype).view(lengths)


class AllGather(_Collective, _torch.FsdpAllGather):
    """Gathers FSDP2's parameters; for `FSDPModule.set_custom_all_gather`.

    With a wire dtype each rank encodes its shard once, and all ranks, its owner included, compute
    with what they decode from the same bytes; the sharded parameters keep their precision.

    Args:
        wire_dtype: torch.bfloat16 or float16; float8_e4m3fn or float8_e5m2 in scaled blocks of 32
            or 64 elements, which count from the start of a shard (OCP Microscaling specification
            1.0); None for the parameters' own.

    Raises:
        TypeError: wire_dtype is none of these.
    """

    _wire_dtypes = PARAMETER_WIRE_DTYPES

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Concatenates the shards of all ranks; FSDP calls it.

        Args:
            output_tensor: (world_size * length,), on the CPU or a GPU.
            input_tensor: (length,) of the same dtype; may be this rank's part of the output.
            group: the ranks, on the backend "rota".
            async_op: return at once, with a Work to wait for. Otherwise it blocks on the CPU, and
                is queued on the current stream on a GPU.

        Raises:
            ValueError: the group is not rota's.
            TypeError: the tensors are no floats, or are narrower than the wire dtype. FSDP gathers
                uint8 where the parameters of one module differ in dtype.
            Other errors as `rota.Communicator`.
        """
        backend = _backend_of("AllGather", group, input_tensor.device)
        if self.wire_dtype is None or self.wire_dtype == input_tensor.dtype:
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return cast("dist.Work | None", work)
        if not input_tensor.is_floating_point():
            raise TypeError(
                f"rota.fsdp.AllGather: input_tensor is {input_tensor.dtype}, expected floats for "
                f"wire_dtype {self.wire_dtype}; FSDP gathers bytes where the parameters of one "
                f"module differ in dtype: give them one param_dtype, or leave wire_dtype out"
            )
        _check_not_wider(self, input_tensor, self.wire_dtype)
        in_blocks = self.wire_dtype.itemsize == 1
        work = backend.all_gather_in(
            self.wire_dtype, in_blocks, output_tensor, input_tensor, async_op
        )
        return work if async_op else None


class ReduceScatter(_Collective, _torch.FsdpReduceScatter):
    """Reduces and scatters FSDP2's gradients; for `FSDPModule.set_custom_reduce_scatter`.

    Contributions are rounded once to the wire dtype, summed in float32 in the order of the group's
    `rota.BackendOptions` (by default ascending rank), and the sum (or the average) is rounded once
    to the wire dtype, as in `rota.Communicator.all_reduce`.

    Args:
        wire_dtype: torch.float32, bfloat16 or float16, not wider than the gradients (in FSDP's
            `reduce_dtype`); None for the gradients' own. float16 is not scaled: a gradient beyond
            65504 becomes Inf, and one below 6e-8 becomes 0.

    Raises:
        TypeError: wire_dtype is none of these.
    """

    _wire_dtypes = GRADIENT_WIRE_DTYPES

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Leaves this rank's part of the reduced gradients in `output_tensor`; FSDP calls it.

        Args:
            output_tensor: (length,), on the CPU or a GPU.
            input_tensor: (world_size * length,) of the same dtype.
            group: the ranks, on the backend "rota".
            op: SUM, AVG or PREMUL_SUM.
            async_op: as in `AllGather`, as are the errors.
        """
        backend = _backend_of("ReduceScatter", group, input_tensor.device)
        if self.wire_dtype is None or self.wire_dtype == input_tensor.dtype:
            work = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
            return cast("dist.Work | None", work)
        _check_not_wider(self, input_tensor, self.wire_dtype)
        work = backend.reduce_scatter_in(self.wire_dtype, output_tensor, input_tensor, op, async_op)
        return work if async_op else None


def use(
    model: torch.nn.Module,
    wire_dtype: torch.dtype | None = None,
    *,
    parameter_wire_dtype: torch.dtype | None = None,
) -> None:
    """Lets all of a model's FSDP modules communicate through `AllGather` and `ReduceScatter`.

    Call it on every rank after the last `fully_shard`, with the same dtypes. With a mesh of one
    dimension and without `parameter_wire_dtype`, training gives the bits of DistributedDataParallel
    with a hook of rota that has the same `wire_dtype`. The all-reduce between the replicas of a
    hybrid shard takes that of `rota.BackendOptions`.

    Args:
        model: a module on which, or inside which, `fully_shard` was called over groups on the
            backend "rota".
        wire_dtype: of the gradients, as in `ReduceScatter`.
        parameter_wire_dtype: of the parameters, as in `AllGather`.

    Raises:
        TypeError: there is no FSDPModule in the model, or a wire dtype is unknown.
        ValueError: a module shards over a group of another backend; nothing has changed then.

    Example:
        >>> fully_shard(model)
        >>> rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=torch.float8_e4m3fn)
    """
    _check_dtype("use", "wire_dtype", wire_dtype, GRADIENT_WIRE_DTYPES)
    _check_dtype("use", "parameter_wire_dtype", parameter_wire_dtype, PARAMETER_WIRE_DTYPES)
    children = model.modules() if isinstance(model, torch.nn.Module) else ()
    modules = [module for module in children if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError(
            f"rota.fsdp.use: model is of type {type(model).__name__} without an FSDPModule in it, "
            f"expected one that torch.distributed.fsdp.fully_shard was called on"
        )
    for module in modules:
        for group, device in _torch.fsdp_groups(module):
            _backend_of("use", group, device)
    all_gather = AllGather(parameter_wire_dtype)
    reduce_scatter = ReduceScatter(wire_dtype)
    for module in modules:
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)


def _check_dtype(
    caller: str, argument: str, dtype: object, expected: tuple[torch.dtype, ...]
) -> None:
    if dtype is not None and dtype not in expected:
        raise TypeError(
            f"rota.fsdp.{caller}: {argument} is {dtype!r}, expected None or one of {expected}"
        )


def _check_not_wider(caller: object, tensor: torch.Tensor, wire_dtype: torch.dtype) -> None:
    if tensor.dtype.itemsize < wire_dtype.itemsize:
        raise TypeError(
            f"rota.fsdp.{type(caller).__name__}: wire_dtype is {wire_dtype} for tensors of "
            f"{tensor.dtype}, expected one that is not wider; set it, or the policy's dtypes"
        )


def _backend_of(caller: str, group: dist.ProcessGroup, device: torch.device) -> _C.ProcessGroupRota:
    backend = _torch.unwrapped(_torch.backend_of(group, device))
    if not isinstance(backend, _C.ProcessGroupRota):
        raise ValueError(
            f"rota.fsdp.{caller}: group {group.group_name!r} is on the backend {backend.name()!r} "
            f"for {device.type} tensors, expected 'rota'; make the mesh after "
            f"dist.init_process_group('rota'), or of groups of dist.new_group(backend='rota')"
        )
    return backend


# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
