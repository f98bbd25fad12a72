"""LocalSGD and DiLoCo where gradients diverge, ranks disagree, or use is bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable

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
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks
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


def leave_early(rank: Rank) -> tuple[str, str]:
    rank.init(timeout_s=2.0)
    model = make_model()
    outer = LocalSGD(model, 2)
    train(rank, model, outer, range(2))
    if rank.rank == 1:
        rank.hear()
        return "nothing", ""
    error = error_of(lambda: train(rank, model, outer, range(2)))
    rank.tell()
    return error


def test_a_rank_that_takes_fewer_steps_is_named() -> None:
    with Ranks(2, leave_early) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        error, text = ranks.results()[0]
    assert error == "Timeout"
    assert "rank 1" in text


@on_ranks(2)
def test_ranks_that_disagree_get_a_mismatch(rank: Rank) -> None:
    rank.init()
    model = make_model()
    errors = [
        error_of(lambda: LocalSGD(model, 2 + rank.rank)),
        error_of(lambda: LocalSGD(model, 4, num_fragments=1 + rank.rank)),
        error_of(lambda: LocalSGD(nn.Sequential(*list(model)[: 1 + 2 * rank.rank]), 2)),
        error_of(lambda: LocalSGD(nn.Linear(2 + rank.rank, 1), 2)),
    ]
    for lr, momentum in ((0.5 + rank.rank, 0.0), (0.5, 0.9 * rank.rank)):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        errors.append(error_of(lambda optimizer=optimizer: DiLoCo(model, optimizer, 2)))
    make = (torch.optim.SGD, torch.optim.Adam)[rank.rank]
    errors.append(error_of(lambda: DiLoCo(model, make(model.parameters(), lr=0.5), 2)))
    diloco = make_diloco(make_model(), 1)
    diloco.outer_optimizer.param_groups[0]["lr"] = 0.5 + rank.rank
    errors.append(error_of(diloco.step))
    outer = LocalSGD(model, 4)
    outer.num_steps += 4 * rank.rank
    before = flat(model)
    errors.append(error_of(lambda: [outer.step() for _ in range(4)]))
    assert_same(flat(model), before, "parameters after a mismatch")
    state = rota.HookState(wire_dtype=(torch.float16, torch.bfloat16)[rank.rank])
    other = LocalSGD(model, 1, state=state)
    errors.append(error_of(other.step))
    assert_same(flat(model), before, "parameters after a mismatch")
    LocalSGD(model, 1).step()  # the group is usable
    assert [error for error, _ in errors] == ["Mismatch"] * 10
    for (_, text), part in zip(
        errors,
        (
            "disagree on sync_every: rank 0 has 2; rank 1 has 3",
            "num_fragments: rank 0 has 1; rank 1 has 2",
            "num_tensors: rank 0 has 2; rank 1 has 4",
            "broadcast(float32[2], root 0)",
            "outer_optimizer: rank 0 has SGD(lr=0.5, ",
            "momentum=0.9, ",
            "rank 1 has Adam(lr=0.5, ",
            "outer_optimizer's lr is 0.5 on rank 0, 1.5 on rank 1",
            "step is 4 on rank 0, 8 on rank 1",
            "wire",
        ),
        strict=True,
    ):
        assert part in text


@on_ranks(2)
def test_what_belongs_to_nobody_or_to_one_rank_is_not_averaged(rank: Rank) -> None:
    """Frozen parameters stay as they are; shards of one worker are not averaged."""
    rank.init()
    model = make_model()
    model(batch_of(0, 0)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    outer = make_diloco(model, 1)
    outer.step()
    assert torch.equal(model[0].weight, before)
    errors = []
    for sharded in (
        fully_shard(make_model()),
        FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")),
    ):
        errors.append(error_of(lambda model=sharded: LocalSGD(model, 1)))
    for error in errors:
        check_error(error, "ValueError", "ranks [0, 1]", "same shard")


def change_the_model(rank: Rank) -> list[tuple[str, str]]:
    rank.init()
    errors = []
    for make in (LocalSGD, make_diloco):
        model = make_model()
        model[0].weight.requires_grad_(False)
        outer = make(model, 2)
        model[0].weight.requires_grad_(True)
        outer.step()
        errors.append(error_of(outer.step))
        outer = make(model, 1)
        model[2].bias = nn.Parameter(torch.zeros(48))
        model.append(nn.Linear(2, 2))
        errors += [error_of(outer.step), error_of(outer.sync)]
    make(make_model(), 1).step()  # the group is usable
    return errors


def test_parameters_that_came_later_are_named() -> None:
    expected = ["came later: ['0.weight']", *["came later: ['2.bias', '5.weight', '5.bias']"] * 2]
    for errors in run_ranks(2, change_the_model):
        for (error, text), part in zip(errors, expected * 2, strict=True):
            assert error == "ValueError" and part in text, text


def use_badly(rank: Rank) -> list[tuple[str, str]]:
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
    calls: list[Callable[[], object]] = [
        lambda: LocalSGD(model, 0),
        lambda: LocalSGD(model, 2.0),  # type: ignore[arg-type]
        lambda: LocalSGD(model, 2, num_fragments=3),
        lambda: LocalSGD(model, 100, num_fragments=7),
        lambda: LocalSGD(model, 8, num_fragments=4, fragment_sync_delay=2),
        lambda: LocalSGD(model, 8, fragment_update_alpha=1.0),
        lambda: LocalSGD(frozen, 8),
        lambda: LocalSGD(model, 8, state="rota"),  # type: ignore[arg-type]
        lambda: LocalSGD(model, 8, state=used),
        lambda: LocalSGD(model, 8, state=taken),
        lambda: LocalSGD(model, 8, state=shards),
        lambda: LocalSGD(model, 8, state=replicas),
        lambda: DiLoCo(model, "sgd", 8),  # type: ignore[arg-type]
        lambda: DiLoCo(model, outer_optimizer, 8),
        lambda: DiLoCo(model, stepped, 8),
        lambda: DiLoCo(model, partial, 8),
        lambda: DiLoCo(model, of_another, 8),
        lambda: outer.load_state_dict(smaller.state_dict()),
        outer_optimizer.step,
        lambda: LocalSGD([model], 2),  # type: ignore[arg-type]
        lambda: outer.load_state_dict({"num_steps": 3}),
    ]
    return [error_of(call) for call in calls]


def test_bad_use_is_an_error_that_says_what_to_do() -> None:
    expected = [
        ("ValueError", "sync_every is 0, expected an int of 1 or more"),
        ("ValueError", "sync_every is 2.0"),
        ("ValueError", "num_fragments is 3, expected at most sync_every (2)"),
        ("ValueError", "the number of parameters and buffers (6)"),
        ("ValueError", "fragment_sync_delay is 2, expected an int from 0 to 1"),
        ("ValueError", "fragment_update_alpha is 1.0"),
        ("ValueError", "no parameter that requires a gradient"),
        ("TypeError", "state is of type str"),
        ("ValueError", "make one of its own"),
        ("ValueError", "make one of its own"),
        ("ValueError", "num_shards is 2"),
        ("ValueError", "replicas would be asked about copies"),
        ("TypeError", "outer_optimizer is of type str"),
        ("ValueError", "lacks ['0.weight', '0.bias', '2.weight'"),
        ("ValueError", "has taken steps"),
        ("ValueError", "lacks ['2.weight', '2.bias', '4.weight', '4.bias']"),
        ("ValueError", "has 1 others"),
        ("ValueError", "'0.bias' is missing, expected [64]"),
        ("ValueError", "make another optimizer for the inner steps"),
        ("TypeError", "model is of type list"),
        ("ValueError", "state_dict lacks ['num_skipped', 'synced_at'"),
    ]
    for errors in run_ranks(2, use_badly):
        for (error, text), (expected_error, part) in zip(errors, expected, strict=True):
            assert error == expected_error, text
            assert part in text
