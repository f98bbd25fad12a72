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
from elastic_workers import kill_self, store_of
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.elastic import Membership, RandomState, Reservation, State
from rota.elastic.arena import Arena

pytestmark = pytest.mark.same_in_every_build


class Model(nn.Module):
    """With tied weights, a buffer, and a parameter that is a view of a longer storage."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.both = torch.randn(2 * width)
        self.view = nn.Parameter(self.both[width:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.first(inputs)).relu()) * self.view


class Views:
    """Views of other memory, among an object's state."""

    def __init__(self, seed: int) -> None:
        pairs = torch.arange(6.0).view(3, 2) + seed
        self.views = [pairs[:1, 1], torch.view_as_complex(pairs).conj()]

    def state_dict(self) -> dict[str, Any]:
        return {"views": self.views}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.views = state_dict["views"]


class Trainee:
    """A model, its optimizer and all else that a run has, and a step that depends on all of it."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.hook = rota.HookState(model=self.model, wire_dtype=torch.float16, **options)
        self.views = Views(seed)
        self.state = State(
            hook=self.hook,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            random=RandomState(),
            views=self.views,
            model=self.model,
        )

    def backward(self) -> None:
        inputs = torch.randn(8, 200) * random.random()
        self.model(inputs).square().mean().backward()

    def step(self) -> None:
        self.backward()
        rota.reduce_gradients(list(self.model.parameters()), self.hook)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state.commit()

    def summary(self) -> list[Any]:
        """All that must be equal for equal steps."""
        tensors = [*self.model.state_dict().values()]
        for of_parameter in self.optimizer.state_dict()["state"].values():
            tensors += of_parameter.values()
        return [
            [_C.checksum(tensor.contiguous()) for tensor in tensors],
            _C.checksum(torch.get_rng_state()),
            random.getstate(),
            self.scheduler.state_dict(),
            self.hook.state_dict()["num_reductions"],
            [view.tolist() for view in self.views.views],
            self.state.num_steps,
        ]


def train_alone(num_steps: int) -> list[Any]:
    """On one rank, without any change."""
    trainee = Trainee(seed=1)
    for _ in range(num_steps):
        trainee.step()
    return trainee.summary()


def alone(rank: Rank, num_steps: int) -> list[Any]:
    rank.init()
    return train_alone(num_steps)


def join(rank: Rank, port: int) -> Any:
    """Process 0 trains for 3 steps; then 1 and 2 join, with other seeds; then all train on."""
    membership = Membership(store_of(port))
    if rank.rank == 0:
        generation = membership.next()
        trainee = Trainee(seed=1)
        assert not trainee.state.synchronize(generation)
        for _ in range(3):
            trainee.step()
        rank.tell()
        rank.hear()
    else:
        rank.hear()
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
    after = trainee.summary()
    # Equal contributions: their mean is each of them.
    trainee.step()
    trainee.step()
    return after, trainee.summary()


def test_newcomers_get_all_of_the_state_and_train_on_with_its_bits(store: dist.TCPStore) -> None:
    (expected_after,), (expected,) = (run_ranks(1, alone, num_steps) for num_steps in (3, 5))
    with Ranks(3, join, store.port) as ranks:
        ranks.hear(0)
        for process in range(3):
            ranks.tell(process)
        results = ranks.results()
    for after, later in results:
        assert after == expected_after
        assert later == expected


def start_fresh(rank: Rank, port: int) -> Any:
    membership = Membership(store_of(port), rank=rank.rank)
    generation = membership.next(min_members=3)
    trainee = Trainee(seed=rank.rank)
    before = trainee.summary()
    assert trainee.state.synchronize(generation) == (rank.rank > 0)
    return before, trainee.summary()


def test_ranks_that_are_all_new_get_the_state_of_rank_0(port: int) -> None:
    results = run_ranks(3, start_fresh, port)
    assert results[0][0] != results[1][0]
    for _, after in results:
        assert after == results[0][0]


def miss_a_step(rank: Rank, port: int) -> Any:
    """Rank 1 has committed a step more than the others, which have begun it."""
    membership = Membership(store_of(port), rank=rank.rank)
    generation = membership.next(min_members=3)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(generation)
    trainee.step()
    if rank.rank == 1:
        trainee.backward()
        trainee.optimizer.step()
        trainee.state.commit()
    else:
        trainee.backward()  # draws random numbers, changes buffers, leaves gradients
        trainee.hook._num_reductions += 1
    got = trainee.state.synchronize(membership.next(min_members=3), check_equal=True)
    assert got == (rank.rank != 1)
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    return trainee.summary()


def test_ranks_that_have_missed_a_step_get_it(port: int) -> None:
    first, *others = run_ranks(3, miss_a_step, port)
    assert first[-1] == 2
    assert others == [first, first]


def fail_in_a_step(rank: Rank, port: int) -> Any:
    """No rank has committed the step that all have begun: all repeat it."""
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(membership.next(min_members=2))
    trainee.step()
    committed = trainee.summary()
    for _ in range(rank.rank + 1):
        trainee.backward()
    assert trainee.summary() != committed
    assert not trainee.state.synchronize(membership.next(min_members=2), check_equal=True)
    assert trainee.summary() == committed
    trainee.step()
    return trainee.summary()


def test_step_that_failed_on_all_ranks_is_rolled_back(port: int) -> None:
    (expected,) = run_ranks(1, alone, 2)
    for summary in run_ranks(2, fail_in_a_step, port):
        assert summary == expected


class Restless(nn.Module):
    """Its forward pass assigns buffers anew, hands one on, makes some, and counts beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
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


class RestlessTrainee:
    """With long residuals and buffers, and a learning rate that each step changes first."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(1)
        self.model = Restless(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.hook = rota.HookState(
            model=self.model,
            wire_dtype=torch.float8_e4m3fn,
            stochastic_rounding=True,
            error_feedback=True,
        )
        self.scaler = rota.amp.GradScaler(self.hook)
        self.state = State(
            model=self.model, optimizer=self.optimizer, hook=self.hook, scaler=self.scaler
        )

    def begin(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5
        inputs = torch.linspace(0, 1, 2 * self.model.linear.in_features).view(2, -1)
        self.scaler.scale(self.model(inputs).sum()).backward()
        rota.reduce_gradients(self.model.parameters(), self.hook)
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.begin()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.state.commit()

    def summary(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *self.hook.state_dict()["residuals"].values()]
        return [
            [_C.checksum(x.reshape(-1)) for x in tensors if isinstance(x, torch.Tensor)],
            self.model.num_calls,
            self.optimizer.param_groups[0]["lr"],
            self.hook.state_dict()["num_reductions"],
            self.scaler.state_dict(),
        ]


@on_ranks(2)
def test_whatever_a_failed_step_has_replaced_or_made_is_rolled_back(rank: Rank, port: int) -> None:
    width = 100_000
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = RestlessTrainee(width)
    trainee.state.synchronize(membership.next(min_members=2))
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


def step_without_commit(rank: Rank, port: int) -> Any:
    """First rank 1 steps and does not commit, then both."""
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(membership.next(min_members=2))
    trainee.step()
    committed = trainee.summary()
    texts = []
    for num_ranks in (1, 2, 2):
        if rank.rank >= 2 - num_ranks:
            trainee.backward()
            trainee.optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = trainee.state.synchronize(membership.next(min_members=2))
        assert got == (rank.rank == 1)
        texts += [str(warning.message) for warning in caught]
        if num_ranks == 1:
            assert trainee.summary() == committed
    assert trainee.state.num_steps == 1
    return texts, trainee.summary()


def test_step_without_commit_comes_from_a_rank_that_has_not_taken_it_or_warns_once(
    port: int,
) -> None:
    (texts, summary), other = run_ranks(2, step_without_commit, port)
    assert other == (texts, summary)
    (text,) = texts
    assert "since step 1 was committed" in text and "right after optimizer.step()" in text


def join_in_another_layout(rank: Rank, port: int) -> list[int]:
    """Rank 0 has committed; its weights lie transposed, and rank 1's in one storage."""
    membership = Membership(store_of(port), rank=rank.rank)
    torch.manual_seed(rank.rank)
    model = Restless(6)
    model.linear.weight.data = torch.randn(6, 2).T if rank.rank == 0 else torch.randn(2, 6)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generation = membership.next(min_members=2)
    if rank.rank == 0:
        model(torch.ones(2, 6))
        del model._buffers["count"]
        state.commit()
    assert state.synchronize(generation) == (rank.rank == 1)
    return [_C.checksum(x.detach().contiguous()) for x in (model.linear.weight, model.lazy)]


def test_newcomer_takes_tensors_that_lie_otherwise_or_that_it_has_not_made_yet(
    port: int,
) -> None:
    first, second = run_ranks(2, join_in_another_layout, port)
    assert first == second


def disagree(rank: Rank, port: int, what: str) -> Any:
    membership = Membership(store_of(port), rank=rank.rank)
    generation = membership.next(min_members=3)
    is_odd = rank.rank == 2
    model = nn.Linear(4, 5 if is_odd and what == "model" else 3)
    state_of_shards = rota.LogicalShards(model, 8 if is_odd and what == "shards" else 4)
    objects: dict[str, object] = {"model": model, "shards": state_of_shards}
    if what == "optimizer":
        make: Callable[..., object] = torch.optim.AdamW if is_odd else torch.optim.SGD
        objects["optimizer"] = make(model.parameters(), lr=0.1)
    if what == "missing" and not is_odd:
        objects["random"] = RandomState()
    state = State(**objects)
    first = error_of(lambda: state.synchronize(generation))
    if is_odd:
        membership.leave()
        return first
    assert not state.synchronize(membership.next()) or rank.rank == 1  # the others go on
    return first


@pytest.mark.parametrize(
    ("what", "facts"),
    [
        ("model", ["'model'", "rank 0, 1 has Linear of 2 parameters, 15", "rank 2 has", "25"]),
        ("shards", ["'shards'", "4 logical shards", "rank 2 has", "8 logical shards"]),
        ("optimizer", ["'optimizer'", "rank 0, 1 has SGD", "rank 2 has AdamW"]),
        ("missing", ["'random'", "rank 0, 1 has RandomState", "rank 2 has nothing"]),
    ],
)
def test_newcomer_of_another_kind_is_an_error_on_every_rank(
    port: int, what: str, facts: list[str]
) -> None:
    for error in run_ranks(3, disagree, port, what):
        check_error(error, "Mismatch", *facts)


def drift(rank: Rank, port: int) -> Any:
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(membership.next(min_members=3))
    trainee.step()
    if rank.rank == 1:
        trainee.model.view.data[7] += 1e-6
    generation = membership.next(min_members=3)
    trainee.state.synchronize(generation)  # compares steps only
    return error_of(lambda: trainee.state.synchronize(generation, check_equal=True))


def test_state_that_differs_after_the_same_step_is_an_error_on_every_rank(
    port: int,
) -> None:
    texts = run_ranks(3, drift, port)
    assert len(set(texts)) == 1
    error, text = texts[0]
    assert error == "Mismatch" and "after step 1" in text
    checksums = [text.split(f"rank {rank} ")[1][:16] for rank in range(3)]
    assert checksums[0] == checksums[2] != checksums[1]


def damage(rank: Rank, port: int) -> Any:
    """A copy that is damaged on its way is not used, and the next attempt succeeds."""
    membership = Membership(store_of(port), rank=rank.rank)
    generation = membership.next(min_members=2)
    trainee = Trainee(seed=rank.rank)
    if rank.rank == 0:
        trainee.state.commit()
    before = trainee.summary()
    fetch = Arena.fetch

    def fetch_damaged(self: Arena, *args: Any) -> int:
        fetch(self, *args)
        self.bytes[0] ^= 1
        return self.checksum()

    Arena.fetch = fetch_damaged  # type: ignore[method-assign]
    error = error_of(lambda: trainee.state.synchronize(generation))
    assert trainee.summary() == before
    Arena.fetch = fetch  # type: ignore[method-assign]
    trainee.state.synchronize(membership.next(min_members=2), check_equal=True)
    return error, trainee.summary()


def test_damaged_copy_is_an_error_on_every_rank_and_no_state(port: int) -> None:
    (first_error, first), (second_error, second) = run_ranks(2, damage, port)
    for error in (first_error, second_error):
        check_error(error, "TransportError", "what rank 1 has copied differs")
    assert first == second


def lose_the_source(rank: Rank, port: int) -> Any:
    """The only rank that has ended the last step dies while the others copy from it."""
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1)
    trainee.state.synchronize(membership.next(min_members=3))
    trainee.step()
    committed = trainee.summary()
    generation = membership.next(min_members=3)
    if rank.rank == 1:
        trainee.optimizer.step()
        trainee.state.commit()
        Arena.checksum = lambda self: kill_self()  # type: ignore[method-assign,assignment]
    error = error_of(lambda: trainee.state.synchronize(generation))
    assert error[0] == "PeerFailed", error
    assert trainee.summary() == committed
    generation = membership.next()
    assert not trainee.state.synchronize(generation, check_equal=True)
    trainee.step()
    return trainee.summary()


def test_source_that_dies_leaves_the_others_their_states(store: dist.TCPStore) -> None:
    (expected,) = run_ranks(1, alone, 2)
    with Ranks(3, lose_the_source, store.port) as ranks:
        first, _, last = ranks.results(killed=[1])
    assert first == last == expected


def keep_residuals(rank: Rank, port: int) -> Any:
    """Residuals are long, and made anew by each state_dict()."""
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1, error_feedback=True)
    generation = membership.next(min_members=2)
    if rank.rank == 0:
        trainee.hook.load_state_dict(
            {
                "seed": 5,
                "num_reductions": 9,
                "residuals": {
                    name: torch.full_like(parameter, 0.5)
                    for name, parameter in trainee.model.named_parameters()
                },
            }
        )
        trainee.state.num_steps = 0
    trainee.state.synchronize(generation)
    saved = trainee.hook.state_dict()
    return saved["num_reductions"], {
        name: residual.unique().tolist() for name, residual in saved["residuals"].items()
    }


def test_residuals_of_a_hook_are_transferred(port: int) -> None:
    first, second = run_ranks(2, keep_residuals, port)
    assert first == second
    assert first[0] == 9 and first[1]["first.weight"] == [0.5]


def survive_rank_0(rank: Rank, port: int) -> tuple[str, str]:
    membership = Membership(store_of(port), rank=rank.rank)
    trainee = Trainee(seed=1)
    generation = membership.next(min_members=2)
    trainee.state.synchronize(generation)
    trainee.step()
    dist.barrier()
    if rank.rank == 0:
        kill_self()
    error_of(dist.barrier)
    trainee.state.synchronize(membership.next())
    kept, note = trainee.state._kept, membership.read_note("layout")
    assert kept is not None and note is not None
    return json.loads(note)[1], kept.address


def test_new_rank_0_says_at_once_what_newcomers_copy(store: dist.TCPStore) -> None:
    with Ranks(2, survive_rank_0, store.port) as ranks:
        _, (announced, address) = ranks.results(killed=[0])
    assert announced == address


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="expected an object with state_dict"):
        State(model=3)
    state = State(model=nn.Linear(1, 1))
    assert state.num_steps == 0
    with pytest.raises(ValueError, match="num_steps"):
        state.num_steps = -1
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1), 1)
    scheduler.unpicklable = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="the state of scheduler cannot be pickled"):
        State(scheduler=scheduler).commit()


class Unpicklable:
    """Keeps its value, whatever it is to load."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        pass


def synchronize_unpicklable(rank: Rank, port: int, bad_rank: int) -> tuple[str, str]:
    """Rank 0 is the source; all go on afterwards."""
    membership = Membership(store_of(port), rank=rank.rank, timeout=timedelta(seconds=300))
    generation = membership.next(min_members=3)
    value = Unpicklable(None)
    state = State(model=nn.Linear(2, 2), value=value)
    if rank.rank == 0:
        state.commit()
    if rank.rank == bad_rank:
        value.value = lambda: None
    error = error_of(lambda: state.synchronize(generation))
    value.value = None
    state.synchronize(generation)
    return error


@pytest.mark.parametrize("bad_rank", [0, 1], ids=["source", "receiver"])
def test_unpicklable_state_raises_on_all_ranks(port: int, bad_rank: int) -> None:
    errors = run_ranks(3, synchronize_unpicklable, port, bad_rank)
    for rank, (kind, text) in enumerate(errors):
        assert kind == ("TypeError" if rank == bad_rank else "TransportError"), text
        assert "the state of value cannot be pickled" in text
        assert rank == bad_rank or f"rank {bad_rank}: " in text


@on_ranks(2)
def test_ddp_is_refused(rank: Rank) -> None:
    rank.init()
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    check_error(error_of(lambda: State(model=ddp)), "TypeError", "pass the module inside")


def change_shards(rank: Rank, port: int) -> tuple[str, str]:
    membership = Membership(store_of(port), rank=rank.rank)
    membership.next(min_members=2)
    model = nn.Linear(1, 1)
    shards = rota.LogicalShards(model, 4)
    assert len(shards) == 2
    for shard in shards:
        with shards.backward_of(shard):
            model(torch.ones(1, 1)).sum().backward()
    if rank.rank == 1:
        membership.leave()
        return "", ""
    membership.next()
    error = error_of(shards.reduce)
    shards.regroup()
    assert list(shards) == [0, 1, 2, 3]
    return error


def test_logical_shards_refuse_a_step_of_other_ranks(port: int) -> None:
    check_error(run_ranks(2, change_shards, port)[0], "RuntimeError", "regroup()")
