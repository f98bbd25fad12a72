"""Errors inside a DDP hook's collective are raised by backward() as rota's own exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks

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
        results = ranks.results_without(1)
        pid = ranks.pid(1)
    for first, second in (results[0], results[2]):
        check_error(first, "PeerFailed", f"rank 1 (pid {pid}) has died", "rota.all_reduce")
        assert second[0] in ("PeerFailed", "RuntimeError"), second[1]


@on_ranks(2)
def test_hook_mismatch_raises_mismatch_from_backward(rank: Rank) -> None:
    """One rank compresses, the other does not."""
    rank.init("gloo")
    model = make_ddp(rota.fp16_compress_hook if rank.rank == 0 else rota.allreduce_hook)
    error = error_of(lambda: step(model))
    check_error(error, "Mismatch", "wire float16", "rank 0 called", "rank 1 called")


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
        ranks.hear_all()
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
    check_error(error_of(lambda: step(model)), "PeerFailed")
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
        first, second, _ = ranks.results_without(2)
    assert first == second and first > 0


def refuse_and_go_on(rank: Rank, who: str) -> list[tuple[str, str] | float]:
    """A bad argument, with and without the hooks' communicator, then calls that are right."""
    rank.init("gloo", timeout_s=20.0)
    weight = torch.nn.Parameter(torch.zeros(3))
    state = rota.HookState(wire_dtype=torch.float32)

    def reduce(bucket_cap_mb: float) -> float:
        weight.grad = torch.full((3,), float(rank.rank))
        rota.reduce_gradients([weight], state, bucket_cap_mb=bucket_cap_mb)
        return weight.grad[0].item()

    seen: list[tuple[str, str] | float] = []
    for _ in range(2):
        is_wrong = who == "all ranks" or rank.rank == 0
        seen.append(error_of(lambda: reduce(0.0 if is_wrong else 1.0)))  # noqa: B023
        seen.append(reduce(1.0))
    return seen


@pytest.mark.parametrize("who", ["all ranks", "rank 0"])
def test_hook_communicator_is_made_anew_after_a_bad_argument(who: str) -> None:
    own, peer = run_ranks(2, refuse_and_go_on, who)
    for seen in (own, peer):
        assert seen[1] == seen[3] == 0.5
        assert all("bucket_cap_mb is 0" in seen[i][1] for i in (0, 2)), seen
    assert own[0][0] == own[2][0] == "ValueError"
    assert peer[0][0] == peer[2][0] == ("ValueError" if who == "all ranks" else "PeerFailed")
    if who == "rank 0":
        assert "rank 0" in peer[0][1] and "rank 0" in peer[2][1]


def refuse_an_engine(rank: Rank) -> list[tuple[str, str]]:
    rank.init("gloo", timeout_s=20.0)
    engine = dist.new_group(backend="gloo")
    weight = torch.nn.Parameter(torch.zeros(3))
    errors = []
    for given in (None, engine if rank.rank == 0 else None):
        state = rota.HookState(wire_dtype=torch.float32, engine=given)
        weight.grad = torch.ones(3)
        errors.append(error_of(lambda: rota.reduce_gradients([weight], state)))  # noqa: B023
    return errors


def test_hook_peers_are_told_of_another_engine() -> None:
    (first, own), (_, peer) = run_ranks(2, refuse_an_engine)
    assert first[0] == "nothing"
    check_error(own, "ValueError", "already has no engine")
    check_error(peer, "PeerFailed", "already has no engine")
