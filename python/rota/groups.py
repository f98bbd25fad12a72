"""The process group that a user hands over, and the count of what is made over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist


def member_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """The group, or the default group for None.

    Args:
        what: is made over it, such as "Communicator", for errors.

    Raises:
        ValueError: there is no default group, or this rank is not in the group.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"rota.{what}: torch.distributed is not initialised; call dist.init_process_group first"
        )
    pg = group if group is not None else dist.group.WORLD
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError(
            f"rota.{what}: this rank is not in the group ({pg!r}); only its members make a "
            f"{what} over it"
        )
    return pg


class Ranks(Protocol):
    """What is needed of a process group in order to make something over its ranks."""

    @property
    def group_name(self) -> str: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def get_group_store(self) -> dist.Store: ...


def next_number(pg: Ranks, what: str) -> int:
    """How many of these were made over the group before; all ranks count alike, so it is a name."""
    number = _num_made.get((pg.group_name, what), 0)
    _num_made[pg.group_name, what] = number + 1
    return number


def begin_generation(uuid: str, check_peers: Callable[[], None]) -> None:
    """Counts anew, over groups whose store no earlier generation has used (rota.elastic).

    Args:
        uuid: of the generation; becomes a part of names.
        check_peers: raises if a member of the generation is gone. Whatever waits for ranks that
            make something together calls it several times a second.
    """
    global _generation, _check_peers
    _generation, _check_peers = uuid, check_peers
    _num_made.clear()


def end_generation() -> None:
    """What is made from now on belongs to no generation."""
    global _generation, _check_peers
    _generation, _check_peers = "", None
    _num_made.clear()


def qualified_name(pg: dist.ProcessGroup) -> str:
    """The group's name, which no group of another generation has."""
    return f"{_generation}/{pg.group_name}" if _generation else pg.group_name


def store_of(pg: Ranks, name: str) -> dist.Store:
    """A part of the group's store for what the ranks make under this name in this generation."""
    prefix = f"{_generation}/{name}" if _generation else name
    return dist.PrefixStore(f"rota/{prefix}", pg.get_group_store())


def peer_check() -> Callable[[], None] | None:
    """What raises if a member of this generation is gone; None without a generation."""
    return _check_peers


_num_made: dict[tuple[str, str], int] = {}
_generation = ""
_check_peers: Callable[[], None] | None = None
