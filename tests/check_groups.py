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


def serve(rank: Rank, options: dict[str, Any]) -> None:
    """Runs one check after the other, until the test says that there are no more."""
    torch.set_num_threads(1)
    rank.init(**options)
    while (call := rank.hear()) is not None:
        check, args = call
        try:
            rank.tell((check(rank, *args), None))
        except Exception:
            rank.tell((None, traceback.format_exc()))
    dist.destroy_process_group()


class CheckGroup:
    """Ranks that run checks; a failed one ends them, so that the next check gets new ones.

    Args:
        limit_s: for all checks together.
        options: of Rank.init.
    """

    def __init__(self, world_size: int, limit_s: float, options: dict[str, Any]) -> None:
        self.world_size = world_size
        self._limit_s, self._options = limit_s, options
        self._ranks: Ranks | None = None

    def run(self, check: Callable[..., Any], *args: object) -> list[Any]:
        """What `check(rank, *args)` returns on each rank."""
        if self._ranks is None:
            self._ranks = Ranks(self.world_size, serve, self._options, timeout_s=self._limit_s)
        self._ranks.tell_all((check, args))
        try:
            results, errors = zip(*self._ranks.hear_all(), strict=True)
        except BaseException:
            self.end()
            raise
        if any(errors):
            self.end()
            pytest.fail("\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors)))
        return list(results)

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None

    def finish(self) -> None:
        if self._ranks is not None:
            self._ranks.tell_all()
            self._ranks.results()
            self.end()


def in_group(world_size: int) -> Callable[[Callable[..., Any]], Any]:
    """Makes `check(rank, ...)` a test on the ranks of the module's fixture `groups`."""

    def run(body: Body, args: dict[str, Any]) -> None:
        args.pop("groups")[world_size].run(functools.partial(body, **args))

    return lambda body: as_test(body, 1, "groups", run)


@contextlib.contextmanager
def check_groups(
    *world_sizes: int, limit_s: float = 120, **options: Any
) -> Iterator[dict[int, CheckGroup]]:
    """A group of each size, whose ranks start with its first check."""
    made = {size: CheckGroup(size, limit_s, options) for size in world_sizes}
    yield made
    for group in made.values():
        group.finish()
