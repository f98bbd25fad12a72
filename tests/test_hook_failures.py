"""Errors inside a DDP hook's collective are raised by backward() as rota's own exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from ranks import Rank, check_error, error_of, kill_self, on_ranks

HOOKS = {"allreduce": rota.allreduce_hook, "fp16_compress": rota.fp16_compress_hook}


def step(model: DistributedDataParallel) -> None:
    model(torch.ones(8, 256)).sum().backward()


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


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("backend", ["gloo", "rota"])
@on_ranks(3, killed=[1])
def test_hook_peer_killed_raises_peer_failed_from_backward(
    rank: Rank, backend: str, name: str
) -> None:
    rank.init(backend)
    model = make_trained_ddp(HOOKS[name])
    dist.barrier()
    if rank.rank == 1:
        kill_self()
    died = f"rank 1 (pid {rank.pid_of(1)}) has died"
    check_error(error_of(step, model), "PeerFailed", died, "rota.all_reduce")
    assert error_of(step, model)[0] in ("PeerFailed", "RuntimeError")


@on_ranks(2)
def test_hook_mismatch_raises_mismatch_from_backward(rank: Rank) -> None:
    rank.init("gloo")
    model = make_ddp(rota.fp16_compress_hook if rank.rank == 0 else rota.allreduce_hook)
    error = error_of(step, model)
    check_error(error, "Mismatch", "wire float16", "rank 0 called", "rank 1 called")


@on_ranks(2)
def test_hook_uses_the_groups_timeout_and_names_the_peer(rank: Rank) -> None:
    rank.init("gloo", timeout_s=1.0)
    model = make_trained_ddp(rota.allreduce_hook)
    if rank.rank == 1:
        rank.await_word()
        return
    error = error_of(step, model)
    rank.say()
    check_error(error, "Timeout", f"rank 1 (pid {rank.pid_of(1)})")


@pytest.mark.parametrize("who", ["all ranks", "rank 0"])
@on_ranks(2)
def test_hook_communicator_is_made_anew_after_a_bad_argument(rank: Rank, who: str) -> None:
    """A bad argument, with and without the hooks' communicator, then calls that are right."""
    rank.init("gloo", timeout_s=20.0)
    weight = torch.nn.Parameter(torch.zeros(3))
    state = rota.HookState(wire_dtype=torch.float32)

    def reduce(bucket_cap_mb: float) -> None:
        weight.grad = torch.full((3,), float(rank.rank))
        rota.reduce_gradients([weight], state, bucket_cap_mb=bucket_cap_mb)

    is_wrong = who == "all ranks" or rank.rank == 0
    for _ in range(2):
        error = error_of(reduce, 0.0 if is_wrong else 1.0)
        if is_wrong:
            check_error(error, "ValueError", "bucket_cap_mb is 0")
        else:
            check_error(error, "PeerFailed", "bucket_cap_mb is 0", "rank 0")
        reduce(1.0)
        assert weight.grad[0].item() == 0.5


@on_ranks(2)
def test_hook_peers_are_told_of_another_engine(rank: Rank) -> None:
    rank.init("gloo", timeout_s=20.0)
    engine = dist.new_group(backend="gloo")
    weight = torch.nn.Parameter(torch.zeros(3))
    mine = rank.rank == 0
    told = ("ValueError" if mine else "PeerFailed", "already has no engine")
    for given, expected in ((None, ("nothing",)), (engine if mine else None, told)):
        state = rota.HookState(wire_dtype=torch.float32, engine=given)
        weight.grad = torch.ones(3)
        check_error(error_of(rota.reduce_gradients, [weight], state), *expected)


@pytest.mark.parametrize("has_trained", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", ["allreduce", "fused"])
@on_ranks(2)
def test_ddp_goes_on_after_a_bad_argument_in_a_hook(
    rank: Rank, name: str, has_trained: bool
) -> None:
    """A bad argument of rank 1 in a hook of several buckets; then the same DDP goes on."""
    rank.init("gloo", timeout_s=20.0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    state = rota.HookState(model=model, wire_dtype=torch.float32) if name == "fused" else None
    is_bad = rank.rank == 1

    def hook(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if state is None:
            return rota.allreduce_hook(3 if is_bad and is_wrong else None, bucket)
        state.algorithm = "zzz" if is_bad and is_wrong and bucket.index() == has_trained else "auto"
        return rota.fused_hook(state, bucket)

    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    kind, text = ("TypeError", "of type int") if name == "allreduce" else ("ValueError", "zzz")
    for wrong in [False] * 3 * has_trained + [True, False, True, True, False]:
        is_wrong = wrong
        model.zero_grad()
        value = float(rank.rank)
        error = error_of(lambda: model(torch.full((2, 64), value)).sum().backward())  # noqa: B023
        expected = (kind if is_bad else "PeerFailed", text) if wrong else ("nothing",)
        check_error(error, *expected)
    gradient = layers[-1].weight.grad
    sums = [torch.empty(1) for _ in range(2)]
    dist.all_gather(sums, gradient.sum().view(1))
    assert sums[0] == sums[1] != 0
