"""What rota does for torch's coalescing blocks: ends one that an exception has left, and refuses a
batch of messages that would overwrite each other.

torch's manager of such a block has no `finally`. Where an exception leaves it, torch goes on
listing the group's sums for a block that never ends, and runs none of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from rota import _C


def watch_block(leave: Callable[[], None]) -> None:
    """Ends the block that torch's manager is starting once the manager is gone.

    Args:
        leave: ends it for rota; does nothing if it has ended as it should.

    Raises:
        ValueError: the block is a batch_isend_irecv in which a message that is received shares
            memory with another one. None has started.
    """
    frame = sys._getframe(1)  # of the manager, a generator, which contextlib enters
    caller = frame.f_back
    manager = getattr(caller.f_locals.get("self"), "gen", None) if caller is not None else None
    if getattr(manager, "gi_code", None) is not frame.f_code:
        return  # the group's methods were called without a manager

    group = frame.f_locals.get("group")
    blocks = getattr(dist.distributed_c10d._world, "pg_coalesce_state", {})
    listed = blocks.get(group)

    def end() -> None:
        if listed is not None and blocks.get(group) is listed:
            del blocks[group]
        leave()

    try:
        _check_batch(caller)
    except ValueError:
        end()
        raise
    weakref.finalize(manager, end).atexit = False


def _check_batch(enter: FrameType | None) -> None:
    """Looks up the messages of batch_isend_irecv, whose block this is, before the first starts."""
    batch = enter.f_back if enter is not None else None
    if batch is None or batch.f_code is not dist.batch_isend_irecv.__code__:
        return
    ways: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for message in batch.f_locals.get("p2p_op_list", ()):
        if message.tensor.layout == torch.strided:  # others are refused one by one
            ways[message.op is dist.isend].append(message.tensor)
    _C.check_messages_apart(sent=ways[True], received=ways[False])
