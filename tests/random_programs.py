"""What the tests of random programs share: seeds, groups, and the command that repeats a failure.

A program follows from its seed alone. `make test` runs the same few seeds of each test every time;
`make test-long` sets ROTA_RANDOM_PROGRAMS to run more, from ROTA_RANDOM_SEED on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import rota
from ranks import Rank, run_ranks


def seeds(usual: int) -> range:
    """The seeds to run: `usual` of them unless the environment names others."""
    first = int(os.environ.get("ROTA_RANDOM_SEED", "1"))
    return range(first, first + int(os.environ.get("ROTA_RANDOM_PROGRAMS", usual)))


def run_program(seed: int, world_size: int, function: Callable[..., Any], *args: object) -> None:
    """run_ranks(world_size, function, seed, *args); a failure names the command that repeats it."""
    try:
        run_ranks(world_size, function, seed, *args, timeout_s=120)
    except AssertionError as error:
        test = Path(function.__code__.co_filename).name
        raise AssertionError(
            f"ROTA_RANDOM_SEED={seed} ROTA_RANDOM_PROGRAMS=1 python -m pytest tests/{test}  "
            f"# repeats this\n{error}"
        ) from None


class Channel(NamedTuple):
    """A group of these ranks, or a communicator over them; collectives on it are in order."""

    ranks: tuple[int, ...]
    is_communicator: bool


class Channels:
    """The groups and communicators of this rank; making them is a collective call."""

    def __init__(self, rank: Rank, channels: list[Channel], num_hosts: int) -> None:
        if num_hosts > 1:
            os.environ["ROTA_HOST_ID"] = f"host{rank.rank % num_hosts}"
        rank.init(timeout_s=60)  # between hosts, of an irecv from its call on
        self.groups = [dist.new_group(list(channel.ranks), backend="rota") for channel in channels]
        self.communicators = {
            number: rota.Communicator(self.groups[number])
            for number, channel in enumerate(channels)
            if channel.is_communicator and rank.rank in channel.ranks
        }
