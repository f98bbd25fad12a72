"""The process group that a user hands over: the names of what is made over it, in which
generation (rota.elastic), and who knows that a rank has ended.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from rota import _C, _torch


def member_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """The group, or the default group for None; TypeError or ValueError if this rank has none.

    `what` is made over it, such as "Communicator", for errors.
    """
    check_group(f"rota.{what}", "group", group)
    if not dist.is_initialized():
        raise ValueError(
            f"rota.{what}: torch.distributed is not initialised; call dist.init_process_group first"
        )
    pg = group if group is not None else dist.group.WORLD
    assert pg is not None
    return pg


def check_group(what: str, name: str, group: object) -> None:
    """Raises TypeError or ValueError unless the argument is a group of this rank, or None."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{what}: this rank is not in the {name}; only its members may pass it")
    raise TypeError(
        f"{what}: {name} is of type {type(group).__name__}, expected a ProcessGroup or None"
    )


class Ranks(Protocol):
    """What is needed of a process group in order to make something over its ranks."""

    @property
    def group_name(self) -> str: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def get_group_store(self) -> dist.Store: ...


@dataclass(frozen=True, eq=False)
class StoreRanks:
    """Ranks without a process group, which meet in a store."""

    store: dist.Store  # used for nothing else
    own_rank: int
    world_size: int
    global_ranks: Sequence[int] = ()  # in the default group, if any
    group_name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.world_size

    def get_group_store(self) -> dist.Store:
        return self.store


def next_number(pg: Ranks, what: str) -> int:
    """How many of these this rank has made over the group; all ranks count alike, so it is a name.
    The group's store counts, in which names that were used stay used."""
    counters = store_of(pg, f"count/{what}")
    return int(counters.add(str(pg.rank()), 1)) - 1


def begin_generation(name: str, check_peers: Callable[[], None]) -> None:
    """What is made from now on has names of its own in the groups' stores (rota.elastic).

    check_peers raises if a member of the generation is gone. Whatever waits for ranks that make
    something together calls it several times a second.
    """
    global _generation, _check_peers
    _generation, _check_peers = name, check_peers


def end_generation() -> None:
    global _generation, _check_peers
    _generation, _check_peers = "", None


def qualified_name(pg: dist.ProcessGroup) -> str:
    """The group's name, which no group of another generation has."""
    return f"{_generation}/{pg.group_name}" if _generation else pg.group_name


def is_of_this_generation(name: str) -> bool:
    """Whether qualified_name() has given it since the generation began."""
    return name.startswith(f"{_generation}/" if _generation else "")


def store_of(pg: Ranks, name: str) -> dist.Store:
    """A part of the group's store for what the ranks make under this name in this generation.

    One store may see several groups of one name, one after another: their members differ.
    """
    members = ",".join(map(str, ranks_of(pg)))
    prefix = "/".join([*filter(None, [_generation, members]), name])
    return dist.PrefixStore(f"rota/{prefix}", pg.get_group_store())


def peer_check() -> Callable[[], None] | None:
    """What raises if a member of this generation is gone; None without a generation."""
    return _check_peers


def end_watch(pg: Ranks) -> Callable[[int], str] | None:
    """What says how one of these ranks has ended, if it has; None if nothing here would know.

    The default group knows. A generation has a check of its own, which knows why.
    """
    watcher, ranks = rota_backend(dist.group.WORLD), ranks_of(pg)
    if watcher is None or len(ranks) == 0 or _check_peers is not None:
        return None
    return lambda rank: watcher.why_ended(ranks[rank])


def ranks_of(pg: Ranks) -> Sequence[int]:
    """In the default group; empty if they are not known there."""
    if isinstance(pg, StoreRanks):
        return pg.global_ranks
    if isinstance(pg, dist.ProcessGroup):
        with contextlib.suppress(KeyError):  # its user made it without torch.distributed
            return dist.get_process_group_ranks(pg)
    return ()


def rota_backend(group: dist.ProcessGroup | None) -> _C.ProcessGroupRota | None:
    """The group's backend for the CPU, if it is rota's."""
    if group is not None:
        with contextlib.suppress(RuntimeError):  # it has none for the CPU
            backend = _torch.backend_of(group, torch.device("cpu"))
            if isinstance(backend, _C.ProcessGroupRota):
                return backend
    return None


_generation = ""
_check_peers: Callable[[], None] | None = None
