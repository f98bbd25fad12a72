"""DDP communication hooks: replace torch's hooks of the same names, without their copies.

The gradient bucket is cast on its way into and out of the transport slots, so no 16-bit copy of it
is ever made. Contributions and the result are rounded once each, and sums are kept in float32.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
# types themselves, and refuses strings.

import weakref

import torch
import torch.distributed as dist

from rota.communicator import Communicator

# Each group's communicator for hooks, and its engine; dropped with the group.
_communicators: weakref.WeakKeyDictionary[
    dist.ProcessGroup, tuple[Communicator, dist.ProcessGroup | None]
] = weakref.WeakKeyDictionary()


def communicator_of(
    process_group: dist.ProcessGroup | None, engine: dist.ProcessGroup | None = None
) -> Communicator:
    """The communicator that all hooks of a group share; the first call makes it, with this engine.

    Raises:
        ValueError: it has been made with another engine.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(
            "rota hooks: torch.distributed is not initialised; call dist.init_process_group first"
        )
    if group not in _communicators:
        _communicators[group] = Communicator(group, engine=engine), engine
    communicator, engine_of_first = _communicators[group]
    if engine is not None and engine is not engine_of_first:
        raise ValueError(
            "rota hooks: the group's communicator already has "
            + ("no engine" if engine_of_first is None else "another engine")
            + "; all hooks of a group share it: pass the engine to the first one that runs"
        )
    return communicator


def _average(
    process_group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
    wire_dtype: torch.dtype | None,
) -> torch.futures.Future[torch.Tensor]:
    communicator = communicator_of(process_group)
    return communicator.all_reduce_future(bucket.buffer(), "avg", wire_dtype)


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket over the ranks; a drop-in for torch's `allreduce_hook`.

    Args:
        process_group: the ranks, on any backend; None is the default group. The first call of a
            process makes a communicator over it, which is a collective call.
        bucket: DDP's bucket; its buffer is averaged in place, in its own dtype.

    Returns:
        A future of the buffer. The reduction runs on a progress thread.

    Example:
        >>> ddp.register_comm_hook(None, rota.allreduce_hook)
    """
    return _average(process_group, bucket, None)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket with float16 on the wire; a drop-in for torch's `fp16_compress_hook`.

    Unlike torch's, sums are kept in float32 and divided before the one rounding of the result. Like
    torch's, a gradient beyond 65504 becomes Inf, and one below 6e-8 becomes 0.

    Args and result as `allreduce_hook`.
    """
    return _average(process_group, bucket, torch.float16)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket with bfloat16 on the wire; a drop-in for torch's `bf16_compress_hook`.

    bfloat16 has float32's range with 8 bits of precision. Args and result as `allreduce_hook`.
    """
    return _average(process_group, bucket, torch.bfloat16)


# Without CUDA and NCCL, DDP refuses a hook with torch's own name, going by `__name__` alone.
bf16_compress_hook.__name__ = "rota_bf16_compress_hook"
