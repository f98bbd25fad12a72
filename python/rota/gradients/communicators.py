"""The communicator that all hooks of a group share, and word of the errors that end it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from rota import _C, _torch
from rota.communicator import Communicator
from rota.errors import PeerFailed, RotaError
from rota.rendezvous.groups import check_group, store_of
from rota.rendezvous.joint import JointSteps


class _Shared:
    """What all hooks of a group share.

    An error that one rank raises in a hook ends the communicator, since the others may wait in it.
    If it does not exist yet, they hear of the error as of one that was raised in making it. The
    next reduction of each rank then makes another: not a later bucket of the one that has failed,
    whose buckets DDP passes to the hook to the last. All ranks take part in every call of a hook.
    """

    def __init__(self) -> None:
        self._communicator: Communicator | None = None
        self._engine: dist.ProcessGroup | None = None
        self._has_failed = False  # the reduction under way, while there is no communicator
        self._told = ""  # the last reason that communicator() has passed on itself

    def communicator(
        self, group: dist.ProcessGroup, engine: dist.ProcessGroup | None
    ) -> Communicator:
        made = self._communicator
        # Before another is made: a peer that refuses this engine, too, would not take part.
        if made is not None and engine is not None and engine is not self._engine:
            reason = (
                "rota hooks: the group's communicator already has "
                + ("no engine" if self._engine is None else "another engine")
                + "; all hooks of a group share it: pass the engine to the first one that runs"
            )
            self._end(group, made, reason)
            self._told = reason
            raise ValueError(reason)
        if not _bucket.is_later:
            self._begin(group)
        elif self._has_failed:
            raise RotaError("rota hooks: an earlier bucket has failed; run the step again")
        if self._communicator is None:
            self._has_failed = True
            self._communicator, self._engine = Communicator(group, engine=engine), engine
            self._has_failed = False
        return self._communicator

    def _begin(self, group: dist.ProcessGroup) -> None:
        self._has_failed = False
        made = self._communicator
        if made is not None and made.has_failed and _ended(group).check([str(made.number)]):
            self._communicator = None

    def tell(self, group: dist.ProcessGroup, reason: str) -> None:
        """Makes the other ranks' calls fail with this reason."""
        if reason == self._told:
            return
        if not _bucket.is_later:
            self._begin(group)
        if self._has_failed:
            return  # on all ranks
        # The buckets before, which all ranks have given, must not fail instead.
        if _bucket.is_later and _bucket.before is not None:
            with contextlib.suppress(RotaError):
                _bucket.before.wait()
        if self._communicator is not None:
            self._end(group, self._communicator, reason)
        else:
            self._has_failed = True
            JointSteps.over(group, "Communicator").fail(reason, PeerFailed)

    def _end(self, group: dist.ProcessGroup, communicator: Communicator, reason: str) -> None:
        _ended(group).set(str(communicator.number), "")  # abort() tells the text
        communicator.abort(reason)


def _ended(group: dist.ProcessGroup) -> dist.Store:
    """By the communicators' numbers: whether an error in a hook has ended one."""
    return store_of(group, "hook_errors")


# One for each group, dropped with it.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


def communicator_of(
    process_group: dist.ProcessGroup | None, engine: dist.ProcessGroup | None = None
) -> Communicator:
    group = _group_of(process_group)
    return _shared.setdefault(group, _Shared()).communicator(group, engine)


def tell_peers_of(process_group: dist.ProcessGroup | None, reason: str) -> None:
    group = _group_of(process_group)
    _shared.setdefault(group, _Shared()).tell(group, reason)


class _BucketUnderWay(threading.local):
    """The bucket that DDP has given to a hook of this thread."""

    graph_task = -1
    is_later = False  # than the first of its pass, while the hook runs
    before: torch.futures.Future[torch.Tensor] | None = None  # of the one before, in its pass


_bucket = _BucketUnderWay()


def future_of(
    bucket: dist.GradBucket, start: Callable[[], torch.futures.Future[torch.Tensor]]
) -> torch.futures.Future[torch.Tensor]:
    """What `start` returns; or a future that raises what it raises.

    An exception out of a hook would leave torch's Reducer in the middle of a pass, for ever. DDP
    raises that of a future when the pass is over, and can begin another.
    """
    task = _torch.graph_task()
    if task == -1:
        return start()  # the hook was called by hand
    # In the first pass of a static graph, every bucket has the index 0.
    _bucket.is_later = bucket.index() > 0 or task == _bucket.graph_task
    _bucket.graph_task = task
    future = None
    try:
        future = start()
    except Exception as error:
        return _C.failed_future(error)
    finally:
        _bucket.is_later = False
        _bucket.before = None if bucket.is_last() else future
    return future


def _group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    check_group("rota hooks", "the state", process_group)
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(
            "rota hooks: torch.distributed is not initialised; call dist.init_process_group first"
        )
    return group
