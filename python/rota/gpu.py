"""GPU classes for a single process: ranks that share a GPU, and gradients in a wire format."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from rota import _C, options

if TYPE_CHECKING:
    from rota._C import GradientBucket as _GradientBucket
    from rota._C import LocalGroup as _LocalGroup
else:
    # CPU builds lack them.
    _LocalGroup = getattr(_C, "LocalGroup", object)
    _GradientBucket = getattr(_C, "GradientBucket", object)


CPU_BUILD = (
    "this build of rota is for the CPU; build it anew where nvcc and a CUDA build of torch are "
    "(ROTA_CUDA=1 pip install --no-build-isolation .)"
)


def _check_build(what: str) -> None:
    if not _C.cuda_archs():
        raise RuntimeError(f"rota.{what}: {CPU_BUILD}")
    _C.cuda_devices()  # raises if there is no GPU, and says why


class LocalGroup(_LocalGroup):
    """Several ranks in one process on one GPU.

    For experiments on a single GPU: the kernels are those of `rota.Communicator`, with all ranks in
    one launch. Lists of tensors are by rank: contiguous, alike, and on the group's device. Every
    call is queued on the current stream, does not wait, and may be captured in a CUDA graph.

    Args:
        world_size: ranks, from 2 to 16.
        device: a CUDA device.
        num_channels: blocks per rank; None takes the tuning's number, by default as many as can run
            at the same time. More raise ValueError, because blocks of different ranks wait for each
            other.
        timeout: how long a rank waits for another one.
        tuning: how algorithms are chosen and tensors cut; None takes this GPU's row of the tuning
            table. It affects speed, never results.

    Raises:
        ValueError: an argument is invalid; nothing has been queued.
        rota.TransportError: there is no GPU, or the CUDA runtime fails.
        RuntimeError: this build is for the CPU.

    Example:
        >>> group = rota.gpu.LocalGroup(4)
        >>> tensors = [torch.randn(1 << 20, device="cuda") for _ in range(4)]
        >>> group.all_reduce(tensors, op="avg")
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device | str | int = "cuda",
        *,
        num_channels: int | None = None,
        timeout: timedelta = timedelta(seconds=10),
        tuning: _C.GpuTuning | None = None,
    ) -> None:
        _check_build("LocalGroup")
        super().__init__(world_size, _with_index(device), num_channels, timeout, tuning)


class GradientBucket(_GradientBucket):
    """CUDA gradients and their wire, by default float16: packed in one launch, unpacked in another.

    Does what `rota.fused_hook` does around its all-reduce, for use with your own all-reduce. The
    numbers are those of `Communicator.reduce_bucket`. Both calls are queued on the current stream.

    Args:
        gradients: contiguous, of one dtype (float32, float64, float16 or bfloat16), on one CUDA
            device. Their memory is read and written by every call.
        wire_dtype: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        block_scaling: as in `rota.HookState`.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RuntimeError: this build is for the CPU.

    Example:
        >>> bucket = rota.gpu.GradientBucket([p.grad for p in model.parameters()])
        >>> bucket.pack(contribution_factor=1 / world_size)
        >>> bucket.unpack()
        >>> num_non_finite, sum_of_squares = bucket.stats.tolist()
    """

    def __init__(
        self,
        gradients: Iterable[torch.Tensor],
        *,
        wire_dtype: torch.dtype = torch.float16,
        block_scaling: bool | None = None,
    ) -> None:
        _check_build("GradientBucket")
        in_blocks = options.scales_blocks(wire_dtype, block_scaling)
        super().__init__(list(gradients), wire_dtype, in_blocks)


def _with_index(device: torch.device | str | int) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return found
    num_gpus = torch.cuda.device_count()
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= num_gpus:
        raise ValueError(f"rota: device is {found}, but there are {num_gpus} CUDA devices")
    return torch.device("cuda", index)
