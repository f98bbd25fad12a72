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
from rota.errors import PeerFailed
from rota.rendezvous.groups import check_group, store_of
from rota.rendezvous.joint import JointSteps


class _Shared:
    """What all hooks of a group share: a communicator, and word of the errors that end it.

    An error that one rank raises in a hook ends the communicator, since the others may wait in it.
    If it does not exist yet, they hear of the error as of one that was raised in making it. The
    next call of each rank then makes another. All ranks take part in every call of a hook, so they
    count alike.
    """

    def __init__(self) -> None:
        self._number = 0  # of the communicators so far, with those that were not made
        self._communicator: Communicator | None = None
        self._engine: dist.ProcessGroup | None = None

    def communicator(
        self, group: dist.ProcessGroup, engine: dist.ProcessGroup | None
    ) -> Communicator:
        has_failed = self._communicator is not None and self._communicator.has_failed
        if has_failed and _ended(group).check([str(self._number)]):
            self._communicator = None
        if self._communicator is None:
            self._number += 1
            self._communicator, self._engine = Communicator(group, engine=engine), engine
        if engine is not None and engine is not self._engine:
            raise ValueError(
                "rota hooks: the group's communicator already has "
                + ("no engine" if self._engine is None else "another engine")
                + "; all hooks of a group share it: pass the engine to the first one that runs"
            )
        return self._communicator

    def tell(self, group: dist.ProcessGroup, reason: str) -> None:
        """Makes the other ranks' calls fail with this reason."""
        if self._communicator is not None:
            _ended(group).set(str(self._number), "")  # abort() tells the text
            self._communicator.abort(reason)
        else:
            self._number += 1
            JointSteps.over(group, "Communicator").fail(reason, PeerFailed)


def _ended(group: dist.ProcessGroup) -> dist.Store:
    """By number: whether an error in a hook has ended the communicator."""
    return store_of(group, "hook_errors")


# Of each group; dropped with it.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


def communicator_of(
    process_group: dist.ProcessGroup | None, engine: dist.ProcessGroup | None = None
) -> Communicator:
    """The communicator that all hooks of a group share; the first call makes it, with this engine.

    Raises:
        ValueError: it has been made with another engine.
        rota.PeerFailed: another rank has raised an error, which the text names.
    """
    group = _group_of(process_group)
    return _shared.setdefault(group, _Shared()).communicator(group, engine)


def tell_peers_of(process_group: dist.ProcessGroup | None, reason: str) -> None:
    """Makes what the hooks of a group do on the other ranks fail with this reason."""
    group = _group_of(process_group)
    _shared.setdefault(group, _Shared()).tell(group, reason)


def _group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    check_group("rota hooks", "the state", process_group)
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(
            "rota hooks: torch.distributed is not initialised; call dist.init_process_group first"
        )
    return group


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
