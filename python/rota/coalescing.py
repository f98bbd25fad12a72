"""What rota does for torch's coalescing blocks: ends one that an exception has left, and refuses a
batch of messages that would overwrite each other.

torch's manager of such a block has no `finally`. Where an exception leaves it, torch goes on
listing the group's sums for a block that never ends, and runs none of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from rota import _C, _torch


def watch_block(leave: Callable[[], None]) -> None:
    """Ends the block that torch's manager is starting, for rota by `leave`, once the manager is
    gone.

    Raises ValueError: in its batch_isend_irecv, a message that is received shares memory with
    another one. None has started.
    """
    block = _torch.coalescing_block(sys._getframe(1))
    if block is None:
        return  # the group's methods were called without a manager

    forget = block.forget  # not the block, whose manager must not live as long as this

    def end() -> None:
        forget()
        leave()

    try:
        ways: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for message in block.messages:
            if message.tensor.layout == torch.strided:  # others are refused one by one
                ways[message.op is dist.isend].append(message.tensor)
        _C.check_messages_apart(sent=ways[True], received=ways[False])
    except ValueError:
        end()
        raise
    weakref.finalize(block.manager, end).atexit = False
