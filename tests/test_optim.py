"""Optimizers that update where the sums are, beside torch's and beside the same step by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
import rota.optim
from models import SMALL_BUCKETS_MB, batch_of, make_model
from optim_oracle import adam_step, sgd_step
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.gradients.sharded import pieces_of

pytestmark = pytest.mark.same_in_every_build

# The name, torch's class, the step by hand, and options.
KINDS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "AdamW": ("AdamW", adam_step, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": ("AdamW", adam_step, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "Adam": ("Adam", adam_step, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "SGD": ("SGD", sgd_step, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": ("SGD", sgd_step, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": ("SGD", sgd_step, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def make_ddp(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS_MB} | options)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def long_model() -> torch.nn.Module:
    """With parameters of several leaves, of one, and of a part of one."""
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 8), torch.nn.Tanh()
    )


# ---- which rank owns what


@pytest.mark.parametrize("world_size", (1, 2, 3, 8))
def test_every_element_has_one_owner_and_ranks_own_about_as_much(world_size: int) -> None:
    lengths = [5, 1, 3 * _C.LEAF_ELEMS, 10 * _C.LEAF_ELEMS + 7, 100, 64, 1]
    owned = [0] * world_size
    for length, pieces in zip(lengths, pieces_of(lengths, world_size), strict=True):
        assert [p.begin for p in pieces] == list(
            np.cumsum([0, *(p.num_elems for p in pieces[:-1])])
        )
        assert sum(p.num_elems for p in pieces) == length
        assert all(p.begin % _C.LEAF_ELEMS == 0 for p in pieces)
        for piece in pieces:
            owned[piece.owner] += -(-piece.num_elems // _C.LEAF_ELEMS)
    assert max(owned) - min(owned) <= 1


# ---- bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", (2, 3))
@on_ranks()
def test_parameters_have_the_bits_of_the_same_step_on_whole_sums(rank: Rank, kind: str) -> None:
    name, step_by_hand, options = KINDS[kind]
    rank.init("gloo")
    model = long_model()
    whole = [p.detach().numpy().copy() for p in model.parameters()]
    by_hand: list[dict[str, Any]] = [{} for _ in whole]
    ddp = make_ddp(model)
    state = rota.HookState(model=ddp, wire_dtype=torch.float32)
    optimizer = getattr(rota.optim, name)(ddp.parameters(), state=state, **options)
    replica = copy.deepcopy(model)
    for step in range(4):
        replica.load_state_dict(model.state_dict())
        replica.zero_grad()
        for outputs in (ddp(batch_of(rank.rank, step)), replica(batch_of(rank.rank, step))):
            outputs.square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        norm = optimizer.clip_grad_norm_(0.5 if step == 2 else math.inf)
        squares = 0.0
        sums = []
        for parameter in replica.parameters():
            gathered = [torch.empty_like(parameter.grad) for _ in range(rank.world_size)]
            dist.all_gather(gathered, parameter.grad)
            total = gathered[0].numpy()
            for other in gathered[1:]:
                total = total + other.numpy()
            sums.append(total / np.float32(rank.world_size))
            squares += float((sums[-1].astype(np.float64) ** 2).sum())
        assert norm.item() == pytest.approx(math.sqrt(squares), rel=1e-6)
        factor = min(1.0, 0.5 / (norm.item() + 1e-6)) if step == 2 else 1.0
        optimizer.step()
        is_decoupled = {"is_decoupled": name == "AdamW"}
        for i, (total, own) in enumerate(zip(sums, by_hand, strict=True)):
            whole[i] = step_by_hand(whole[i], total, own, options | is_decoupled, factor)
        for parameter, expected in zip(model.parameters(), whole, strict=True):
            assert np.array_equal(parameter.detach().numpy(), expected), f"step {step}"


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_hundred_steps_stay_near_torch(rank: Rank, kind: str) -> None:
    name, _, options = KINDS[kind]
    rank.init("gloo")
    ours, theirs = make_ddp(make_model()), make_ddp(make_model())
    state = rota.HookState(model=ours, wire_dtype=torch.float32)
    optimizer = getattr(rota.optim, name)(ours.parameters(), state=state, **options)
    torchs = getattr(torch.optim, name)(theirs.parameters(), **options)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(one, 100) for one in (optimizer, torchs)
    ]
    for step in range(100):
        for ddp, one in ((ours, optimizer), (theirs, torchs)):
            one.zero_grad()
            ddp(batch_of(rank.rank, step)).square().mean().backward()
            one.step()
        for scheduler in schedulers:
            scheduler.step()
        if step in (0, 99):
            torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)


def train_on_shards(rank: Rank, num_shards: int) -> torch.Tensor:
    rank.init("gloo")
    model = long_model()
    state = rota.HookState(model=model, num_shards=num_shards, wire_dtype=torch.float32)
    optimizer = rota.optim.AdamW(model.parameters(), state=state, lr=0.01)
    shards = rota.LogicalShards(model, num_shards, state=state)
    for step in range(3):
        for shard in shards:
            with shards.backward_of(shard):
                model(batch_of(shard, step)).square().sum().backward()
        shards.reduce()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return flat(model)


# ---- ways to train


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@on_ranks(2)
def test_narrow_parameters_are_updated_in_float32(rank: Rank, dtype: torch.dtype) -> None:
    rank.init("gloo")
    ddp = make_ddp(make_model(dtype))
    state = rota.HookState(model=ddp, wire_dtype=None)
    optimizer = rota.optim.SGD(ddp.parameters(), state=state, lr=2.0**-14)
    before = flat(ddp)
    for _ in range(64):  # each too small to be seen in the parameters alone
        optimizer.zero_grad()
        (
            sum(p.float().sum() for p in ddp.module.parameters())
            + 0 * ddp(batch_of(0, 0, dtype)).float().sum()
        ).backward()
        optimizer.step()
    torch.testing.assert_close(flat(ddp), before - 64 * 2.0**-14, rtol=2**-7, atol=2**-8)
    saved = optimizer.state_dict()["state"]
    wide = torch.cat([saved[i]["master"].flatten() for i in range(len(saved))])
    torch.testing.assert_close(wide, before - 64 * 2.0**-14, rtol=0, atol=1e-6)


@on_ranks(2)
def test_unused_and_frozen_parameters_stay_as_they_are(rank: Rank) -> None:
    rank.init("gloo")
    model = torch.nn.ModuleList([torch.nn.Linear(32, 8) for _ in range(3)])
    model[2].requires_grad_(False)

    class Chooses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, batch: torch.Tensor, which: int) -> torch.Tensor:
            return self.layers[which](batch) + self.layers[2](batch)

    ddp = make_ddp(Chooses(), find_unused_parameters=True)
    state = rota.HookState(model=ddp)
    optimizer = rota.optim.AdamW(ddp.parameters(), state=state, lr=0.1, weight_decay=0.5)
    before = [flat(layer) for layer in model]
    for which, changed in (([0, 0], [True, False, False]), ([0, 1], [True, True, False])):
        optimizer.zero_grad()
        ddp(batch_of(rank.rank, 0), which[rank.rank]).sum().backward()
        optimizer.step()
        after = [flat(layer) for layer in model]
        assert [not a.equal(b) for a, b in zip(before, after, strict=True)] == changed
        before = after


@on_ranks(2)
def test_no_sync_accumulates_and_gradients_can_be_kept(rank: Rank) -> None:
    rank.init("gloo")
    ours, theirs = (make_ddp(make_model(), gradient_as_bucket_view=True) for _ in range(2))
    state = rota.HookState(model=ours, wire_dtype=torch.float32)
    optimizer = rota.optim.AdamW(ours.parameters(), state=state, keep_gradients=True)
    for step in range(3):
        for ddp in (ours, theirs):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch_of(rank.rank, 2 * step)).sum().backward()
            ddp(batch_of(rank.rank, 2 * step + 1)).sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        optimizer.step()
        theirs.load_state_dict(ours.state_dict())


@on_ranks(2)
def test_scaler_skips_steps_and_unscales_within_them(rank: Rank) -> None:
    rank.init("gloo")
    results = []
    for scale in (1.0, 2.0**10):
        ddp = make_ddp(make_model())
        state = rota.HookState(model=ddp)
        optimizer = rota.optim.AdamW(ddp.parameters(), state=state, lr=0.01)
        scaler = rota.amp.GradScaler(state, init_scale=scale, enabled=scale != 1)
        for step in range(4):
            is_bad = step == 2 and scale != 1
            for _ in range(2 if is_bad else 1):
                optimizer.zero_grad()
                loss = ddp(batch_of(rank.rank, step)).square().mean()
                scaler.scale(loss * (math.inf if is_bad else 1)).backward()
                before = flat(ddp)
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(0.1)
                scaler.step(optimizer)
                assert flat(ddp).equal(before) == is_bad == state.found_inf
                scaler.update()
                is_bad = False
        results.append(flat(ddp))
    assert results[0].equal(results[1])


# ---- saving


def train(rank: Rank, steps: range, saved: Any, kind: str) -> tuple[Any, torch.Tensor]:
    """Steps of a run that may go on from what another one has saved."""
    name, _, options = KINDS[kind]
    rank.init("gloo")
    model = long_model()
    ddp = make_ddp(model)
    state = rota.HookState(model=ddp, wire_dtype=torch.float32)
    optimizer = getattr(rota.optim, name)(ddp.parameters(), state=state, **options)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        optimizer.zero_grad()
        ddp(batch_of(0, step)).square().mean().backward()
        optimizer.step()
    return (model.state_dict(), optimizer.state_dict()), flat(model)


@pytest.mark.parametrize("kind", ("amsgrad", "momentum"))
def test_a_run_goes_on_with_another_number_of_ranks(kind: str) -> None:
    whole = run_ranks(2, train, range(5), None, kind)[0][1]
    saved = run_ranks(2, train, range(3), None, kind)[1][0]
    goes_on = run_ranks(4, train, range(3, 5), saved, kind)
    assert all(parameters.equal(whole) for _, parameters in goes_on)


@on_ranks(2)
def test_states_go_to_torchs_optimizer_and_back(rank: Rank) -> None:
    (model_state, saved), _ = train(rank, range(3), None, "AdamW")
    model = long_model()
    model.load_state_dict(model_state)
    torchs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    torchs.load_state_dict(saved)
    ddp = make_ddp(copy.deepcopy(model))
    state = rota.HookState(model=ddp, wire_dtype=torch.float32)
    optimizer = rota.optim.AdamW(ddp.parameters(), state=state)
    optimizer.load_state_dict(torchs.state_dict())
    for net, one in ((model, torchs), (ddp, optimizer)):
        net(batch_of(0, 3)).square().mean().backward()
        one.step()
    torch.testing.assert_close(flat(ddp), flat(model), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_state_of_parameters_of_several_dtypes_is_gathered(rank: Rank) -> None:
    rank.init("gloo")
    model = torch.nn.ModuleList([make_model(torch.bfloat16), make_model()])
    state = rota.HookState(model=model, wire_dtype=None)
    optimizer = rota.optim.AdamW(model.parameters(), state=state)
    sum(p.float().sum() for p in model.parameters()).backward()
    rota.reduce_gradients(model.parameters(), state)
    optimizer.step()
    states = optimizer.state_dict()["state"]
    for i, parameter in enumerate(model.parameters()):
        saved = states[i]
        assert ("master" in saved) == (parameter.dtype == torch.bfloat16)
        torch.testing.assert_close(saved["exp_avg"], torch.full(parameter.shape, 0.1))


# ---- bad input


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: Rank) -> None:
    rank.init("gloo")
    ddp = make_ddp(make_model())
    state = rota.HookState(model=ddp)
    make = rota.optim.AdamW
    parameters = list(ddp.parameters())
    check_error(error_of(make, parameters, state=3), "TypeError", "a rota.HookState")
    check_error(error_of(make, parameters, state=state, lr=-1), "ValueError", "lr is -1")
    for flag in ("foreach", "capturable", "differentiable", "fused"):
        error = error_of(make, parameters, state=state, **{flag: True})
        check_error(error, "ValueError", flag, "leave it out")
    wide = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
    check_error(error_of(make, wide, state=state), "TypeError", "torch.float64", "torch's")
    optimizer = make(parameters, state=state)
    check_error(error_of(make, parameters, state=state), "ValueError", "has another optimizer")
    group = {"params": [torch.nn.Parameter(torch.ones(1))]}
    check_error(error_of(optimizer.add_param_group, group), "RuntimeError", "make a new one")
    check_error(error_of(optimizer.step), "RuntimeError", "no backward pass was reduced")
    check_error(error_of(optimizer.step, lambda: 0.0), "ValueError", "a closure would")
    ddp(batch_of(rank.rank, 0)).sum().backward()
    error = error_of(rota.clip_grad_norm_, ddp.parameters(), 1.0)
    check_error(error, "RuntimeError", "optimizer.clip_grad_norm_")
    optimizer.step()
    check_error(error_of(optimizer.step), "RuntimeError", "no backward pass was reduced")


@on_ranks(2)
def test_options_that_differ_between_ranks_are_a_mismatch(rank: Rank) -> None:
    rank.init("gloo")
    ddp = make_ddp(make_model())
    state = rota.HookState(model=ddp)
    optimizer = rota.optim.SGD(ddp.parameters(), lr=0.1 + rank.rank, state=state)
    ddp(batch_of(rank.rank, 0)).sum().backward()
    check_error(error_of(optimizer.step), "Mismatch", "update_shards", "options and pieces")


@on_ranks(2)
def test_a_second_reduction_before_the_step_is_an_error_and_training_goes_on(rank: Rank) -> None:
    rank.init("gloo")
    ddp = make_ddp(make_model())
    optimizer = rota.optim.SGD(ddp.parameters(), state=rota.HookState(model=ddp))
    for _ in range(2):
        ddp(batch_of(rank.rank, 0)).sum().backward()
        error = error_of(ddp(batch_of(rank.rank, 1)).sum().backward)
        check_error(error, "RuntimeError", "before a step has used the last ones", "no_sync()")
        optimizer.zero_grad()
        ddp(batch_of(rank.rank, 1)).sum().backward()
        optimizer.step()


def test_bits_do_not_depend_on_the_number_of_ranks() -> None:
    results = [run_ranks(n, train_on_shards, 8) for n in (1, 2, 4)]
    assert all(parameters.equal(results[0][0]) for ranks in results for parameters in ranks)
