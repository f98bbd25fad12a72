"""HookState(model_group=...): ranks that hold one model clip by one norm and skip the same steps.

Four ranks are two copies of a model in two parts: ranks 0 and 1 hold the first copy, 2 and 3 the
second one. A rank's part of the model is its number modulo 2.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients, fused_ddp
from ranks import Rank, check_error, error_of, on_ranks

NUM_COPIES, NUM_PARTS = 2, 2


def groups_of(rank: Rank) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's peers in the other copy, and in the other part of its copy."""
    rank.init("rota")
    mesh = init_device_mesh("cpu", (NUM_COPIES, NUM_PARTS), mesh_dim_names=("copy", "part"))
    return mesh.get_group("copy"), mesh.get_group("part")


def by_hook(model: nn.Module, group: dist.ProcessGroup, state: rota.HookState) -> nn.Module:
    return fused_ddp(model, state, process_group=group)


def by_list(model: nn.Module, group: dist.ProcessGroup, state: rota.HookState) -> nn.Module:
    return model


def backward(
    model: nn.Module, state: rota.HookState, scaler: rota.amp.GradScaler, batch: torch.Tensor
) -> None:
    loss_scale = scaler.scale(torch.ones(()))
    (model(batch) * loss_scale).backward()
    if not isinstance(model, DistributedDataParallel):
        rota.reduce_gradients(model.parameters(), state, bucket_cap_mb=SMALL_BUCKETS_MB)


@on_ranks(4)
def test_parts_of_a_model_clip_by_one_norm_and_skip_the_same_step(rank: Rank) -> None:
    """The parameters of size 700 are replicas."""
    copies, parts = groups_of(rank)
    # Elements 700 and later are only in the last weight, so all others are 2 in both parts.
    squares = 4 * (2 * (3 + 64 + 1 + 700) + 700) + (2050 - 700) * (4 + 16)
    norm = torch.tensor(math.sqrt(squares)).item()
    # By step: the norm, how far the weights have moved, the scale.
    expected = [
        (norm, -2 / (norm + 1e-6), 8.0),
        (math.inf, -2 / (norm + 1e-6), 4.0),
        (math.nan, -2 / (norm + 1e-6), 2.0),
        (norm, -4 / (norm + 1e-6), 2.0),
    ]
    for wrap in (by_hook, by_list):
        model = ExactGradients()
        state = rota.HookState(
            copies,
            model_group=parts,
            replicas=lambda p: NUM_PARTS if p.numel() == 700 else 1,
        )
        wrapped = wrap(model, copies, state)
        scaler = rota.amp.GradScaler(state, init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for step, (expected_norm, move, scale) in enumerate(expected):
            # The gradients of the first part are 2, of the second one 4; all replicas' are 2.
            batch = torch.full((2050,), 2.0)
            batch[700:] *= 1 + rank.rank % NUM_PARTS
            if step == 1 and rank.rank == 2:
                batch[5] = torch.inf  # in the gradients of most parameters, and of replicas
            if step == 2 and rank.rank == 3:
                batch[701] = torch.nan  # in the last gradient only
            optimizer.zero_grad()
            backward(wrapped, state, scaler, batch)
            found = rota.clip_grad_norm_(model.parameters(), 1.0).item()
            assert found == pytest.approx(expected_norm, rel=0, nan_ok=True)
            scaler.step(optimizer)
            scaler.update()
            weights = [weight[0].item() for weight in model.weights]
            torch.testing.assert_close(weights, [move] * 5, rtol=1e-6, atol=0)
            dist.all_gather_object(of_ranks := [None] * 4, weights)
            assert of_ranks == [weights] * 4 and scaler.get_scale() == scale


def stage_state(rank: Rank, **options: Any) -> rota.HookState:
    """The state of one of two pipeline stages, each on one rank."""
    own = [dist.new_group([i]) for i in range(2)][rank.rank]
    return rota.HookState(own, torch.float32, model_group=dist.group.WORLD, **options)


@pytest.mark.filterwarnings("ignore:rota.amp.GradScaler")
@on_ranks(2)
def test_inf_in_one_stage_skips_the_step_of_a_loss_that_is_not_the_last(rank: Rank) -> None:
    """Two models with a loss each, whose passes both come before both steps."""
    rank.init("rota")
    models = [ExactGradients() for _ in range(2)]
    states = [stage_state(rank) for _ in models]
    scaler = rota.amp.GradScaler(states, init_scale=8.0)
    optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    for i, (model, state) in enumerate(zip(models, states, strict=True)):
        batch = torch.ones(2050)
        batch[3] = torch.inf if i == 0 and rank.rank == 1 else 1.0
        backward(model, state, scaler, batch)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [bool(model.weights[0].any()) for model in models] == [False, True]
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_stage_without_gradients_clips_and_scales_as_the_others(rank: Rank) -> None:
    """The first stage has no gradient: its weights are frozen, unused, or there are none."""
    rank.init("rota")
    for kind in ("frozen", "unused", "empty"):
        stage = ExactGradients()
        if rank.rank == 0 and kind == "frozen":
            stage.requires_grad_(False)
        if rank.rank == 0 and kind == "empty":
            stage.weights = nn.ParameterList()
        state = stage_state(rank)
        scaler = rota.amp.GradScaler(state, init_scale=8.0)
        loss_scale = scaler.scale(torch.ones(()))
        if rank.rank == 1:
            batch = torch.ones(2050)
            batch[5] = torch.inf
            (stage(batch) * loss_scale).backward()
        rota.reduce_gradients(stage.parameters(), state)
        norm = rota.clip_grad_norm_(stage.parameters(), 1.0)
        error, _ = error_of(
            lambda s=stage: rota.clip_grad_norm_(s.parameters(), 1.0, error_if_nonfinite=True)
        )
        if rank.rank == 1 or kind == "unused":  # others have nothing to optimize
            scaler.step(torch.optim.SGD(stage.parameters(), 1.0))
        scaler.update()
        assert not norm.isfinite() and error == "RuntimeError" and scaler.get_scale() == 4.0


# ---- DTensors tell their replicas themselves


@on_ranks(4)
def test_model_group_counts_dtensors_by_their_placements(rank: Rank) -> None:
    rank.init("rota")
    mesh = init_device_mesh("cpu", (NUM_COPIES, NUM_PARTS), mesh_dim_names=("copy", "part"))
    part = mesh["part"]
    whole = torch.arange(24.0).view(6, 4)

    def distribute(placement: Any) -> nn.Parameter:
        own = whole.chunk(2)[part.get_local_rank()] if placement == Shard(0) else whole
        return nn.Parameter(DTensor.from_local(own.clone(), part, [placement]))

    cut, shared = distribute(Shard(0)), distribute(Replicate())
    plain = nn.Parameter(torch.zeros(3))
    asked = []

    def replicas(parameter: torch.Tensor) -> int:
        asked.append(parameter is plain)
        return 2

    state = rota.HookState(
        mesh.get_group("copy"), torch.float32, model_group=part.get_group(), replicas=replicas
    )
    for step in range(3):
        with torch.no_grad():
            # The copies' gradients differ by 2, and average to the parameters' values.
            cut.grad, shared.grad = (
                p.detach() + 2.0 * (rank.rank // 2) - 1.0 for p in (cut, shared)
            )
        plain.grad = torch.full((3,), 5.0)
        if step == 1 and rank.rank < NUM_PARTS:
            cut.grad = None  # in one copy, so the average is half of the other one's gradient
        rota.reduce_gradients([cut, plain, shared], state)
        expected = (whole + 1.0) / 2 if step == 1 else whole
        squares = (expected.square().sum() + whole.square().sum() + 75.0).item()
        assert state.grad_norm().item() == torch.tensor(math.sqrt(squares)).item()
        assert isinstance(cut.grad, DTensor) and cut.grad.placements == (Shard(0),)
        assert torch.equal(cut.grad.full_tensor(), expected)
        assert rota.clip_grad_norm_([cut, plain, shared], 1.0) > 1
        clipped = [torch.tensor([*cut.grad.full_tensor().flatten(), *plain.grad])]
        clipped.append(shared.grad.full_tensor().flatten())
        torch.testing.assert_close(torch.cat(clipped).norm().item(), 1.0)
        cut.grad = shared.grad = plain.grad = None
    assert asked and all(asked)

    shared.grad = DTensor.from_local(whole.clone(), part, [Partial()])
    error = error_of(rota.reduce_gradients, [cut, plain, shared], state)
    check_error(error, "ValueError", "Partial", "redistribute")


@pytest.mark.filterwarnings("ignore:rota.")
@on_ranks(2)
def test_shards_outside_the_model_group_count_or_are_refused(rank: Rank) -> None:
    """Each rank has a state for its own shards: torch then finds the norm, and Infs, of all."""
    rank.init("rota")
    own = [dist.new_group([i]) for i in range(2)][rank.rank]
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))
    state = rota.HookState(own, torch.float32)
    scaler = rota.amp.GradScaler(state, init_scale=8.0)
    optimizer = torch.optim.SGD([weight], 1.0)
    norms = []
    for value in (3.0, torch.inf):
        scaler.scale(torch.ones(()))
        with torch.no_grad():
            gradient = torch.full((2,), 8 * value if rank.rank == 1 else 32.0)
            weight.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
        rota.reduce_gradients([weight], state)
        scaler.unscale_(optimizer)
        norm: Any = rota.clip_grad_norm_([weight], 1e9)
        norms.append(norm.full_tensor().item())
        scaler.step(optimizer)
        scaler.update()
    over_both = rota.HookState(wire_dtype=torch.float32)
    _, text = error_of(rota.reduce_gradients, [weight], over_both)
    first, second = norms
    assert first == pytest.approx(50**0.5) and not math.isfinite(second)
    assert weight.to_local()[0] == (-3.0 if rank.rank == 1 else -4.0)
    for fact in ("parameter 0 of the list", "Shard(dim=0)", "ranks [0, 1]", "same shard"):
        assert fact in text


# ---- who waits for whom


@on_ranks(4)
def test_reduction_does_not_wait_for_the_other_parts(rank: Rank) -> None:
    """The second part reduces when the first one has, as the stages of a pipeline might."""
    copies, parts = groups_of(rank)
    state = rota.HookState(copies, model_group=parts)
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 1.0 + rank.rank % NUM_PARTS)
    token = torch.zeros(1)
    if rank.rank % NUM_PARTS == 1:
        dist.recv(token, rank.rank - 1)
    rota.reduce_gradients([weight], state)
    if rank.rank % NUM_PARTS == 0:
        dist.send(token, rank.rank + 1)
    assert state.grad_norm().item() == torch.tensor(math.sqrt(4 * (1 + 4))).item()


# ---- errors


@on_ranks(4)
def test_error_in_one_part_is_raised_in_the_others(rank: Rank) -> None:
    copies, parts = groups_of(rank)
    state = rota.HookState(copies, model_group=parts)
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4) if rank.rank % NUM_PARTS == 0 else torch.ones(4).to_sparse()

    def reduce() -> None:
        rota.reduce_gradients([weight], state)
        state.grad_norm()

    error = error_of(reduce)
    dist.barrier()  # nobody leaves, which would be an error as well
    if rank.rank == 0:
        check_error(error, "PeerFailed", "sparse_coo")
    elif rank.rank == 1:
        check_error(error, "TypeError")


@on_ranks(4)
def test_misuse_of_model_group_is_refused(rank: Rank) -> None:
    copies, parts = groups_of(rank)

    def with_result(change: Callable[[nn.Parameter], Any], **options: Any) -> tuple[str, str]:
        weight = nn.Parameter(torch.zeros(3))
        weight.grad = torch.ones(3)
        state = rota.HookState(copies, model_group=parts)
        rota.reduce_gradients([weight], state)
        change(weight)
        return error_of(rota.clip_grad_norm_, [weight], 1.0, **options)

    many = rota.HookState(copies, model_group=parts, replicas=lambda p: 3)
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    group: Any = "parts"
    check_error(with_result(lambda p: p.grad.add_(1.0)), "RuntimeError", "model_group")
    check_error(with_result(lambda p: None, norm_type=1.0), "RuntimeError", "norm_type=2")
    for call, kind, fact in (
        (lambda: rota.HookState(copies, replicas=lambda p: 2), "ValueError", "model_group"),
        (lambda: rota.HookState(copies, model_group=group), "TypeError", "str"),
        (lambda: pickle.dumps(rota.HookState(model_group=parts)), "TypeError", "state_dict()"),
        (lambda: rota.reduce_gradients([weight], many), "ValueError", "3, expected"),
    ):
        check_error(error_of(call), kind, fact)
