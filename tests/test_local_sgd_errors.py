"""LocalSGD and DiLoCo where gradients diverge, ranks disagree, or use is bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import rota
from local_sgd_workers import (
    check_equal_on_all_ranks,
    flat,
    make_diloco,
    train,
)
from models import batch_of, make_model
from oracle import assert_same
from ranks import Rank, check_error, error_of, on_ranks
from rota.local_sgd import DiLoCo, LocalSGD


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
@on_ranks(2)
def test_a_difference_that_is_not_finite_is_dropped_on_all_ranks(rank: Rank, value: float) -> None:
    rank.init()
    for make in (LocalSGD, make_diloco):
        for num_fragments in (1, 2):
            model = make_model()
            state = rota.HookState(wire_dtype=torch.bfloat16, error_feedback=True)
            outer = make(model, 4, num_fragments=num_fragments, state=state)
            train(rank, model, outer, range(5))
            assert torch.isfinite(outer.state.grad_norm())
            before = {k: v.clone() for k, v in outer.state_dict()["parameters"].items()}
            residuals = state.state_dict()["residuals"]
            if rank.rank == 1:
                with torch.no_grad():
                    model[2].weight[3, 4] = value
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outer.sync()
            texts = [str(warning.message) for warning in caught]
            assert len(texts) == (rank.rank == 1)
            if texts:
                assert "'2.weight'" in texts[0]
                assert "rank 1 after step 5" in texts[0]
            assert outer.num_skipped == 1
            parameters = dict(model.named_parameters())
            kept = [name for name in before if torch.equal(parameters[name], before[name])]
            assert "2.weight" in kept
            still_owed = state.state_dict()["residuals"]
            assert all(torch.equal(still_owed[name], residuals[name]) for name in kept)
            assert (len(kept) == len(before)) == (num_fragments == 1)
            check_equal_on_all_ranks(model, "after the drop")
            train(rank, model, outer, range(4))
            outer.sync()
            check_equal_on_all_ranks(model, "later")
            assert torch.isfinite(flat(model)).all()
            assert outer.num_skipped == 1


@on_ranks(2)
def test_a_rank_that_takes_fewer_steps_is_named(rank: Rank) -> None:
    rank.init(timeout_s=2.0)
    model = make_model()
    outer = LocalSGD(model, 2)
    train(rank, model, outer, range(2))
    if rank.rank == 0:
        check_error(error_of(train, rank, model, outer, range(2)), "Timeout", "rank 1")
        rank.say()
    rank.await_word()


@on_ranks(2)
def test_ranks_that_disagree_get_a_mismatch(rank: Rank) -> None:
    rank.init()
    model = make_model()

    def sgd(lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def refuses(fact: str, call: Callable[..., object], *args: Any, **options: Any) -> None:
        check_error(error_of(call, *args, **options), "Mismatch", fact)

    one = rank.rank
    shorter = nn.Sequential(*list(model)[: 1 + 2 * one])
    refuses("disagree on sync_every: rank 0 has 2; rank 1 has 3", LocalSGD, model, 2 + one)
    fact = "num_fragments: rank 0 has 1; rank 1 has 2"
    refuses(fact, LocalSGD, model, 4, num_fragments=1 + one)
    refuses("num_tensors: rank 0 has 2; rank 1 has 4", LocalSGD, shorter, 2)
    refuses("broadcast(float32[2], root 0)", LocalSGD, nn.Linear(2 + one, 1), 2)
    fact = "outer_optimizer: rank 0 has SGD(lr=0.5, "
    refuses(fact, DiLoCo, model, sgd(0.5 + one, 0.0), 2)
    refuses("momentum=0.9, ", DiLoCo, model, sgd(0.5, 0.9 * one), 2)
    make = (torch.optim.SGD, torch.optim.Adam)[one]
    refuses("rank 1 has Adam(lr=0.5, ", DiLoCo, model, make(model.parameters(), lr=0.5), 2)
    diloco = make_diloco(make_model(), 1)
    diloco.outer_optimizer.param_groups[0]["lr"] = 0.5 + one
    refuses("outer_optimizer's lr is 0.5 on rank 0, 1.5 on rank 1", diloco.step)
    outer = LocalSGD(model, 4)
    outer.num_steps += 4 * one
    before = flat(model)
    for _ in range(3):
        outer.step()
    refuses("step is 4 on rank 0, 8 on rank 1", outer.step)
    assert_same(flat(model), before, "parameters after a mismatch")
    state = rota.HookState(wire_dtype=(torch.float16, torch.bfloat16)[one])
    refuses("wire", LocalSGD(model, 1, state=state).step)
    assert_same(flat(model), before, "parameters after a mismatch")
    LocalSGD(model, 1).step()  # the group is usable


@on_ranks(2)
def test_what_belongs_to_nobody_or_to_one_rank_is_not_averaged(rank: Rank) -> None:
    rank.init()
    model = make_model()
    model(batch_of(0, 0)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    outer = make_diloco(model, 1)
    outer.step()
    assert torch.equal(model[0].weight, before)
    for sharded in (
        fully_shard(make_model()),
        FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")),
    ):
        check_error(error_of(LocalSGD, sharded, 1), "ValueError", "ranks [0, 1]", "same shard")


@on_ranks(2)
def test_parameters_that_came_later_are_named(rank: Rank) -> None:
    rank.init()
    for make in (LocalSGD, make_diloco):
        model = make_model()
        model[0].weight.requires_grad_(False)
        outer = make(model, 2)
        model[0].weight.requires_grad_(True)
        outer.step()
        check_error(error_of(outer.step), "ValueError", "came later: ['0.weight']")
        outer = make(model, 1)
        model[2].bias = nn.Parameter(torch.zeros(48))
        model.append(nn.Linear(2, 2))
        for call in (outer.step, outer.sync):
            fact = "came later: ['2.bias', '5.weight', '5.bias']"
            check_error(error_of(call), "ValueError", fact)
    make(make_model(), 1).step()  # the group is usable


@on_ranks(2)
def test_bad_use_is_an_error_that_says_what_to_do(rank: Rank) -> None:
    rank.init()
    model = make_model()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    used = rota.HookState()
    rota.reduce_gradients(model.parameters(), used)
    taken = rota.HookState()
    outer_optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    DiLoCo(model, outer_optimizer, 2, state=taken)
    stepped = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(batch_of(0, 0)).sum().backward()
    stepped.step()
    partial = torch.optim.SGD(model[0].parameters(), lr=1.0)
    of_another = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=1.0)
    outer = LocalSGD(model, 2)
    smaller = LocalSGD(make_model()[2], 2)
    shards = rota.HookState(num_shards=2)
    replicas = rota.HookState(model_group=dist.group.WORLD, replicas=lambda parameter: 1)

    def refuses(kind: str, fact: str, call: Callable[..., object], *args: Any, **more: Any) -> None:
        check_error(error_of(call, *args, **more), kind, fact)

    def refuses_options(kind: str, fact: str, *args: Any, **more: Any) -> None:
        refuses(kind, fact, LocalSGD, model, *args, **more)

    refuses_options("ValueError", "sync_every is 0, expected an int of 1 or more", 0)
    fact = "num_fragments is 3, expected at most sync_every (2)"
    refuses_options("ValueError", fact, 2, num_fragments=3)
    fact = "the number of parameters and buffers (6)"
    refuses_options("ValueError", fact, 100, num_fragments=7)
    fact = "fragment_sync_delay is 2, expected an int from 0 to 1"
    refuses_options("ValueError", fact, 8, num_fragments=4, fragment_sync_delay=2)
    refuses_options("ValueError", "fragment_update_alpha is 1.0", 8, fragment_update_alpha=1.0)
    refuses_options("TypeError", "state is of type str", 8, state="rota")
    refuses_options("ValueError", "make one of its own", 8, state=used)
    refuses_options("ValueError", "make one of its own", 8, state=taken)
    refuses_options("ValueError", "num_shards is 2", 8, state=shards)
    refuses_options("ValueError", "replicas would be asked about copies", 8, state=replicas)
    refuses("ValueError", "no parameter that requires a gradient", LocalSGD, frozen, 8)
    refuses("TypeError", "model is of type list", LocalSGD, [model], 2)
    refuses("TypeError", "outer_optimizer is of type str", DiLoCo, model, "sgd", 8)
    fact = "lacks ['0.weight', '0.bias', '2.weight'"
    refuses("ValueError", fact, DiLoCo, model, outer_optimizer, 8)
    refuses("ValueError", "has taken steps", DiLoCo, model, stepped, 8)
    fact = "lacks ['2.weight', '2.bias', '4.weight', '4.bias']"
    refuses("ValueError", fact, DiLoCo, model, partial, 8)
    refuses("ValueError", "has 1 others", DiLoCo, model, of_another, 8)
    fact = "'0.bias' is missing, expected [64]"
    refuses("ValueError", fact, outer.load_state_dict, smaller.state_dict())
    fact = "state_dict lacks ['num_skipped', 'synced_at'"
    refuses("ValueError", fact, outer.load_state_dict, {"num_steps": 3})
    fact = "make another optimizer for the inner steps"
    refuses("ValueError", fact, outer_optimizer.step)
