"""How long waits may take: the caller's timeout, or that of the process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from rota import _torch

# The clocks of waits count nanoseconds in 64 bits, which end after 292 years.
LONGEST = timedelta(days=36500)

D = TypeVar("D", timedelta, None)


def usable(timeout: timedelta) -> timedelta:
    """The timeout, or LONGEST where that is less.

    Torch counts microseconds in 64 bits: of longer timeouts, such as timedelta.max, its groups and
    stores make negative ones.
    """
    return timeout if -LONGEST <= timeout <= LONGEST else LONGEST


def checked(timeout: object, what: str, default: D) -> timedelta | D:
    """A caller's timeout as waits can use it; `default` for None. Errors begin with `what`."""
    if timeout is None:
        return default
    if not isinstance(timeout, timedelta):
        raise TypeError(f"{what}: timeout is {timeout!r}, expected a datetime.timedelta or None")
    return usable(timeout)


def checked_positive(timeout: object, what: str, default: timedelta) -> timedelta:
    """As checked(), for what every wait of a new object may take: more than 0."""
    taken = checked(timeout, what, default)
    if timeout is not None and taken <= timedelta(0):
        raise ValueError(f"{what}: timeout is {timeout}, expected more than 0")
    return taken


class HasStore(Protocol):
    def get_group_store(self) -> dist.Store: ...


def of_store(store: dist.Store) -> timedelta:
    return usable(store.timeout)  # type: ignore[attr-defined]  # torch's stubs lack it


def of_group(pg: HasStore) -> timedelta:
    """That of the group's collectives; of ranks without a process group, their store's.

    A group that new_group() makes shares the store of the default group, and so its timeout.
    """
    if isinstance(pg, dist.ProcessGroup):
        for device in _torch.devices_of(pg):
            timeout = _torch.timeout_of(_torch.unwrapped(_torch.backend_of(pg, device)))
            if isinstance(timeout, timedelta):  # torch's `fake` backend has none
                return usable(timeout)
    return of_store(pg.get_group_store())
