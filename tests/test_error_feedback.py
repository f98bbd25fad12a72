"""Error feedback of rota.fused_hook: residuals follow their parameters across DDP's buckets."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from models import (
    SMALL_BUCKETS_MB,
    ExactGradients,
    batch_of,
    exact_batch,
    fused_ddp,
    gradients_of,
    make_model,
    norm_of,
)
from oracle import random_inputs
from ranks import Rank, check_error, error_of, on_ranks
from rota.gradients.residuals import BucketResidual
from rota.gradients.results import Outcome

# Without block scaling, an element's result does not depend on its bucket.
UNSCALED = {"wire_dtype": torch.bfloat16, "error_feedback": True}


SINGLE, DOUBLE = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtypes", "as_view"),
    [
        ((SINGLE,) * 5, False),
        ((SINGLE,) * 5, True),
        ((DOUBLE, SINGLE, SINGLE, DOUBLE, SINGLE), False),
    ],
    ids=["copy", "view", "several-dtypes"],
)
@on_ranks(2)
def test_error_feedback_moves_with_parameters_to_other_buckets(
    rank: Rank, dtypes: tuple[torch.dtype, ...], as_view: bool
) -> None:
    """Compares with plain torch, one parameter at a time, across DDP's bucket rebuild."""
    rank.init("gloo")
    loss_scale = 4.0
    model = ExactGradients(dtypes)
    state = rota.HookState(loss_scale=loss_scale, model=model, **UNSCALED)
    ddp = fused_ddp(model, state, gradient_as_bucket_view=as_view)
    names = [name for name, _ in model.named_parameters()]
    residuals = [{name: torch.zeros(1) for name in names} for _ in range(rank.world_size)]
    for step in range(4):
        batches = random_inputs(rank.world_size, 2050 + step, torch.float32)
        ddp.zero_grad()
        ddp(batches[rank.rank]).backward()
        for name, parameter in model.named_parameters():
            total = torch.zeros(parameter.numel())
            for batch, residual in zip(batches, residuals, strict=True):
                gradient = batch[: parameter.numel()].to(parameter.dtype).float()
                wanted = gradient + residual[name] * loss_scale
                sent = wanted.bfloat16().float()
                residual[name] = (wanted - sent) / loss_scale
                total += sent
            average = (total / rank.world_size).bfloat16().float() / loss_scale
            assert torch.equal(parameter.grad, average.to(parameter.dtype)), f"{step}, {name}"
    saved = state.state_dict()["residuals"]
    assert saved.keys() == set(names)
    for name in names:
        assert torch.equal(saved[name], residuals[rank.rank][name]), name
        assert saved[name].any(), "there was something to feed back"


class Layouts(torch.nn.Module):
    """Parameters with three memory layouts, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = torch.nn.Parameter(torch.zeros(7, 5).t())  # dense, in another order
        self.spread = torch.nn.Parameter(torch.zeros(6, 8)[:, ::2])  # not dense
        self.rows = torch.nn.Parameter(torch.zeros(3, 4))
        self.waves = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))

    def forward(self, scale: float) -> torch.Tensor:
        terms = []
        for parameter in self.parameters():
            factors = scale / torch.arange(3, 3 + parameter.numel()).view(parameter.shape)
            if parameter.is_complex():
                terms.append((parameter * torch.complex(factors, 2 * factors)).real.sum())
            else:
                terms.append((parameter * factors).sum())
        return torch.stack(terms).sum()


@on_ranks(1)
def test_residuals_are_saved_in_the_shape_of_their_parameters(rank: Rank) -> None:
    rank.init("gloo")
    model = Layouts()
    state = rota.HookState(model=model, **UNSCALED)
    ddp = fused_ddp(model, state)
    ddp(1.0).backward()
    residuals = state.state_dict()["residuals"]
    for name, parameter in model.named_parameters():
        count = torch.arange(3, 3 + parameter.numel()).view(parameter.shape)
        gradient = 1.0 / count
        if parameter.is_complex():
            gradient = torch.complex(gradient, -2 * gradient)
            real = torch.view_as_real(gradient)
            expected = torch.view_as_complex(real - real.bfloat16().float())
        else:
            expected = gradient - gradient.bfloat16().float()
        assert torch.equal(residuals[name], expected), name
    # Loaded into the same model with all parameters laid out in rows.
    in_rows = Layouts()
    for name in ("columns", "spread"):
        setattr(in_rows, name, torch.nn.Parameter(getattr(in_rows, name).detach().contiguous()))
    other = rota.HookState(model=in_rows, **UNSCALED)
    other.load_state_dict(state.state_dict())
    ddp_in_rows = fused_ddp(in_rows, other)
    ddp_in_rows(2.0).backward()
    ddp.zero_grad()
    ddp(2.0).backward()
    for (name, p), q in zip(model.named_parameters(), in_rows.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


# ---- a run that is stopped and resumed

NUM_STEPS = 6


def train(rank: Rank, steps: range, checkpoint: io.BytesIO, **options: Any) -> torch.Tensor:
    """Trains `steps` from the checkpoint before them, saves one after; returns parameters."""
    model = make_model()
    state = rota.HookState(model=model, **{**UNSCALED, **options})
    # With SMALL_BUCKETS_MB some parameters change buckets after the first step.
    ddp = fused_ddp(model, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "hook": state}
    if steps.start > 0:
        checkpoint.seek(0)
        for name, saved in torch.load(checkpoint).items():
            parts[name].load_state_dict(saved)
    for step in steps:
        optimizer.zero_grad()
        ddp(batch_of(rank.rank, step)).square().mean().backward()
        optimizer.step()
    torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("stop_at", [1, 3])
@on_ranks(2)
def test_stopped_run_gives_the_bits_of_a_straight_one(rank: Rank, stop_at: int) -> None:
    rank.init("gloo")
    straight = train(rank, range(NUM_STEPS), io.BytesIO())
    checkpoint = io.BytesIO()
    train(rank, range(stop_at), checkpoint)
    assert torch.equal(train(rank, range(stop_at, NUM_STEPS), checkpoint), straight)
    without = train(rank, range(NUM_STEPS), io.BytesIO(), error_feedback=False)
    assert not torch.equal(without, straight)


@on_ranks(2)
def test_state_can_be_loaded_in_the_middle_of_a_run(rank: Rank) -> None:
    rank.init("gloo")
    model = ExactGradients()
    state = rota.HookState(model=model, **UNSCALED)
    ddp = fused_ddp(model, state)
    batches = [
        batch[rank.rank] for batch in (random_inputs(2, 2050 + i, torch.float32) for i in range(4))
    ]

    def step(batch: torch.Tensor) -> torch.Tensor:
        ddp.zero_grad()
        ddp(batch).backward()
        return gradients_of(ddp)

    step(batches[0])
    step(batches[1])
    saved = state.state_dict()
    expected = step(batches[2])
    assert not torch.equal(step(batches[2]), expected), "the residual makes a difference"
    state.load_state_dict(saved)
    untouched = state.state_dict()
    assert untouched["num_reductions"] == saved["num_reductions"]
    for name, residual in saved["residuals"].items():
        assert torch.equal(untouched["residuals"][name], residual)
    assert torch.equal(step(batches[2]), expected)


# ---- states that cannot be restored


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("renamed", ("missing ['weights.1']", "unexpected ['bias']")),
        ("reshaped", ("'weights.1'", "[2]", "[700]")),
    ],
)
@on_ranks(2)
def test_residuals_of_another_model_are_refused(
    rank: Rank, change: str, facts: tuple[str, ...]
) -> None:
    rank.init("gloo")
    model = ExactGradients()
    state = rota.HookState(model=model, **UNSCALED)
    first = fused_ddp(model, state)
    first(exact_batch(rank.rank, 0)).backward()
    saved = state.state_dict()
    if change == "renamed":
        saved["residuals"]["bias"] = saved["residuals"].pop("weights.1")
    else:
        saved["residuals"]["weights.1"] = torch.zeros(2)
    other_model = ExactGradients()
    other = rota.HookState(model=other_model, **UNSCALED)
    other.load_state_dict(saved)
    ddp = fused_ddp(other_model, other)
    check_error(error_of(lambda: ddp(exact_batch(rank.rank, 0)).backward()), "ValueError", *facts)


@on_ranks(1)
def test_residual_of_an_unused_parameter_is_not_in_the_norm(rank: Rank) -> None:
    """A residual is sent even for a parameter without a gradient; the norm must not count it."""
    rank.init("gloo")
    state = rota.HookState(**UNSCALED)
    ddp = fused_ddp(ExactGradients(), state, find_unused_parameters=True)
    batch = random_inputs(1, 2050, torch.float32)[0]
    ddp(batch).backward()
    ddp.zero_grad()
    ddp(batch, [0, 1]).backward()
    expected = norm_of(ddp)
    norm = rota.clip_grad_norm_(ddp.parameters(), 1e9)
    # torch sums the squares in float32.
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)


# ---- layers that are frozen and thawed


@on_ranks(2)
def test_residuals_are_loaded_where_other_parameters_are_frozen(rank: Rank) -> None:
    """A residual waits while its parameter is frozen; one that was frozen owes nothing."""
    rank.init("gloo")
    batch = random_inputs(2, 2050, torch.float32)[rank.rank]

    def start(frozen: int, saved: Any = None) -> tuple[rota.HookState, DistributedDataParallel]:
        model = ExactGradients()
        model.weights[frozen].requires_grad_(False)
        state = rota.HookState(model=model, **UNSCALED)
        if saved is not None:
            state.load_state_dict(saved)
        ddp = fused_ddp(model, state)
        ddp(batch).backward()
        return state, ddp

    state, ddp = start(frozen=1)
    saved = state.state_dict()
    assert saved["without_residual"] == ["weights.1"]
    state, ddp = start(frozen=3, saved=saved)
    residuals = state.state_dict()["residuals"]
    assert torch.equal(residuals["weights.3"], saved["residuals"]["weights.3"])
    once = batch[:700] - batch[:700].bfloat16().float()  # what a first reduction owes
    assert torch.equal(residuals["weights.1"], once)
    assert not torch.equal(residuals["weights.4"], saved["residuals"]["weights.4"])
    ddp.module.weights[3].requires_grad_(True)
    thawed = fused_ddp(ddp.module, state)
    thawed(batch).backward()
    assert not state.state_dict()["without_residual"]


@on_ranks(2)
def test_residuals_are_loaded_where_a_part_is_reduced(rank: Rank) -> None:
    rank.init("gloo")
    saved: dict[str, Any] = {}
    for _ in range(2):
        model = ExactGradients()
        state = rota.HookState(model=model, **UNSCALED)
        if saved:
            state.load_state_dict(saved)
        model(random_inputs(1, 2050, torch.float32)[0]).backward()
        rota.reduce_gradients([model.weights[1], model.weights[3]], state)
        saved = state.state_dict()
        assert saved["residuals"].keys() == {"weights.1", "weights.3"}


@on_ranks(2)
def test_ddp_that_is_made_anew_after_thawing_keeps_its_state(rank: Rank) -> None:
    """Thawed parameters alone make the first bucket, are spread, or are most of them."""
    rank.init("gloo")
    for kind, thawed in itertools.product((None, "model", "ddp"), ([4], [0, 2], [0, 1, 2, 3])):
        model = ExactGradients()
        for i in thawed:
            model.weights[i].requires_grad_(False)
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
        known = {None: None, "model": model, "ddp": ddp}[kind]
        state = rota.HookState(model=known, **UNSCALED)
        ddp.register_comm_hook(state, rota.fused_hook)
        for _ in range(2):
            ddp(exact_batch(rank.rank, 0)).backward()
        model.requires_grad_(True)
        ddp = fused_ddp(model, state)
        for _ in range(2):
            ddp.zero_grad()
            ddp(exact_batch(rank.rank, 1)).backward()
            assert torch.equal(state.grad_norm(), norm_of(ddp)), (kind, thawed)


# ---- copies


@on_ranks(2)
def test_copied_state_goes_on_and_one_that_could_not_is_not_pickled(rank: Rank) -> None:
    """The next gradients are those of the original, for the same model and for its copy."""
    rank.init("gloo")
    batches = [random_inputs(2, 2050 + i, torch.float32)[rank.rank] for i in range(2)]
    for has_model, *pickled in (
        (False, "RuntimeError", "HookState(model=ddp"),
        (True, "TypeError", "save state_dict()"),
    ):
        model = ExactGradients()
        state = rota.HookState(model=model if has_model else None, **UNSCALED)
        ddp = fused_ddp(model, state)
        ddp(batches[0]).backward()
        copies: list[tuple[torch.nn.Module, rota.HookState]] = [
            (model, copy.copy(state)),
            (model, copy.deepcopy(state)),
        ]
        average = copy.deepcopy(ddp)  # as torch.optim.swa_utils.AveragedModel does
        copies.append((average.module, average._comm_hooks[0][1]))
        check_error(error_of(pickle.dumps, state), *pickled)
        ddp.zero_grad()
        ddp(batches[1]).backward()
        expected = gradients_of(ddp)
        for module, other in copies:
            module.zero_grad()
            again = fused_ddp(module, other)
            again(batches[1]).backward()
            assert torch.equal(gradients_of(again), expected)
            assert not has_model or len(other.state_dict()["residuals"]) == 5


# ---- results that are not used


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@on_ranks(2)
def test_unused_parameter_still_owes_what_it_owed(rank: Rank, as_view: bool) -> None:
    """What a parameter owes stays while no rank uses it, and is paid when one does."""
    rank.init("gloo")
    model = ExactGradients()
    state = rota.HookState(model=model, **UNSCALED)
    ddp = fused_ddp(model, state, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    batch = random_inputs(1, 2050, torch.float32)[0]
    paid = torch.zeros(700)
    num_used = 0
    for step in range(6):
        before = state.state_dict()["residuals"]
        ddp.zero_grad()
        is_used = step % 3 == 0
        # In some steps on rank 0 alone.
        used = [0, 1, 4] if is_used and (step == 0 or rank.rank == 0) else [0, 4]
        ddp(batch, used).backward()
        after = state.state_dict()["residuals"]
        for name in ("weights.2", "weights.3") if is_used else ("weights.1", "weights.2"):
            assert torch.equal(after[name], before.get(name, torch.zeros(after[name].shape)))
        assert not before or not torch.equal(after["weights.4"], before["weights.4"])
        gradient = model.weights[1].grad
        assert (gradient is not None) == is_used
        if gradient is not None:
            paid += gradient
            num_used += 1 if step == 0 else 1 / 2
    dist.all_reduce(owed := after["weights.1"].clone())
    owed /= rank.world_size
    # The average of the ranks' sums is rounded again, to the next bfloat16.
    torch.testing.assert_close(paid, num_used * batch[:700] - owed, rtol=2**-8, atol=0)


@pytest.mark.parametrize("found_inf", [False, True])
def test_residual_follows_a_verdict_that_the_cpu_does_not_wait_for(found_inf: bool) -> None:
    used, unused, told = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    residual = BucketResidual(torch.zeros(6), None)
    for i, parameter in enumerate((used, unused, told)):
        residual.add(parameter, slice(2 * i, 2 * i + 2))
    outcome = Outcome(lambda: torch.tensor(found_inf))
    residual.for_reduction(outcome).fill_(1.0)
    outcome.end({id(unused)})
    outcome.tell([told], was_used=True)
    of_used = 0.0 if found_inf else 1.0
    assert residual.owed(used).tolist() == [of_used] * 2
    outcome.freeze()
    expected = [of_used] * 2 + [0.0] * 2 + [1.0] * 2
    assert residual.for_reduction(Outcome(lambda: False)).tolist() == expected


class Loop:
    """A training loop that skips a step in one of several ways."""

    def __init__(self, rank: Rank, how: str) -> None:
        self.rank, self.how = rank, how
        model = ExactGradients()
        self.state = rota.HookState(model=model, stochastic_rounding=True, **UNSCALED)
        self.ddp = fused_ddp(model, self.state)
        self.optimizer = torch.optim.SGD(model.parameters(), 1.0)
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, enabled="torch" in how
        )
        if "rota" in how:
            self.scaler = rota.amp.GradScaler(self.state, init_scale=4.0)

    def backward(self, batch: torch.Tensor, has_inf: bool = False) -> None:
        if has_inf and self.rank.rank == 1:
            batch = batch.clone()
            batch[1] = torch.inf
        self.scaler.scale(self.ddp(batch)).backward()

    def step(self, batch: torch.Tensor, skips: bool) -> list[float]:
        """The gradients of the step, in which an Inf or the loop itself has it skipped."""
        self.optimizer.zero_grad()
        if self.how == "rota-accumulates":
            self.backward(batch)  # reduced, and then reduced again
        self.backward(batch, skips and not self.how.endswith("by-hand"))
        gradients = gradients_of(self.ddp)
        if self.how == "found-inf" and self.state.found_inf:
            return gradients.tolist()
        if self.how == "by-hand" and skips:
            self.state.drop_results()
            return gradients.tolist()
        if self.how == "rota-by-hand" and skips:
            self.scaler.unscale_(self.optimizer)
        else:
            self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.update(4.0)
        return gradients.tolist()


HOWS = ("nothing", "found-inf", "by-hand", "torch", "rota", "rota-by-hand", "rota-accumulates")


@on_ranks(2)
def test_skipped_step_leaves_residuals_and_rounding_as_they_were(rank: Rank) -> None:
    rank.init("gloo")
    warnings.simplefilter("ignore")  # of scaling again
    batches = [random_inputs(rank.world_size, 2050 + i, torch.float32) for i in range(4)]
    for how in HOWS:
        straight, skipping = Loop(rank, how), Loop(rank, how)
        for i, of_ranks in enumerate(batches):
            if i > 0:  # DDP has made its final buckets
                before = skipping.state.state_dict()
                skipping.step(of_ranks[1 - rank.rank], skips=True)
                after = skipping.state.state_dict()
                assert after["num_reductions"] == before["num_reductions"], how
                for name, residual in before["residuals"].items():
                    assert torch.equal(after["residuals"][name], residual), (how, name)
            batch = of_ranks[rank.rank]
            assert skipping.step(batch, skips=False) == straight.step(batch, skips=False), how


@on_ranks(1)
def test_residuals_without_names_or_of_a_model_that_is_gone_are_not_saved(rank: Rank) -> None:
    rank.init("gloo")
    for has_model, fact in ((False, "names"), (True, "model is gone")):
        model = ExactGradients()
        state = rota.HookState(model=model if has_model else None, **UNSCALED)
        ddp = fused_ddp(model, state)
        for step in range(2):
            ddp(exact_batch(rank.rank, step)).backward()
        if has_model:
            del ddp, model
            gc.collect()
        check_error(error_of(state.state_dict), "RuntimeError", fact)


def test_loading_another_model_is_refused_at_once() -> None:
    model = torch.nn.Linear(2, 2)
    state = rota.HookState(model=model, error_feedback=True)
    saved = {"seed": 1, "num_reductions": 2, "residuals": {"other.weight": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"'other\.weight' .* this model has 'bias'"):
        state.load_state_dict(saved)
