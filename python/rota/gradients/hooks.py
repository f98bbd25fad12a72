"""DDP communication hooks: replace torch's hooks of the same names, without their copies.

The gradient bucket is cast on its way into and out of the transport slots, so no 16-bit copy of it
is ever made. Contributions and the result are rounded once each, and sums are kept in float32.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
# types themselves, and refuses strings.

import torch
import torch.distributed as dist

from rota.gradients.communicators import communicator_of, future_of
from rota.gradients.state import HookState, telling_peers


def fused_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket over the ranks, in float16 by default: one pass reads it, one writes it.

    Args:
        state: the options; one state per model.
        bucket: DDP's bucket of dense float32, float64, float16 or bfloat16 gradients; its buffer
            is reduced in place.

    Returns:
        A future of the buffer. The reduction of CPU gradients runs on a progress thread, that of
        CUDA gradients on the communicator's stream. The first bucket of a process makes the
        communicator, which is a collective call.

    Raises:
        TypeError, ValueError: the gradients or the group cannot be used. Other ranks raise the same
            error, or rota.PeerFailed with its text.
        rota.Mismatch: the ranks' states have different options.

    Example:
        >>> ddp.register_comm_hook(rota.HookState(), rota.fused_hook)
    """

    def start() -> torch.futures.Future[torch.Tensor]:
        with telling_peers(state):
            if not isinstance(state, HookState):
                raise TypeError(
                    f"rota.fused_hook: its state is of type {type(state).__name__}; register it as "
                    f"ddp.register_comm_hook(rota.HookState(...), rota.fused_hook)"
                )
            return state.reduce(bucket)

    return future_of(bucket, start)


def _average(
    process_group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
    wire_dtype: torch.dtype | None,
) -> torch.futures.Future[torch.Tensor]:
    def start() -> torch.futures.Future[torch.Tensor]:
        with telling_peers(process_group):
            communicator = communicator_of(process_group)
            return communicator.all_reduce_future(bucket.buffer(), "avg", wire_dtype)

    return future_of(bucket, start)


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
    """
    return _average(process_group, bucket, None)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket with float16 on the wire; a drop-in for torch's `fp16_compress_hook`.

    Sums are kept in float32. As with torch's, a gradient beyond 65504 becomes Inf, and one below
    6e-8 becomes 0. Args and result as `allreduce_hook`.
    """
    return _average(process_group, bucket, torch.float16)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket with bfloat16 on the wire; a drop-in for torch's `bf16_compress_hook`.

    Args and result as `allreduce_hook`.
    """
    return _average(process_group, bucket, torch.bfloat16)


# Without CUDA and NCCL, DDP refuses a hook with torch's own name, going by `__name__` alone.
bf16_compress_hook.__name__ = "rota_bf16_compress_hook"
