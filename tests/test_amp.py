"""rota.amp.GradScaler beside torch.amp.GradScaler, on the same models, losses and Infs."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients, batch_of, exact_batch, make_model
from oracle import assert_same, bits_of
from ranks import Rank, error_of, on_ranks

NUM_STEPS = 12
INF_STEPS = {2: 0, 5: 1, 6: 1}  # the one rank whose batch has an Inf


class Training:
    """A model, its optimizers and its scaler: rota's with fused_hook, or torch's with plain DDP.

    With float32 on the wire both get gradients with the same bits: torch's side reduces with
    rota.allreduce_hook, which sums in the same order.
    """

    def __init__(
        self,
        is_rota: bool,
        *,
        is_exact: bool = False,
        with_outside: bool = False,
        fused: bool = False,
        num_optimizers: int = 1,
        scaler_options: dict[str, Any] | None = None,
        **ddp_options: Any,
    ) -> None:
        self.is_exact = is_exact
        model = ExactGradients() if is_exact else make_model()
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **ddp_options)
        # Outside DDP, so each rank trains its own copy.
        self.outside = torch.nn.Linear(8, 4) if with_outside else torch.nn.Identity()
        self.state = rota.HookState(wire_dtype=torch.float32)
        options = {"init_scale": 2.0**10, "growth_interval": 3, **(scaler_options or {})}
        self.scaler: torch.amp.GradScaler
        if is_rota:
            self.ddp.register_comm_hook(self.state, rota.fused_hook)
            self.scaler = rota.amp.GradScaler(self.state, **options)
        else:
            self.ddp.register_comm_hook(None, rota.allreduce_hook)
            self.scaler = torch.amp.GradScaler("cpu", **options)
        parameters = [*self.ddp.parameters(), *self.outside.parameters()]
        self.optimizers = [
            torch.optim.SGD(parameters[i::num_optimizers], lr=0.1, momentum=0.9, fused=fused)
            for i in range(num_optimizers)
        ]

    def loss(self, rank: int, step: int, **used: Any) -> torch.Tensor:
        batch = exact_batch(rank, step) if self.is_exact else batch_of(rank, step)
        if INF_STEPS.get(step) == rank:
            batch.flatten()[-7] = torch.inf  # in ExactGradients, only the last gradient has it
        output: torch.Tensor = self.outside(self.ddp(batch, **used))
        return output if self.is_exact else output.square().mean()

    def backward(self, rank: int, step: int, **used: Any) -> None:
        self.scaler.scale(self.loss(rank, step, **used)).backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for module in (self.ddp, self.outside):
            module.zero_grad(set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def parameters(self, *, reduced: bool = False) -> torch.Tensor:
        parameters = [*self.ddp.parameters(), *([] if reduced else self.outside.parameters())]
        return torch.cat([p.detach().flatten() for p in parameters])


# ---- ways to train one step; the same code for both scalers


def simply(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    training.backward(rank, step)
    training.step()


def accumulate_with_sync(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    training.backward(rank, step + 100)
    training.backward(rank, step)
    training.backward(rank, step + 200)
    training.step()


def accumulate_after_sync(training: Training, rank: int, step: int) -> None:
    """The last gradients are not reduced, so all ranks use the same batch for them."""
    training.zero_grad()
    training.backward(rank, step)
    with training.ddp.no_sync():
        training.backward(0, step + 100)
    training.step()


def throw_away(training: Training, rank: int, step: int) -> None:
    """Discards reduced gradients without a step, then makes new ones."""
    training.zero_grad()
    training.backward(rank, step)
    training.zero_grad()
    with training.ddp.no_sync():
        training.backward(rank, step + 100)
    training.backward(rank, step)
    training.step()


def train_alone(training: Training, rank: int, step: int) -> None:
    """Nothing is reduced; all ranks get the same batch."""
    training.zero_grad()
    with training.ddp.no_sync():
        training.backward(0, step)
    training.step()


def step_in_between(training: Training, rank: int, step: int) -> None:
    """One loss per optimizer, as in a GAN, and one update."""
    for i, optimizer in enumerate(training.optimizers):
        training.zero_grad(set_to_none=i == 0)
        training.backward(rank, step + 100 * i)
        training.scaler.step(optimizer)
    training.scaler.update()


def load_in_between(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    training.backward(rank, step)
    training.step()
    saved = training.scaler.state_dict()
    assert saved == torch.amp.GradScaler("cpu", init_scale=saved["scale"]).state_dict() | saved
    training.scaler.load_state_dict(pickle.loads(pickle.dumps(saved)))


def set_scale(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    training.backward(rank, step)
    for optimizer in training.optimizers:
        training.scaler.step(optimizer)
    training.scaler.update(float(2 ** (step % 4)))


def scale_several(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    scaled = training.scaler.scale(iter([training.loss(rank, step), torch.ones(())]))
    next(scaled).backward()
    training.step()


def scale_by_hand(training: Training, rank: int, step: int) -> None:
    training.zero_grad()
    if step % 2 == 0:
        training.backward(rank, step)
    else:
        (training.loss(rank, step) * training.scaler.get_scale()).backward()
    training.step()


def use_less_and_less(training: Training, rank: int, step: int) -> None:
    """DDP also reduces gradients that the second pass does not use, but leaves them unchanged."""
    training.zero_grad()
    training.backward(rank, step + 100)
    training.backward(rank, step, used=[1, 4])
    training.step()


class Scenario(NamedTuple):
    train: Callable[[Training, int, int], None]
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    warnings: tuple[str, ...] = ()  # of rota's scaler


AGAIN = "scale() was called again"
NOT_REDUCED = "were not reduced by rota.fused_hook"
NO_POWER_OF_TWO = {"init_scale": 3000.0, "growth_factor": 1.3, "backoff_factor": 0.7}
UNUSED = {"is_exact": True, "find_unused_parameters": True}
# test_random_ddp.py has more ways to train, in which rota's scaler warns of nothing.
SCENARIOS = {
    "simply": Scenario(simply),
    "odd-scale": Scenario(simply, {"scaler_options": NO_POWER_OF_TWO}),
    "overflow": Scenario(simply, {"scaler_options": {"init_scale": 2.0**126}}),
    "disabled": Scenario(simply, {"scaler_options": {"enabled": False}}),
    "sync": Scenario(accumulate_with_sync, warnings=(AGAIN,)),
    "sync-view": Scenario(accumulate_with_sync, {"gradient_as_bucket_view": True}, (AGAIN,)),
    "after-sync": Scenario(accumulate_after_sync, warnings=(AGAIN, NOT_REDUCED)),
    "throw-away": Scenario(throw_away),
    "alone": Scenario(train_alone, warnings=(NOT_REDUCED,)),
    "step-in-between": Scenario(step_in_between, {"num_optimizers": 2}, (AGAIN,)),
    "load": Scenario(load_in_between),
    "set-scale": Scenario(set_scale),
    "several": Scenario(scale_several),
    "unused": Scenario(use_less_and_less, UNUSED, (AGAIN, NOT_REDUCED)),
    "unused-view": Scenario(
        use_less_and_less, {**UNUSED, "gradient_as_bucket_view": True}, (AGAIN,)
    ),
    "outside": Scenario(simply, {"with_outside": True}, (NOT_REDUCED,)),
    "outside-fused": Scenario(simply, {"with_outside": True, "fused": True}, (NOT_REDUCED,)),
    "by-hand": Scenario(scale_by_hand, warnings=(NOT_REDUCED,)),
}


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2)
def test_grad_scaler_trains_as_torchs(rank: Rank, name: str) -> None:
    rank.init("gloo")
    scenario = SCENARIOS[name]
    ours, torchs = (Training(is_rota, **scenario.options) for is_rota in (True, False))
    scales = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            scenario.train(ours, rank.rank, step)
            scenario.train(torchs, rank.rank, step)
            assert_same(ours.parameters(), torchs.parameters(), f"step {step}")
            assert ours.scaler.get_scale() == torchs.scaler.get_scale(), f"step {step}"
            scales.append(ours.scaler.get_scale())
    texts = [text for warning in caught if "rota." in (text := str(warning.message))]
    assert len(texts) == len(scenario.warnings), texts
    for text, expected in zip(texts, scenario.warnings, strict=True):
        assert text.startswith("rota.amp.GradScaler: ") and expected in text
    trained = [*scales, *bits_of(ours.parameters(reduced=True)).tolist()]
    dist.all_gather_object(of_ranks := [None] * rank.world_size, trained)
    assert of_ranks[0] == of_ranks[1], "ranks differ"


@on_ranks(1)
def test_float16_gradients_are_refused_as_by_torch(rank: Rank) -> None:
    rank.init("gloo")
    errors = []
    for is_rota in (False, True):
        state = rota.HookState()
        scaler = rota.amp.GradScaler(state) if is_rota else torch.amp.GradScaler("cpu")
        ddp = DistributedDataParallel(make_model(torch.float16))
        if is_rota:
            ddp.register_comm_hook(state, rota.fused_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler.scale(ddp(batch_of(rank.rank, 0, torch.float16)).sum()).backward()
        errors.append(error_of(scaler.step, optimizer))
    assert errors[0] == errors[1] and errors[0][0] == "ValueError"


@on_ranks(2)
def test_grad_scaler_of_two_models_skips_where_the_inf_is(rank: Rank) -> None:
    rank.init("gloo")
    trainings = [Training(True, is_exact=True) for _ in range(2)]
    scaler = rota.amp.GradScaler((training.state for training in trainings), init_scale=4.0)
    skipped = []  # by step, whether each model's optimizer skipped it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            before = [training.parameters() for training in trainings]
            for training in trainings:
                training.zero_grad()
            losses = [trainings[i].loss(rank.rank, step + 100 * i) for i in range(2)]
            scaler.scale(losses[0] + losses[1]).backward()
            for training in trainings:
                scaler.step(training.optimizers[0])
            scaler.update()
            after = [training.parameters() for training in trainings]
            skipped.append([b.equal(a) for b, a in zip(before, after, strict=True)])
    assert scaler.get_scale() == 2.0
    assert skipped == [[False] * 2, [False] * 2, [True, False], [False] * 2]


@on_ranks(2)
def test_grad_scaler_of_models_in_turns_does_not_scale_again(rank: Rank) -> None:
    """Like GAN training: scaling the other model's loss does not rescale gradients already used."""
    rank.init("gloo")
    trainings = [Training(True, is_exact=True) for _ in range(2)]
    scaler = rota.amp.GradScaler([training.state for training in trainings], init_scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            for training in trainings:
                training.zero_grad()
                scaler.scale(training.loss(rank.rank, step + 10)).backward()
                scaler.step(training.optimizers[0])
            scaler.update()
    assert torch.equal(trainings[0].parameters(), trainings[1].parameters())
