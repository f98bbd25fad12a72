"""What carries messages between hosts: a torch process group that can send and recv."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Given the group's store; collective. Returns the backend, or None and why it cannot connect.
ConnectEngine = Callable[[dist.Store], "tuple[dist._Backend | None, str]"]
# Given rank and world_size. Returns the engine's name, which must be the same on every rank; why
# this rank cannot use it, or an empty text; and how to connect it.
ChooseEngine = Callable[[int, int], tuple[str, str, ConnectEngine]]


def engine_chooser(given: dist.ProcessGroup | None, timeout: timedelta) -> ChooseEngine:
    """Returns what chooses the engine of a group, once its ranks turn out to be on several hosts.

    Args:
        given: the user's own group, of the same ranks in the same order. None: a Gloo group is
            made; GLOO_SOCKET_IFNAME chooses its interface.
        timeout: of the Gloo group's connections.
    """

    def choose(rank: int, world_size: int) -> tuple[str, str, ConnectEngine]:
        if given is None:
            return "None", "", lambda store: _connect_gloo(store, rank, world_size, timeout)
        return "a group of yours", _problem_of(given, rank, world_size), lambda _: (_cpu(given), "")

    return choose


def _cpu(group: dist.ProcessGroup) -> dist._Backend:
    return group._get_backend(torch.device("cpu"))


def _problem_of(given: dist.ProcessGroup, rank: int, world_size: int) -> str:
    """Why a group cannot be the engine, or an empty text."""
    if not isinstance(given, dist.ProcessGroup):
        return f"the engine is {given!r}, expected a ProcessGroup that this rank is in"
    if given.size() != world_size or given.rank() != rank:
        return (
            f"the engine is a group of {given.size()} ranks, in which this is rank {given.rank()}; "
            f"expected {world_size} ranks and rank {rank}: pass a group of the same ranks in the "
            f"same order"
        )
    try:
        _cpu(given)
    except RuntimeError:
        devices = ", ".join(str(device) for device in given._device_types)
        return (
            f"the engine is a group for {devices}, expected one for the CPU, since messages are in "
            f"the host's memory; pass one such as dist.new_group(backend='gloo')"
        )
    return ""


def _connect_gloo(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> tuple[dist._Backend | None, str]:
    try:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout), ""
    except RuntimeError as error:
        return None, (
            f"Gloo does not connect the hosts ({error}); is the network up, and "
            f"GLOO_SOCKET_IFNAME right?"
        )
