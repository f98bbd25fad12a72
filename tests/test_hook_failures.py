"""Errors inside a DDP hook's collective are raised by backward() as rota's own exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from ranks import Rank, Ranks, error_of, run_ranks

HOOKS = {"allreduce": rota.allreduce_hook, "fp16_compress": rota.fp16_compress_hook}


def step(model: DistributedDataParallel, value: float = 1.0) -> None:
    model(torch.full((8, 256), value)).sum().backward()


def make_ddp(hook: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    model.register_comm_hook(None, hook)
    return model


def make_trained_ddp(hook: Any) -> DistributedDataParallel:
    """Trains past the steps in which DDP itself communicates, to agree on its buckets."""
    model = make_ddp(hook)
    for _ in range(3):
        step(model)
    return model


def train_until_error(rank: Rank, backend: str, name: str) -> list[tuple[str, str]]:
    rank.init(backend)
    model = make_trained_ddp(HOOKS[name])
    rank.tell()
    if rank.rank == 1:
        rank.hear()  # waits for a note that is never sent
    return [error_of(lambda: step(model)), error_of(lambda: step(model))]


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("backend", ["gloo", "rota"])
def test_hook_peer_killed_raises_peer_failed_from_backward(backend: str, name: str) -> None:
    with Ranks(3, train_until_error, backend, name) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        ranks.kill(1)
        results = ranks.results(killed=[1])
        pid = ranks.pid(1)
    for first, second in (results[0], results[2]):
        assert first[0] == "PeerFailed", first[1]
        assert f"rank 1 (pid {pid}) has died" in first[1]
        assert "rota.all_reduce" in first[1]
        assert second[0] in ("PeerFailed", "RuntimeError"), second[1]


def disagree(rank: Rank) -> tuple[str, str]:
    """One rank compresses, the other does not."""
    rank.init("gloo")
    model = make_ddp(rota.fp16_compress_hook if rank.rank == 0 else rota.allreduce_hook)
    return error_of(lambda: step(model))


def test_hook_mismatch_raises_mismatch_from_backward() -> None:
    for error, text in run_ranks(2, disagree):
        assert error == "Mismatch", text
        assert "wire float16" in text and "rank 0 called" in text and "rank 1 called" in text


def wait_too_long(rank: Rank) -> tuple[str, str] | None:
    rank.init("gloo", timeout_s=1.0)
    model = make_trained_ddp(rota.allreduce_hook)
    rank.tell()
    if rank.rank == 1:
        rank.hear()
        return None
    error = error_of(lambda: step(model))
    rank.tell()
    return error


def test_hook_uses_the_groups_timeout_and_names_the_peer() -> None:
    with Ranks(2, wait_too_long) as ranks:
        ranks.hear(0)
        ranks.hear(1)
        ranks.hear(0)
        ranks.tell(1)
        error, text = ranks.results()[0]
        pid = ranks.pid(1)
    assert error == "Timeout", text
    assert f"rank 1 (pid {pid})" in text


def train_after_failure(rank: Rank) -> float | None:
    """A hook over a new group does not remember the communicator of the dead one."""
    rank.init("gloo")
    model = make_trained_ddp(rota.allreduce_hook)
    rank.tell()
    if rank.rank == 2:
        rank.hear()
    error, _ = error_of(lambda: step(model))
    assert error == "PeerFailed"
    del model
    dist.destroy_process_group()
    rank.world_size = 2
    rank.init("gloo")
    model = make_ddp(rota.allreduce_hook)
    step(model, float(rank.rank))
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    return float(gradient.abs().sum())


def test_hook_survivors_train_on_with_a_new_group() -> None:
    with Ranks(3, train_after_failure) as ranks:
        for rank in range(3):
            ranks.hear(rank)
        ranks.kill(2)
        first, second, _ = ranks.results(killed=[2])
    assert first == second and first > 0
