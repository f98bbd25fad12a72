"""rota.LogicalShards: parameters have the same bits on any number of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rota
from oracle import assert_same
from ranks import Rank, check_error, error_of, on_ranks, run_ranks

NUM_SHARDS = 8
NUM_SAMPLES = 200  # 6 steps of an epoch of 8 * 4
BATCH_SIZE = 4
State = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Model(nn.Module):
    """Has dropout, a parameter that only some shards use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 8))
        self.sometimes = nn.Parameter(torch.ones(8))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs * self.sometimes if uses_all else outputs


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(NUM_SAMPLES, 16, generator=generator),
        torch.randn(NUM_SAMPLES, 8, generator=generator),
    )


def train(
    rank: Rank, optimizer_name: str, num_steps: int, resumed: State | None, is_ddp: bool
) -> State:
    rank.init("rota")
    inputs, targets = dataset()
    model = Model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    module = DistributedDataParallel(model, find_unused_parameters=True) if is_ddp else model
    shards = rota.LogicalShards(module, NUM_SHARDS, seed=7)
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        # A copy, because the ranks share the memory of what the test hands them.
        optimizer.load_state_dict(copy.deepcopy(resumed["optimizer"]))
        shards.load_state_dict(resumed["shards"])
    for _ in range(num_steps):
        for shard in shards:
            with shards.backward_of(shard):
                chosen = shards.samples(shard, NUM_SAMPLES, BATCH_SIZE)
                outputs = module(inputs[chosen], uses_all=shard % 3 == 0)
                nn.functional.mse_loss(outputs, targets[chosen]).backward()
        shards.reduce()
        rota.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert model.never.grad is None
    assert shards.num_steps == num_steps + (resumed["shards"]["num_steps"] if resumed else 0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shards": shards.state_dict(),
    }


def run(
    world_size: int,
    num_steps: int = 8,
    optimizer: str = "adamw",
    resumed: State | None = None,
    is_ddp: bool = False,
) -> State:
    states = run_ranks(
        world_size, train, optimizer, num_steps, resumed, is_ddp, env={"OMP_NUM_THREADS": "1"}
    )
    for state in states:
        check_equal(state, states[0])
    return states[0]


def check_equal(state: State, expected: State) -> None:
    for name, tensor in expected["model"].items():
        assert_same(state["model"][name], tensor, name)
    assert state["shards"] == expected["shards"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_have_the_same_bits_on_any_number_of_ranks(optimizer: str) -> None:
    alone = run(1, optimizer=optimizer)
    for world_size in (2, 3, 4, 8):
        check_equal(run(world_size, optimizer=optimizer), alone)


def test_the_number_of_ranks_may_change_between_steps() -> None:
    state = None
    for world_size in (4, 1, 8, 2):
        state = run(world_size, num_steps=2, resumed=state)
    check_equal(state, run(1))


def test_ddp_has_the_bits_of_a_plain_loop() -> None:
    check_equal(run(2, is_ddp=True), run(1))


@on_ranks(2)
def test_gradient_is_the_mean_over_the_shards(rank: Rank) -> None:
    rank.init("gloo")
    weight = nn.Linear(1, 1, bias=False)
    shards = rota.LogicalShards(weight, 4)
    for shard in shards:
        with shards.backward_of(shard, num_backwards=2):
            (weight.weight.sum() * shard).backward()
            (weight.weight.sum() * 10).backward()
    shards.reduce()
    assert weight.weight.grad.item() == 11.5
    assert shards.state.grad_norm().item() == 11.5


def random_numbers(rank: Rank) -> list[tuple[list[float], list[int]]]:
    rank.init("rota")
    shards = rota.LogicalShards(nn.Linear(1, 1), 4, seed=1)
    torch.manual_seed(rank.rank)
    seen = []
    for _ in range(2):
        for shard in shards:
            outside = torch.random.get_rng_state()
            with shards.backward_of(shard):
                numbers = torch.rand(3).tolist()
            assert torch.equal(torch.random.get_rng_state(), outside)
            seen.append((numbers, shards.samples(shard, 30, 2).tolist()))
        shards.reduce()
    return seen


def test_random_numbers_and_samples_belong_to_the_shard() -> None:
    alone = run_ranks(1, random_numbers)[0]
    first, second = run_ranks(2, random_numbers)
    assert first[:2] + second[:2] + first[2:] + second[2:] == alone
    assert len({tuple(numbers) for numbers, _ in alone}) == len(alone)
    samples = [sample for _, chosen in alone for sample in chosen]
    assert len(set(samples)) == len(samples) == 16


@on_ranks(2)
def test_bad_use_is_an_error_that_says_what_to_do(rank: Rank) -> None:
    rank.init("rota")
    model = nn.Linear(2, 1)
    shards = rota.LogicalShards(model, 4)
    first, second = shards

    def run_pass(shard: int) -> None:
        with shards.backward_of(shard):
            model(torch.ones(2)).sum().backward()

    def run_twice() -> None:
        with shards.backward_of(first):
            for _ in range(2):
                model(torch.ones(2)).sum().backward()

    def refuses(kind: str, fact: str, call: Callable[..., object], *args: Any, **more: Any) -> None:
        check_error(error_of(call, *args, **more), kind, fact)

    of_eight = {**shards.state_dict(), "num_shards": 8}
    make = rota.LogicalShards
    refuses("ValueError", "num_shards is 6, expected a power of two", make, model, 6)
    fact = "num_shards is 1, expected at least the number of ranks, 2"
    refuses("ValueError", fact, make, model, 1)
    refuses("ValueError", "the state's None", make, model, 4, state=rota.HookState())
    refuses("RuntimeError", "expected shard", run_pass, second)
    refuses("RuntimeError", "after 0 of this rank's 2 shards", shards.reduce)
    run_pass(first)
    refuses("RuntimeError", "after 1 of this rank's 2 shards", shards.reduce)
    fact = "3 samples, expected at least 4 shards * 1"
    refuses("ValueError", fact, shards.samples, first, 3, 1)
    refuses("ValueError", "had 8 shards, this one has 4", shards.load_state_dict, of_eight)
    run_pass(second)
    refuses("RuntimeError", "expected reduce()", run_pass, first)
    shards.reduce()
    refuses("RuntimeError", "zero_grad()", run_pass, first)
    model.zero_grad()
    refuses("RuntimeError", "has come 2 times, expected 1", run_twice)
    # What is left by an exception starts the step again.
    run_pass(first)
    run_pass(second)
    shards.reduce()


@on_ranks(1)
def test_batch_norm_is_warned_about(rank: Rank) -> None:
    rank.init("rota")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rota.LogicalShards(model, 2)
        rota.LogicalShards(model.eval(), 2)
    (text,) = [str(warning.message) for warning in caught]
    assert "1 is a BatchNorm1d" in text
    assert "LayerNorm" in text


@on_ranks(2)
def test_ranks_that_disagree_on_the_number_of_shards_are_a_mismatch(rank: Rank) -> None:
    rank.init("rota")
    model = nn.Linear(2, 1)
    shards = rota.LogicalShards(model, 2 << rank.rank)
    for shard in shards:
        with shards.backward_of(shard):
            model(torch.ones(2)).sum().backward()
    check_error(error_of(shards.reduce), "Mismatch", "tree of 2 shards", "tree of 4 shards")
