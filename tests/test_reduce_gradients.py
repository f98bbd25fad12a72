"""rota.reduce_gradients and overlap_gradients, beside DDP with the fused hook."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rota
from models import (
    SMALL_BUCKETS_MB,
    ExactGradients,
    batch_of,
    exact_batch,
    gradients_of,
    make_model,
    norm_of,
)
from ranks import Rank, check_error, error_of, on_ranks

Reduce = Callable[[nn.Module, rota.HookState, Callable[[], torch.Tensor]], None]


def after_backward(
    model: nn.Module, state: rota.HookState, loss_of: Callable[[], torch.Tensor]
) -> None:
    loss_of().backward()
    rota.reduce_gradients(model.parameters(), state, bucket_cap_mb=SMALL_BUCKETS_MB)


def in_backward(
    model: nn.Module, state: rota.HookState, loss_of: Callable[[], torch.Tensor]
) -> None:
    parameters = list(model.parameters())
    with rota.overlap_gradients(parameters, state, bucket_cap_mb=SMALL_BUCKETS_MB):
        loss_of().backward()


REDUCES = {"after": after_backward, "overlapped": in_backward}


# ---- the same bits as DDP's hook


class Case(NamedTuple):
    options: dict[str, Any]
    make: Callable[[], nn.Module] = make_model
    batch: Callable[[int, int], torch.Tensor] = batch_of


def one_weight() -> nn.Module:
    return ExactGradients(sizes=(2050,))


# Bits depend on the layout of buckets with block scaling and stochastic rounding, so those cases
# have one parameter.
CASES = {
    "float32": Case({"wire_dtype": torch.float32}),
    "bfloat16": Case({"wire_dtype": torch.bfloat16, "loss_scale": 3.0}),
    "float16": Case({"block_scaling": False, "gradient_predivide_factor": 2.0}),
    "feedback": Case({"wire_dtype": torch.bfloat16, "error_feedback": True}),
    "scaled": Case({"wire_dtype": torch.float8_e4m3fn}, one_weight, exact_batch),
    "stochastic": Case(
        {"wire_dtype": torch.float8_e5m2, "stochastic_rounding": True, "seed": 3},
        one_weight,
        exact_batch,
    ),
}


@on_ranks(2)
def test_reduce_gradients_gives_the_bits_of_the_hook(rank: Rank) -> None:
    rank.init("gloo")
    for case_name, case in CASES.items():
        for reduce_name, reduce in REDUCES.items():
            name = f"{case_name}, {reduce_name}"
            model = case.make()
            ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS_MB)
            theirs = rota.HookState(model=ddp, **case.options)
            ddp.register_comm_hook(theirs, rota.fused_hook)
            ours = rota.HookState(model=model, **case.options)
            for step in range(3):
                batch = case.batch(rank.rank, step) / 3
                for module in (model, ddp):
                    module.zero_grad()
                ddp(batch).sum().backward()
                reduce(model, ours, lambda: model(batch).sum())
                assert torch.equal(gradients_of(model), gradients_of(ddp)), f"{name}, {step}"
                assert not ours.found_inf
                assert ours.grad_norm() == pytest.approx(theirs.grad_norm().item(), rel=1e-6)
            saved, expected = (state.state_dict()["residuals"] for state in (ours, theirs))
            assert saved.keys() == expected.keys(), name
            assert all(torch.equal(saved[key], expected[key]) for key in saved), name


# ---- every kind of list


def leave_some_unused(rank: Rank) -> None:
    """Each parameter is used by all ranks, by rank 0 only, or by none, in turn."""
    for reduce in REDUCES.values():
        model, state = ExactGradients(), rota.HookState()
        ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
        for step in range(5):
            used = [(step + i) % 5 for i in range(3)]
            used += [(step + 3) % 5] if rank.rank == 0 else []
            batch = exact_batch(rank.rank, step)
            for module in (model, ddp):
                module.zero_grad()
            ddp(batch, used).backward()
            reduce(model, state, lambda: model(batch, used))
            for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None and theirs.grad is not None:
                    assert torch.equal(ours.grad, theirs.grad)
            assert state.grad_norm().item() == norm_of(model).item()


def accumulate(rank: Rank) -> None:
    model, state = ExactGradients(), rota.HookState()
    with rota.overlap_gradients(
        model.parameters(), state, num_backwards=3, bucket_cap_mb=SMALL_BUCKETS_MB
    ):
        for step in range(3):
            model(exact_batch(rank.rank, step)).backward()
    batches = [[exact_batch(other, step) for step in range(3)] for other in range(rank.world_size)]
    expected = torch.stack([torch.stack(of_rank).sum(0) for of_rank in batches]).mean(0)
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, expected[: parameter.numel()])
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def reduce_mixed(rank: Rank) -> None:
    """Several dtypes, a transposed weight, one without elements, and one that is not trained."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.float16)
    parameters = [nn.Parameter(torch.zeros(6, 5, dtype=dtype)) for dtype in dtypes]
    parameters.append(nn.Parameter(torch.zeros(4, 3).t()))
    parameters.append(nn.Parameter(torch.zeros(0)))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    frozen.grad = torch.full((2,), 7.0)
    for parameter in parameters:
        values = exact_batch(rank.rank, 1, parameter.numel()).view(parameter.shape)
        parameter.grad = values.to(parameter.dtype)
        if parameter.is_complex():
            parameter.grad *= 1 - 2j
    state = rota.HookState(wire_dtype=torch.float32)
    rota.reduce_gradients((p for p in [*parameters, frozen, parameters[1]]), state)
    sum_of_squares = 0.0
    for parameter in parameters:
        of_ranks = [exact_batch(r, 1, parameter.numel()) for r in range(rank.world_size)]
        expected = torch.stack(of_ranks).mean(0).view(parameter.shape).to(parameter.dtype)
        if parameter.is_complex():
            expected = expected * (1 - 2j)
        assert torch.equal(parameter.grad, expected), parameter.dtype
        sum_of_squares += expected.abs().double().square().sum().item()
    assert frozen.grad.tolist() == [7.0, 7.0]
    assert state.grad_norm().item() == pytest.approx(sum_of_squares**0.5, rel=1e-6)


def reduce_odd_lists(rank: Rank) -> None:
    state = rota.HookState()
    rota.reduce_gradients([], state)
    with rota.overlap_gradients([], state):
        pass
    assert state.grad_norm() == 0 and not state.found_inf
    alone = nn.Parameter(torch.zeros(3))
    rota.reduce_gradients(alone, state)
    assert alone.grad is None
    alone.grad = torch.tensor([2.0 * rank.rank, torch.inf if rank.rank == 1 else 0.0, 0.0])
    rota.reduce_gradients(alone, state)
    assert alone.grad.tolist() == [1.0, torch.inf, 0.0]
    assert state.found_inf and state.grad_norm().isinf()


def freeze_and_resize(rank: Rank) -> None:
    """The list may change from step to step, with the residuals of what stays."""
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    state = rota.HookState(wire_dtype=torch.bfloat16, error_feedback=True)

    def reduce(value: float) -> list[list[float] | None]:
        for weight in weights:
            weight.grad = torch.full_like(weight, value) if weight.requires_grad else None
        rota.reduce_gradients(weights, state)
        return [None if w.grad is None else w.grad.unique().tolist() for w in weights]

    # 257 has 9 bits, bfloat16 has 8: it is rounded to 256, and the missing 1 is sent next time.
    weights[1].requires_grad_(False)
    assert reduce(257.0) == [[256.0], None, [256.0]]
    weights[1].requires_grad_(True)
    assert reduce(257.0) == [[258.0], [256.0], [258.0]]
    for weight in weights:
        weight.grad = None
    weights[2].data = torch.zeros(2, 3)
    assert reduce(257.0) == [[256.0], [258.0], [256.0]]


def replace_parameters(rank: Rank) -> None:
    """A state follows what its model trains, also when that changes after it was made."""
    model = nn.ParameterList([torch.zeros(4) for _ in range(3)])
    state = rota.HookState(model=model, wire_dtype=torch.bfloat16, error_feedback=True)

    def reduce() -> dict[str, float]:
        for weight in model:
            weight.grad = torch.full_like(weight, 257.0) if weight.requires_grad else None
        rota.reduce_gradients(model.parameters(), state)
        return {name: x.unique().item() for name, x in state.state_dict()["residuals"].items()}

    model[0].requires_grad_(False)
    residuals = {"1": torch.full((4,), 1.0), "2": torch.full((4,), 2.0)}
    state.load_state_dict({"seed": 0, "num_reductions": 0, "residuals": residuals})
    assert reduce() == {"1": 0, "2": -1}
    model[1] = nn.Parameter(torch.zeros(3))
    model[0].requires_grad_(True)
    assert reduce() == {"0": 1, "1": 1, "2": 0}


@on_ranks(2)
def test_reduce_gradients_of_every_kind_of_list(rank: Rank) -> None:
    rank.init("gloo")
    leave_some_unused(rank)
    accumulate(rank)
    reduce_mixed(rank)
    reduce_odd_lists(rank)
    freeze_and_resize(rank)
    replace_parameters(rank)


# ---- with the scaler and clipping


@on_ranks(2)
def test_scaler_and_clipping_use_the_results_of_reduce_gradients(rank: Rank) -> None:
    """Beside torch's scaler and clipping, on gradients with the same bits; step 2 has an Inf."""
    rank.init("gloo")
    models = [make_model() for _ in range(2)]
    state = rota.HookState(wire_dtype=torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, fused=True) for m in models]
    ours = rota.amp.GradScaler(state, init_scale=8.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    communicator = rota.Communicator()
    for step in range(4):
        batch = batch_of(rank.rank, step)
        if step == 2 and rank.rank == 1:
            batch[0, 0] = torch.inf
        for scaler, model, optimizer in zip((ours, theirs), models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if scaler is ours:
                rota.reduce_gradients(model.parameters(), state)
                norm = rota.clip_grad_norm_(model.parameters(), 0.01, optimizer=optimizer)
            else:
                for parameter in model.parameters():
                    communicator.all_reduce(parameter.grad, "avg")
                scaler.unscale_(optimizer)
                expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0, equal_nan=True)
        assert ours.get_scale() == theirs.get_scale() == (8.0 if step < 2 else 4.0)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)  # the orders of the norms differ


# ---- errors


def weights_of(*sizes: int) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return weights


def be_sparse(rank: int) -> None:
    weights = weights_of(3, 5)
    if rank == 1:
        weights[1].grad = torch.ones(5).to_sparse()
    rota.reduce_gradients(weights, rota.HookState())


def be_sparse_overlapped(rank: int) -> None:
    embedding = nn.Embedding(8, 2, sparse=rank == 1)
    with rota.overlap_gradients(embedding.parameters(), rota.HookState()):
        embedding(torch.tensor([1])).sum().backward()


def have_other_state(rank: int) -> None:
    state: Any = rota.HookState() if rank == 0 else "state"
    rota.reduce_gradients(weights_of(3), state)


def have_no_gradients_of_this_dtype(rank: int) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float8_e5m2 if rank == 1 else torch.float32))
    rota.reduce_gradients([weight], rota.HookState())


def have_old_gradient(rank: int) -> None:
    weights = weights_of(3)
    if rank == 1:
        weights[0].data = torch.zeros(4)
    rota.reduce_gradients(weights, rota.HookState())


def share_state(rank: int) -> None:
    first, second, state = weights_of(3), weights_of(3), rota.HookState()
    rota.reduce_gradients(first, state)
    rota.reduce_gradients(second if rank == 1 else first, state)


@on_ranks(2)
def test_a_state_with_a_model_reduces_its_parts_in_turns(rank: Rank) -> None:
    rank.init("gloo")
    model = nn.ModuleList(ExactGradients() for _ in range(2))
    state = rota.HookState(wire_dtype=torch.bfloat16, error_feedback=True, model=model)
    for step in range(3):
        for part in model:
            model.zero_grad()
            part(exact_batch(rank.rank, step)).backward()
            rota.reduce_gradients(part.parameters(), state)
            batches = [exact_batch(i, step) for i in range(rank.world_size)]
            for weight in part.parameters():
                expected = sum(batch[: weight.numel()] for batch in batches) / len(batches)
                assert torch.equal(weight.grad, expected)
    assert len(state.state_dict()["residuals"]) == len(list(model.parameters()))


def have_no_cap(rank: int) -> None:
    cap_mb = 1.0 - rank
    rota.reduce_gradients(weights_of(3), rota.HookState(), bucket_cap_mb=cap_mb)


def count_wrong(rank: int) -> None:
    model, state = ExactGradients(), rota.HookState()
    with rota.overlap_gradients(model.parameters(), state, num_backwards=2 - rank):
        for step in range(2):
            model(exact_batch(rank, step)).backward()


def fail_in_context(rank: int) -> None:
    model, state = ExactGradients(), rota.HookState()
    with rota.overlap_gradients(model.parameters(), state):
        model(exact_batch(rank, 0)).backward()
        if rank == 1:
            raise KeyError("of the user")


ERRORS_OF_ONE_RANK: dict[Callable[[int], None], tuple[str, tuple[str, ...]]] = {
    be_sparse: ("TypeError", ("parameter 1 of the list, shape [5]", "sparse_coo", "sparse=False")),
    be_sparse_overlapped: ("TypeError", ("parameter 0 of the list, shape [8, 2]", "sparse_coo")),
    have_other_state: ("TypeError", ("str", "rota.HookState(...)")),
    have_no_gradients_of_this_dtype: ("TypeError", ("parameter 0", "float8_e5m2", "float16")),
    have_old_gradient: ("ValueError", ("parameter 0", "[3]", "[4]", "zero_grad()")),
    share_state: ("ValueError", ("one rota.HookState for each model",)),
    have_no_cap: ("ValueError", ("bucket_cap_mb is 0.0",)),
    count_wrong: ("RuntimeError", ("2 times, expected 1", "num_backwards")),
    fail_in_context: ("KeyError", ("of the user",)),
}


def have_more(rank: int) -> None:
    rota.reduce_gradients(weights_of(3, *([2] if rank == 1 else [])), rota.HookState())


def have_none(rank: int) -> None:
    rota.reduce_gradients(weights_of(3) if rank == 1 else [], rota.HookState())


def have_another_shape(rank: int) -> None:
    rota.reduce_gradients(weights_of(3 + rank), rota.HookState())


def have_another_order(rank: int) -> None:
    shapes = [(2, 3), (6,), (3, 2)]
    listed = [torch.nn.Parameter(torch.zeros(s)) for s in (shapes if rank == 0 else shapes[::-1])]
    for i, parameter in enumerate(listed):
        parameter.grad = torch.full_like(parameter, float(i))
    try:
        rota.reduce_gradients(listed, rota.HookState())
    finally:
        assert [p.grad.unique().tolist() for p in listed] == [[0.0], [1.0], [2.0]]  # type: ignore[union-attr]


def have_names_in_another_order(rank: int) -> None:
    model = torch.nn.ParameterList(weights_of(3) + weights_of(3))
    listed = list(model) if rank == 0 else list(model)[::-1]
    with rota.overlap_gradients(listed, rota.HookState(model=model)):
        sum(p.sum() for p in listed).backward()


MISMATCHES = (
    have_more,
    have_none,
    have_another_shape,
    have_another_order,
    have_names_in_another_order,
)


def error_in_own_group(rank: Rank, call: Callable[[int], None]) -> tuple[str, str]:
    """An error on one rank ends the group's reductions."""
    rank.init("gloo")
    error = error_of(lambda: call(rank.rank))
    dist.barrier()
    return error


@pytest.mark.parametrize("call", ERRORS_OF_ONE_RANK)
@on_ranks(2)
def test_error_of_one_rank_is_raised_on_all(rank: Rank, call: Callable[[int], None]) -> None:
    error, facts = ERRORS_OF_ONE_RANK[call]
    expected = (error,) if rank.rank == 1 else ("PeerFailed", "rank 1")
    check_error(error_in_own_group(rank, call), *expected, *facts)


@pytest.mark.parametrize("call", MISMATCHES)
@on_ranks(2)
def test_lists_that_differ_are_a_mismatch(rank: Rank, call: Callable[[int], None]) -> None:
    check_error(error_in_own_group(rank, call), "Mismatch")
