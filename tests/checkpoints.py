"""Shared by the tests of rota.checkpoint.Checkpoint: states, restarts, and the end of keepers."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rota
from ranks import Rank

ELEMS = 5 << 20  # 20 MiB of float32: two buckets
END_S = 60.0
LINGER = timedelta(seconds=60)  # longer than the next ranks take to start on a busy machine


def state_of(rank: int, step: int, num_elems: int = ELEMS) -> dict[str, Any]:
    """What a rank has at a step; every element shows both."""
    value = float(rank * 1000 + step)
    return {"model": {"weight": torch.full((num_elems,), value)}, "step": step}


def is_state_of(rank: int, step: int, state: dict[str, Any]) -> bool:
    weight = state["model"]["weight"]
    return state["step"] == step and bool((weight == rank * 1000 + step).all())


def assert_same(got: object, expected: object) -> None:
    """Nested states have the same types, names and bits."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        pair = (got, expected)
        one, other = (x.resolve_conj().contiguous().view(-1).view(torch.uint8) for x in pair)
        assert one.equal(other)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for got_item, item in zip(got, expected, strict=True):
            assert_same(got_item, item)
    else:
        assert got == expected


def alone(**options: Any) -> rota.checkpoint.Checkpoint:
    """The checkpoint of a job of one rank."""
    return rota.checkpoint.Checkpoint(dist.HashStore(), rank=0, world_size=1, **options)


def open_checkpoint(rank: Rank, job: str, **options: Any) -> rota.checkpoint.Checkpoint:
    """A rank's checkpoint over an empty store, as after a restart of the whole job."""
    place = {"rank": rank.rank, "world_size": rank.world_size}
    options = {**place, "linger": LINGER, **options}
    return rota.checkpoint.Checkpoint(rank.make_store(), job=job, **options)


def save_steps(
    checkpoint: rota.checkpoint.Checkpoint, rank: int, steps: Iterable[int], num_elems: int = 1000
) -> None:
    for step in steps:
        checkpoint.save(step, state_of(rank, step, num_elems))


def save_and_leave(rank: Rank, job: str, steps: Iterable[int], **options: Any) -> None:
    checkpoint = open_checkpoint(rank, job, **options)
    save_steps(checkpoint, rank.rank, steps)
    checkpoint.close(keep=True)


def load_step(checkpoint: rota.checkpoint.Checkpoint, rank: int) -> int | None:
    """The step of the newest version, whose state is checked, or None."""
    found = checkpoint.load()
    assert found is None or is_state_of(rank, *found), (rank, found[0], found[1]["step"])
    return None if found is None else found[0]


def load_and_check(rank: Rank, job: str, close: bool = True) -> int | None:
    """Loads after a restart; returns the step."""
    checkpoint = open_checkpoint(rank, job)
    step = load_step(checkpoint, rank.rank)
    checkpoint.close(keep=not close)
    return step


def wait_until_ended(pid: int) -> None:
    """Fails the test if the process goes on."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(END_S * 1000), "the process does not end"
        os.close(pidfd)
