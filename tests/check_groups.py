"""Ranks that tests share: each runs its checks in the group that is already there."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Body, Rank, Ranks, as_test


def serve(rank: Rank) -> None:
    """Runs one check after the other, until the test says that there are no more."""
    torch.set_num_threads(1)
    rank.init()
    while (call := rank.hear()) is not None:
        check, args = call
        try:
            check(rank, *args)
            rank.tell()
        except Exception:
            rank.tell(traceback.format_exc())
    dist.destroy_process_group()


class CheckGroup:
    """Ranks that run checks; a failed one ends them, so that the next check gets new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: Ranks | None = None

    def run(self, check: Callable[..., None], *args: object) -> None:
        if self._ranks is None:
            self._ranks = Ranks(self.world_size, serve, timeout_s=120)
        for rank in range(self.world_size):
            self._ranks.tell(rank, (check, args))
        try:
            errors = [self._ranks.hear(rank) for rank in range(self.world_size)]
        except BaseException:
            self.end()
            raise
        if any(errors):
            self.end()
            pytest.fail("\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors)))

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None

    def finish(self) -> None:
        if self._ranks is not None:
            for rank in range(self.world_size):
                self._ranks.tell(rank)
            self._ranks.results()
            self.end()


def in_group(world_size: int) -> Callable[[Callable[..., Any]], Any]:
    """Makes `check(rank, ...)` a test on the ranks of the module's fixture `groups`."""

    def run(body: Body, args: dict[str, Any]) -> None:
        args.pop("groups")[world_size].run(functools.partial(body, **args))

    return lambda body: as_test(body, 1, "groups", run)


@contextlib.contextmanager
def check_groups(*world_sizes: int) -> Iterator[dict[int, CheckGroup]]:
    """A group of each size, whose ranks start with its first check."""
    made = {world_size: CheckGroup(world_size) for world_size in world_sizes}
    yield made
    for group in made.values():
        group.finish()
