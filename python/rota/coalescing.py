"""Ends a coalescing block that an exception has left.

torch's manager of such a block has no `finally`. Where an exception leaves it, torch goes on
listing the group's sums for a block that never ends, and runs none of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch.distributed as dist


def watch_block(leave: Callable[[], None]) -> None:
    """Ends the block that torch's manager is starting once the manager is gone.

    Args:
        leave: ends it for rota; does nothing if it has ended as it should.
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

    weakref.finalize(manager, end).atexit = False
