"""rota.fused_hook: its results, for every kind of model and way to train with DDP."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rota
from bucket_oracle import FORMATS, Format, reduce_bucket, stats_of
from models import (
    SMALL_BUCKETS_MB,
    TINY_BUCKETS_MB,
    ExactGradients,
    batch_of,
    exact_batch,
    gradients_of,
    make_model,
    norm_of,
)
from oracle import assert_same, random_inputs
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota.gradients.rounding import split_mix_64


def make_ddp(
    model: torch.nn.Module, state: rota.HookState | None, **options: Any
) -> DistributedDataParallel:
    """DDP with rota.fused_hook, or without a hook if state is None."""
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS_MB)
    ddp = DistributedDataParallel(model, **options)
    if state is not None:
        ddp.register_comm_hook(state, rota.fused_hook)
    return ddp


# ---- numbers


def follow_oracle(rank: Rank, wire: Format, options: dict[str, Any]) -> list[str]:
    """Random gradients, across DDP's bucket rebuild; returns the hook's results by step."""
    rank.init("gloo")
    state = rota.HookState(wire_dtype=wire.dtype, block_scaling=wire.block_scaling, **options)
    buckets: list[list[torch.Tensor]] = []

    def note_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses text
        buckets.append(bucket.parameters())
        return rota.fused_hook(state, bucket)

    model = ExactGradients()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(state, note_bucket)
    predivide = options.get("gradient_predivide_factor", 1.0)
    seen = []
    for step in range(3):
        batches = random_inputs(rank.world_size, 2050 + step, torch.float32)
        if step == 2:
            batches[0][:4] = torch.tensor([1e5, 1e-9, torch.inf, torch.nan])
        model.zero_grad()
        buckets.clear()
        ddp(batches[rank.rank]).backward()
        num_non_finite, sum_of_squares = 0, 0.0
        for i, parameters in enumerate(buckets):
            expected = reduce_bucket(
                [torch.cat([batch[: p.numel()] for p in parameters]) for batch in batches],
                wire,
                contribution_factor=1 / predivide,
                divisor=rank.world_size / predivide,
                result_factor=1 / options.get("loss_scale", 1.0),
            )
            actual = torch.cat([p.grad for p in parameters if p.grad is not None])
            assert_same(actual, expected, f"step {step}, bucket {i}")
            stats = stats_of(expected)
            num_non_finite += stats[0]
            sum_of_squares += stats[1]
        assert (len(buckets) > 1) == (step > 0)  # DDP makes its final buckets after the first step
        assert state.found_inf == (num_non_finite > 0) == (step == 2)
        norm = state.grad_norm()
        assert norm.dtype == torch.float32 and norm.shape == ()
        if step < 2:
            # The sum of squares may have another order of additions.
            assert norm.item() == pytest.approx(math.sqrt(sum_of_squares), rel=1e-7)
        else:
            assert norm.isnan()
        seen.append(f"{norm.item()} {gradients_of(model).tolist()}")
    return seen


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
def test_fused_hook_of_random_gradients_follows_oracle(world_size: int, wire: Format) -> None:
    results = run_ranks(world_size, follow_oracle, wire, {})
    assert all(result == results[0] for result in results), "bits differ between ranks"


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": 1024.0},
        {"loss_scale": 3.0},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 1.7, "loss_scale": 0.3, "algorithm": "two_shot"},
    ],
    ids=str,
)
def test_fused_hook_scales_as_documented(options: dict[str, Any]) -> None:
    run_ranks(3, follow_oracle, Format(torch.float16, True), options)


def predivide(rank: Rank, factor: float) -> list[float]:
    rank.init("gloo")
    state = rota.HookState(None, block_scaling=False, gradient_predivide_factor=factor)
    ddp = make_ddp(ExactGradients(), state)
    ddp(torch.full((2050,), 1e5 if rank.rank == 0 else 0.0)).backward()
    return gradients_of(ddp).unique().tolist()


def test_gradient_predivide_factor_keeps_contributions_from_overflowing() -> None:
    assert run_ranks(2, predivide, 1.0) == [[math.inf]] * 2
    # 50000 is the midpoint of 49984 and 50016 in float16; 49984 is the even one.
    assert run_ranks(2, predivide, 2.0) == [[49984.0]] * 2


@on_ranks(2)
def test_each_model_has_its_own_state(rank: Rank) -> None:
    """Two models, each with its own state and wire dtype, in one backward pass."""
    rank.init("gloo")
    results = []
    wires = (torch.bfloat16, torch.float16)
    ddps = [make_ddp(ExactGradients(), rota.HookState(None, wire)) for wire in wires]
    # 2**10 + 1 needs 11 bits: float16 has them, bfloat16 rounds to 2**10.
    loss = ddps[0](torch.full((2050,), 1025.0)) + ddps[1](torch.full((2050,), 1025.0))
    loss.backward()
    for ddp in ddps:
        results.append(gradients_of(ddp).unique().tolist())
    assert results == [[1024.0], [1025.0]]


def average_in_subgroup(rank: Rank) -> list[float] | None:
    rank.init("gloo")
    group = dist.new_group([0, 2])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    if rank.rank == 1:
        return None
    ddp = make_ddp(ExactGradients(), rota.HookState(group), process_group=group)
    ddp(torch.full((2050,), float(rank.rank))).backward()
    return gradients_of(ddp).unique().tolist()


def test_fused_hook_averages_over_the_group_of_its_state() -> None:
    assert run_ranks(3, average_in_subgroup) == [[1.0], None, [1.0]]


def double_average(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    return rota.fused_hook(state, bucket).then(lambda done: done.value() * 2)


@on_ranks(2)
def test_fused_hook_future_can_be_chained(rank: Rank) -> None:
    rank.init("gloo")
    ddp = DistributedDataParallel(ExactGradients(), bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(rota.HookState(), double_average)
    ddp(torch.full((2050,), float(rank.rank))).backward()
    result = gradients_of(ddp).unique().tolist()
    assert result == [1.0]


# ---- kinds of models and ways to train, compared with plain DDP on the same exact gradients


class Scenario(NamedTuple):
    """How to train. After each step `train` yields whether the hook's norm covers all gradients."""

    train: Callable[[DistributedDataParallel, int], Iterator[bool]]
    model: Callable[[], torch.nn.Module] = ExactGradients
    ddp_options: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)


def backward_each_step(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    for step in range(4):
        ddp.zero_grad()
        ddp(exact_batch(rank, step)).backward()
        yield True


def backward_onto_zeros(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    for step in range(4):
        ddp.zero_grad(set_to_none=False)
        ddp(exact_batch(rank, step)).backward()
        yield True


def accumulate_without_sync(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(exact_batch(rank, step + 10)).backward()
            ddp(exact_batch(rank, step + 20)).backward()
        ddp(exact_batch(rank, step)).backward()
        yield True


def accumulate_with_sync(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    for step in range(3):
        ddp.zero_grad()
        for micro_step in range(3):
            ddp(exact_batch(rank, step + 10 * micro_step)).backward()
            yield True


def leave_some_unused(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    """Each parameter is used by all ranks, by rank 0 only, or by none, in turn."""
    for step in range(5):
        ddp.zero_grad()
        used = [(step + i) % 5 for i in range(3)] + ([(step + 3) % 5] if rank == 0 else [])
        ddp(exact_batch(rank, step), used).backward()
        yield True


def use_buckets_in_turns(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    """Where DDP leaves out unused buckets, two steps have none in common."""
    for step in range(4):
        ddp.zero_grad()
        ddp(exact_batch(rank, step), [1, 2] if step % 2 else [3, 4]).backward()
        yield True


def leave_some_unused_in_the_end(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(exact_batch(rank, step + 10), [0, 1]).backward()
        ddp(exact_batch(rank, step), [1, 2, 3]).backward()
        yield True


def leave_what_was_reduced_unused(ddp: DistributedDataParallel, rank: int) -> Iterator[bool]:
    """DDP reduces such gradients again, but leaves them unchanged unless they are bucket views."""
    for step in range(3):
        ddp.zero_grad()
        ddp(exact_batch(rank, step)).backward()
        yield True
        ddp(exact_batch(rank, step + 10), [0, 4]).backward()
        yield ddp.gradient_as_bucket_view


class Tied(torch.nn.Module):
    """One weight, used twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ExactGradients()
        self.second = ExactGradients()
        self.second.weights[1] = self.first.weights[1]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.first(batch) + self.second(batch)


class Checkpointed(torch.nn.Module):
    """Every second gradient comes in a graph task of its own, inside the others' task."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(ExactGradients() for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        terms = []
        for i, part in enumerate(self.parts):
            is_plain = i % 2 > 0
            terms.append(part(batch) if is_plain else checkpoint(part, batch, use_reentrant=True))
        return torch.stack(terms).sum()


def mixed_dtypes() -> torch.nn.Module:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float32)
    return ExactGradients(dtypes)


def complex_and_real() -> torch.nn.Module:
    return ExactGradients((torch.complex64, torch.float32) * 2 + (torch.complex128,))


UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": TINY_BUCKETS_MB}
SKIP = "skip_all_reduce_unused_params"  # since torch 2.13
CAN_SKIP = SKIP in inspect.signature(DistributedDataParallel).parameters
SKIPPED = {**UNUSED, SKIP: True} if CAN_SKIP else UNUSED
SCENARIOS = {
    "skipped": Scenario(use_buckets_in_turns, ddp_options=SKIPPED),
    "plain": Scenario(backward_each_step),
    "zeros": Scenario(backward_onto_zeros),
    "no-sync": Scenario(accumulate_without_sync),
    "sync": Scenario(accumulate_with_sync),
    "unused": Scenario(leave_some_unused, ddp_options=UNUSED),
    "unused-no-sync": Scenario(leave_some_unused_in_the_end, ddp_options=UNUSED),
    "unused-sync": Scenario(leave_what_was_reduced_unused, ddp_options=UNUSED),
    "static-graph": Scenario(backward_each_step, ddp_options={"static_graph": True}),
    "static-mixed-dtypes": Scenario(
        accumulate_with_sync, mixed_dtypes, ddp_options={"static_graph": True}
    ),
    "checkpoints": Scenario(backward_each_step, Checkpointed),
    "tied": Scenario(backward_each_step, Tied),
    "mixed-dtypes": Scenario(backward_each_step, mixed_dtypes),
    "complex": Scenario(backward_each_step, complex_and_real),
    "one-bucket": Scenario(backward_each_step, ddp_options={"bucket_cap_mb": 25}),
}


def train_beside_torch(rank: Rank, name: str, as_view: bool) -> int:
    rank.init("gloo")
    scenario = SCENARIOS[name]
    options = {"gradient_as_bucket_view": as_view, **scenario.ddp_options}
    state = rota.HookState()
    ours = make_ddp(scenario.model(), state, **options)
    torchs = make_ddp(scenario.model(), None, **options)
    steps = zip(scenario.train(ours, rank.rank), scenario.train(torchs, rank.rank), strict=True)
    for num_steps, (has_norm, _) in enumerate(steps, 1):
        for (parameter, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"step {num_steps}, {parameter}"
            if p.grad is not None and q.grad is not None:
                assert torch.equal(p.grad, q.grad), f"step {num_steps}, {parameter}"
        assert not state.found_inf
        if has_norm:
            assert state.grad_norm().item() == norm_of(ours).item(), f"step {num_steps}"
    return num_steps


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_fused_hook_equals_ddp_without_hook(name: str, as_view: bool) -> None:
    assert min(run_ranks(2, train_beside_torch, name, as_view)) > 2


# ---- the state's results of the last backward pass


def meet_inf(rank: Rank) -> list[tuple[bool, float]]:
    rank.init("gloo")
    state = rota.HookState()
    ddp = make_ddp(
        ExactGradients(), state, find_unused_parameters=True, bucket_cap_mb=TINY_BUCKETS_MB
    )
    seen = []
    for step in range(5):
        batch = exact_batch(rank.rank, step)
        if step in (1, 2) and rank.rank == step:
            batch[0] = torch.inf
        ddp.zero_grad()
        ddp(batch, [0] if step == 1 else [4]).backward()  # in different buckets
        seen.append((state.found_inf, state.grad_norm().item()))
    return seen


def test_inf_of_one_rank_is_found_on_all() -> None:
    results = run_ranks(3, meet_inf)
    assert results[0] == results[1] == results[2]
    assert [found for found, _ in results[0]] == [False, True, True, False, False]
    assert [math.isinf(norm) for _, norm in results[0]] == [False, True, True, False, False]


def ask_too_early(rank: Rank) -> list[tuple[str, str]]:
    rank.init("gloo")
    state = rota.HookState()
    ddp = make_ddp(ExactGradients(), state)
    errors = [error_of(state.grad_norm), error_of(lambda: state.found_inf)]
    with ddp.no_sync():
        ddp(exact_batch(0, 0)).backward()
    return [*errors, error_of(state.grad_norm)]


def test_results_before_a_backward_pass_are_refused() -> None:
    for error in run_ranks(1, ask_too_early)[0]:
        check_error(error, "RuntimeError", "backward()")


def ask_after_failure(rank: Rank) -> tuple[str, str] | None:
    rank.init("gloo", timeout_s=2.0)
    state = rota.HookState()
    ddp = make_ddp(ExactGradients(), state)
    for step in range(3):
        ddp(exact_batch(rank.rank, step)).backward()
    if rank.rank == 1:
        return None  # leaves
    error, text = error_of(lambda: ddp(exact_batch(rank.rank, 3)).backward())
    assert error in ("PeerFailed", "Timeout"), text
    return error_of(state.grad_norm)


def test_results_of_a_failed_backward_pass_are_refused() -> None:
    refused = run_ranks(2, ask_after_failure)[0]
    assert refused is not None and refused[0] == "RuntimeError"


def fail_halfway(gradient: torch.Tensor) -> None:
    raise RuntimeError("halfway")


def train_until_failure(model: ExactGradients, state: rota.HookState, batch: torch.Tensor) -> None:
    """A backward pass fails on all ranks after its first buckets."""
    ddp = make_ddp(model, state, bucket_cap_mb=TINY_BUCKETS_MB)
    for _ in range(3):
        ddp.zero_grad()
        ddp(batch).backward()
    before = state.state_dict()
    hook = model.weights[2].register_hook(fail_halfway)
    ddp.zero_grad()
    assert error_of(lambda: ddp(batch).backward()) == ("RuntimeError", "halfway")
    hook.remove()
    assert error_of(state.grad_norm)[0] == "RuntimeError"
    after = state.state_dict()
    assert after["num_reductions"] == before["num_reductions"]
    for name, residual in before["residuals"].items():
        assert torch.equal(after["residuals"][name], residual), name


@on_ranks(2)
def test_backward_pass_after_one_that_failed_begins_anew(rank: Rank) -> None:
    rank.init("gloo")
    model = ExactGradients()
    state = rota.HookState(
        wire_dtype=torch.bfloat16, error_feedback=True, stochastic_rounding=True, model=model
    )
    batch = random_inputs(1, 2050, torch.float32)[0]
    train_until_failure(model, state, batch)
    model.zero_grad()
    # The first bucket holds parameters that the failed pass has not come to.
    model.weights = torch.nn.ParameterList(reversed(list(model.weights)))
    ddp = make_ddp(model, state)
    ddp(batch).backward()
    assert state.grad_norm().item() == pytest.approx(norm_of(ddp).item(), rel=1e-6)
    assert rota.clip_grad_norm_(ddp.parameters(), 1e9).item() == state.grad_norm().item()


# ---- stochastic rounding


def test_split_mix_64_gives_the_published_sequence() -> None:
    """The sequence of https://prng.di.unimi.it/splitmix64.c from seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [split_mix_64(1234567, i) for i in range(3)] == expected


def round_at_random(rank: Rank, seed: int, stop_at: int | None) -> list[list[float]]:
    """Returns each step's gradients; with `stop_at`, a new state continues from that step."""
    rank.init("gloo")

    def start(**options: Any) -> tuple[rota.HookState, DistributedDataParallel]:
        state = rota.HookState(
            None, torch.bfloat16, stochastic_rounding=True, error_feedback=False, **options
        )
        # One parameter, so that a new DDP has the same buckets.
        return state, make_ddp(ExactGradients(sizes=(2050,)), state)

    state, ddp = start(seed=seed)
    steps = []
    for step in range(4):
        if step == stop_at:
            saved = state.state_dict()
            state, ddp = start()
            state.load_state_dict(saved)
        ddp.zero_grad()
        ddp(torch.full((2050,), 1 / 3)).backward()
        steps.append(gradients_of(ddp).tolist())
    return steps


def test_stochastic_rounding_goes_on_where_state_dict_was_taken() -> None:
    straight, other_rank = run_ranks(2, round_at_random, 7, None)
    assert straight == other_rank
    assert straight[0] != straight[1], "every step draws anew"
    assert set(straight[0]) == {0.33203125, 0.333984375}, "both neighbours are drawn"
    assert run_ranks(2, round_at_random, 7, 2)[0] == straight
    assert run_ranks(2, round_at_random, 8, None)[0] != straight


# ---- copies


@on_ranks(2)
def test_hook_state_can_be_copied_and_pickled_without_a_group(rank: Rank) -> None:
    rank.init("gloo")
    state = rota.HookState(
        None, torch.float8_e5m2, loss_scale=4.0, seed=5, stochastic_rounding=True, algorithm="ring"
    )
    ddp = make_ddp(make_model(), state)
    ddp(batch_of(rank.rank, 0)).sum().backward()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.state_dict() == state.state_dict()
        assert other.state_dict()["num_reductions"] == 1
        options = ("wire_dtype", "block_scaling", "stochastic_rounding", "algorithm", "loss_scale")
        assert [getattr(other, o) for o in options] == [getattr(state, o) for o in options]
    average = copy.deepcopy(ddp)  # as torch.optim.swa_utils.AveragedModel does
    assert average(batch_of(0, 0)).equal(ddp(batch_of(0, 0)))
    group = dist.new_group([0, 1])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    check_error(error_of(lambda: pickle.dumps(rota.HookState(group))), "TypeError", "state_dict")
