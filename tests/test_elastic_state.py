"""A rank gets its training state from a rank that lives, or all keep what they have."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from elastic_workers import first_generation, let_die, store_of
from ranks import Rank, check_error, error_of, kill_self, on_ranks
from rota import _C
from rota.elastic import Membership, RandomState, Reservation, State
from rota.elastic.arena import Arena

pytestmark = pytest.mark.same_in_every_build


class Model(nn.Module):
    """With tied weights, a buffer, and a parameter that is a view of a longer storage."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.both = torch.randn(2 * width)
        self.view = nn.Parameter(self.both[width:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.first(inputs)).relu()) * self.view


class Restless(nn.Module):
    """Its forward pass assigns buffers anew, hands one on, makes some, and counts beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 1, bias=False)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("before", torch.zeros(width))
        self.register_buffer("lazy", None)
        self.num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.before = self.mean
        self.mean = 0.5 * self.mean + inputs.mean(0)
        self.lazy = self.mean[: len(self.mean) // 2] + (0 if self.lazy is None else 1)
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        self.num_calls += 1
        return self.linear(inputs)

    def get_extra_state(self) -> int:
        return self.num_calls

    def set_extra_state(self, state: int) -> None:
        self.num_calls = state


class Holder:
    """An object with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def views_of_other_memory(seed: int) -> list[torch.Tensor]:
    pairs = torch.arange(6.0).view(3, 2) + seed
    return [pairs[:1, 1], torch.view_as_complex(pairs).conj()]


class Trainee:
    """A model, its optimizer and all else that a run has, and a step that depends on all of it.

    Args:
        scales: whether the loss is scaled.
        options: of the hook's state.
    """

    def __init__(
        self,
        seed: int,
        make: Callable[[], Model | Restless] = Model,
        scales: bool = False,
        wire_dtype: torch.dtype = torch.float16,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.hook = rota.HookState(
            model=self.model, wire_dtype=wire_dtype, error_feedback=True, **options
        )
        self.scaler = rota.amp.GradScaler(self.hook, enabled=scales)
        self.views = Holder(views_of_other_memory(seed))
        self.state = State(
            scaler=self.scaler,
            hook=self.hook,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            random=RandomState(),
            views=self.views,
            model=self.model,
        )

    def backward(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        inputs = torch.randn(8, self.model.width) * random.random()
        self.scaler.scale(self.model(inputs).square().mean()).backward()

    def begin(self) -> None:
        self.backward()
        rota.reduce_gradients(list(self.model.parameters()), self.hook)
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.begin()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state.commit()

    def summary(self) -> list[Any]:
        """All that must be equal for equal steps."""
        of_hook = self.hook.state_dict()
        values = [*self.model.state_dict().values(), *of_hook["residuals"].values()]
        for of_parameter in self.optimizer.state_dict()["state"].values():
            values += of_parameter.values()
        return [
            [_C.checksum(x.reshape(-1)) if isinstance(x, torch.Tensor) else x for x in values],
            _C.checksum(torch.get_rng_state()),
            random.getstate(),
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
            of_hook["num_reductions"],
            [view.tolist() for view in self.views.value],
            self.state.num_steps,
        ]


def assert_equal_on_all_ranks(mine: object) -> None:
    """Collective over the default group."""
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    assert all_of_them == [mine] * len(all_of_them)


def alone(num_steps: int) -> list[Any]:
    """The state after steps of one rank without any change."""
    dist.init_process_group("rota", store=dist.HashStore(), rank=0, world_size=1)
    trainee = Trainee(seed=1)
    for _ in range(num_steps):
        trainee.step()
    dist.destroy_process_group()
    return trainee.summary()


def train_one_step(rank: Rank, port: int) -> tuple[Membership, Trainee]:
    """A trainee on every rank, all of which have committed their first step."""
    membership, generation = first_generation(rank, port)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(generation)
    trainee.step()
    return membership, trainee


@on_ranks(3)
def test_newcomers_get_all_of_the_state_and_train_on_with_its_bits(rank: Rank, port: int) -> None:
    """Process 0 trains for 3 steps; then 1 and 2 join, with other seeds; then all train on."""
    expected = [alone(num_steps) for num_steps in (3, 5)]
    membership = Membership(store_of(port))
    if rank.rank == 0:
        generation = membership.next()
        trainee = Trainee(seed=1)
        assert not trainee.state.synchronize(generation)
        for _ in range(3):
            trainee.step()
        rank.say()
    else:
        rank.await_word()
        trainee = Trainee(seed=rank.rank + 10)
        # One of them reserves its memory before.
        assert rank.rank == 1 or trainee.state.take(Reservation(membership))
    generation = membership.next(min_members=3)
    both, view = trainee.model.both, trainee.model.view
    assert trainee.state.synchronize(generation, check_equal=True) == (rank.rank > 0)
    assert trainee.model.both is both and trainee.model.view is view
    # Whoever shares the storage has moved with it.
    assert view.untyped_storage().data_ptr() == both.untyped_storage().data_ptr()
    assert trainee.model.tied.weight is trainee.model.first.weight
    assert trainee.summary() == expected[0]
    # Equal contributions: their mean is each of them.
    trainee.step()
    trainee.step()
    assert trainee.summary() == expected[1]


@on_ranks(3)
def test_ranks_that_are_all_new_get_the_state_of_rank_0(rank: Rank, port: int) -> None:
    _, generation = first_generation(rank, port)
    trainee = Trainee(seed=rank.rank)
    before = trainee.summary()
    assert trainee.state.synchronize(generation) == (rank.rank > 0)
    assert (trainee.summary() == before) == (rank.rank == 0)
    assert_equal_on_all_ranks(trainee.summary())


@on_ranks(3)
def test_ranks_that_have_missed_a_step_get_it(rank: Rank, port: int) -> None:
    """Rank 1 has committed a step more than the others, which have begun it."""
    membership, trainee = train_one_step(rank, port)
    trainee.backward()  # draws random numbers, changes buffers, leaves gradients
    if rank.rank == 1:
        trainee.optimizer.step()
        trainee.state.commit()
    else:
        trainee.hook._num_reductions += 1
    got = trainee.state.synchronize(membership.next(min_members=3), check_equal=True)
    assert got == (rank.rank != 1) and trainee.state.num_steps == 2
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert_equal_on_all_ranks(trainee.summary())


@on_ranks(2)
def test_step_that_failed_on_all_ranks_is_rolled_back(rank: Rank, port: int) -> None:
    """No rank has committed the step that all have begun: all repeat it."""
    expected = alone(2)
    membership, trainee = train_one_step(rank, port)
    committed = trainee.summary()
    for _ in range(rank.rank + 1):
        trainee.backward()
    assert trainee.summary() != committed
    assert not trainee.state.synchronize(membership.next(min_members=2), check_equal=True)
    assert trainee.summary() == committed
    trainee.step()
    assert trainee.summary() == expected


@on_ranks(2)
def test_whatever_a_failed_step_has_replaced_or_made_is_rolled_back(rank: Rank, port: int) -> None:
    width = 100_000
    membership, generation = first_generation(rank, port)
    make = lambda: Restless(width)  # noqa: E731
    trainee = Trainee(1, make, True, torch.float8_e4m3fn, stochastic_rounding=True)
    trainee.state.synchronize(generation)
    fresh = set(trainee.model._buffers)
    error_of(trainee.begin)
    trainee.state.synchronize(membership.next(min_members=2))
    assert set(trainee.model._buffers) == fresh and trainee.model.lazy is None
    trainee.step()
    committed, mean = trainee.summary(), trainee.model.mean
    for _ in range(rank.rank + 1):
        trainee.model(torch.ones(2, width))
    trainee.begin()
    assert trainee.summary() != committed
    trainee.state.synchronize(membership.next(min_members=2), check_equal=True)
    assert trainee.summary() == committed
    assert trainee.model.mean is mean  # whoever refers to it sees the old values
    trainee.step()
    after = trainee.summary()
    trainee.begin()
    trainee.state.synchronize(membership.next(min_members=2))
    assert trainee.summary() == after
    membership.finish()


@on_ranks(2)
def test_step_without_commit_is_rolled_back_or_warns_once(rank: Rank, port: int) -> None:
    """First rank 1 steps and does not commit, then both."""
    membership, trainee = train_one_step(rank, port)
    committed = trainee.summary()
    texts = []
    for num_ranks in (1, 2, 2):
        if rank.rank >= 2 - num_ranks:
            trainee.backward()
            trainee.optimizer.step()
        generation = membership.next(min_members=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert trainee.state.synchronize(generation) == (rank.rank == 1)
        texts += [str(warning.message) for warning in caught]
        if num_ranks == 1:
            assert trainee.summary() == committed
    assert trainee.state.num_steps == 1
    (text,) = texts
    assert "since step 1 was committed" in text and "right after optimizer.step()" in text
    assert_equal_on_all_ranks(trainee.summary())


@on_ranks(2)
def test_newcomer_takes_tensors_in_another_layout_and_new_ones(rank: Rank, port: int) -> None:
    """Rank 0 has committed; its weights lie transposed, and rank 1's in one storage."""
    _, generation = first_generation(rank, port)
    torch.manual_seed(rank.rank)
    model = Restless(6)
    model.linear.weight.data = torch.randn(6, 2).T if rank.rank == 0 else torch.randn(2, 6)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if rank.rank == 0:
        model(torch.ones(2, 6))
        del model._buffers["count"]
        state.commit()
    assert state.synchronize(generation) == (rank.rank == 1)
    assert_equal_on_all_ranks([x.tolist() for x in (model.linear.weight, model.lazy)])


def disagreements(is_odd: bool) -> list[tuple[dict[str, Any], list[str]]]:
    """The objects of a rank's state, and what the error of all ranks says of them."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW if is_odd else torch.optim.SGD
    return [
        (
            {"model": nn.Linear(4, 5 if is_odd else 3)},
            ["'model'", "rank 0, 1 has Linear of 2 parameters, 15", "rank 2 has", "25"],
        ),
        (
            {"shards": rota.LogicalShards(model, 8 if is_odd else 4)},
            ["'shards'", "4 logical shards", "rank 2 has", "8 logical shards"],
        ),
        (
            {"optimizer": optimizer(model.parameters(), lr=0.1)},
            ["'optimizer'", "rank 0, 1 has SGD", "rank 2 has AdamW"],
        ),
        (
            {} if is_odd else {"random": RandomState()},
            ["'random'", "rank 0, 1 has RandomState", "rank 2 has nothing"],
        ),
    ]


@on_ranks(3, timeout_s=180)
def test_newcomer_of_another_kind_is_an_error_on_every_rank(rank: Rank, port: int) -> None:
    membership, generation = first_generation(rank, port)
    is_odd = rank.rank == 2
    for objects, facts in disagreements(is_odd):
        state = State(**{"model": nn.Linear(1, 1)} | objects)
        check_error(error_of(state.synchronize, generation), "Mismatch", *facts)
        generation = membership.next(min_members=3)
    if is_odd:
        return membership.leave()
    assert not state.synchronize(membership.next()) or rank.rank == 1  # the others go on


@on_ranks(3)
def test_state_that_differs_after_a_step_is_an_error_on_every_rank(rank: Rank, port: int) -> None:
    membership, trainee = train_one_step(rank, port)
    if rank.rank == 1:
        trainee.model.view.data[7] += 1e-6
    generation = membership.next(min_members=3)
    trainee.state.synchronize(generation)  # compares steps only
    error = error_of(trainee.state.synchronize, generation, check_equal=True)
    check_error(error, "Mismatch", "after step 1")
    checksums = [error[1].split(f"rank {other} ")[1][:16] for other in range(3)]
    assert checksums[0] == checksums[2] != checksums[1]
    assert_equal_on_all_ranks(error)


@on_ranks(2)
def test_damaged_copy_is_an_error_on_every_rank_and_no_state(rank: Rank, port: int) -> None:
    membership, generation = first_generation(rank, port)
    trainee = Trainee(seed=rank.rank)
    if rank.rank == 0:
        trainee.state.commit()
    before = trainee.summary()
    fetch = Arena.fetch

    def fetch_damaged(self: Arena, *args: Any) -> int:
        fetch(self, *args)
        self.bytes[0] ^= 1
        return self.checksum()

    Arena.fetch = fetch_damaged
    error = error_of(trainee.state.synchronize, generation)
    check_error(error, "TransportError", "what rank 1 has copied differs")
    assert trainee.summary() == before
    Arena.fetch = fetch
    trainee.state.synchronize(membership.next(min_members=2), check_equal=True)
    assert_equal_on_all_ranks(trainee.summary())


@on_ranks(3, killed=[1])
def test_source_that_dies_leaves_the_others_their_states(rank: Rank, port: int) -> None:
    """The only rank that has ended the last step dies while the others copy from it."""
    expected = alone(2)
    membership, trainee = train_one_step(rank, port)
    committed = trainee.summary()
    generation = membership.next(min_members=3)
    if rank.rank == 1:
        trainee.optimizer.step()
        trainee.state.commit()
        Arena.checksum = lambda self: kill_self()
    assert error_of(trainee.state.synchronize, generation)[0] == "PeerFailed"
    assert trainee.summary() == committed
    assert not trainee.state.synchronize(membership.next(), check_equal=True)
    trainee.step()
    assert trainee.summary() == expected


@on_ranks(2, killed=[0])
def test_new_rank_0_says_at_once_what_newcomers_copy(rank: Rank, port: int) -> None:
    membership, trainee = train_one_step(rank, port)
    let_die(0, membership.generation, store_of(port))
    error_of(dist.barrier)
    trainee.state.synchronize(membership.next())
    assert json.loads(membership.read_note("layout"))[1] == trainee.state._kept.address


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="expected an object with state_dict"):
        State(model=3)
    state = State(model=nn.Linear(1, 1))
    assert state.num_steps == 0
    with pytest.raises(ValueError, match="num_steps"):
        state.num_steps = -1
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1), 1)
    scheduler.unpicklable = lambda: None
    with pytest.raises(TypeError, match="the state of scheduler cannot be pickled"):
        State(scheduler=scheduler).commit()


class Stubborn(Holder):
    """Keeps its value, whatever it is to load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@on_ranks(3)
def test_unpicklable_state_raises_on_all_ranks(rank: Rank, port: int) -> None:
    """Rank 0 is the source; all go on afterwards."""
    _, generation = first_generation(rank, port, timeout=timedelta(seconds=300))
    value = Stubborn(None)
    state = State(model=nn.Linear(2, 2), value=value)
    if rank.rank == 0:
        state.commit()
    for bad_rank in (0, 1):
        if rank.rank == bad_rank:
            value.value = lambda: None
        error = error_of(state.synchronize, generation)
        value.value = None
        text = "the state of value cannot be pickled"
        if rank.rank == bad_rank:
            check_error(error, "TypeError", text)
        else:
            check_error(error, "TransportError", f"rank {bad_rank}: ", text)
    state.synchronize(generation)


@on_ranks(2)
def test_ddp_is_refused(rank: Rank) -> None:
    rank.init()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    check_error(error_of(State, model=ddp), "TypeError", "pass the module inside")


@on_ranks(2)
def test_logical_shards_refuse_a_step_of_other_ranks(rank: Rank, port: int) -> None:
    membership, _ = first_generation(rank, port)
    model = nn.Linear(1, 1)
    shards = rota.LogicalShards(model, 4)
    assert len(shards) == 2
    for shard in shards:
        with shards.backward_of(shard):
            model(torch.ones(1, 1)).sum().backward()
    if rank.rank == 1:
        return membership.leave()
    membership.next()
    check_error(error_of(shards.reduce), "RuntimeError", "regroup()")
    shards.regroup()
    assert list(shards) == [0, 1, 2, 3]
