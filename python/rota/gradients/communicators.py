"""The communicator that all hooks of a group share, and word of the errors that end it."""

from __future__ import annotations

import weakref

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


# What each group's hooks share; dropped with it.
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
