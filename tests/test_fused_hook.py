"""rota.fused_hook: its numbers, and what its state says of a backward pass."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from bucket_oracle import FORMATS, Format, reduce_bucket, stats_of
from models import (
    SMALL_BUCKETS_MB,
    TINY_BUCKETS_MB,
    ExactGradients,
    batch_of,
    exact_batch,
    fused_ddp,
    gradients_of,
    make_model,
    norm_of,
)
from oracle import assert_same, random_inputs
from ranks import Rank, check_error, error_of, on_ranks
from rota.gradients.rounding import split_mix_64

# ---- numbers


ORACLE_CASES: list[tuple[int, Format, dict[str, Any]]] = [
    *((world_size, wire, {}) for world_size in (1, 2, 3) for wire in FORMATS),
    *(
        (3, Format(torch.float16, scaled), options)
        for scaled, options in (
            (True, {"loss_scale": 1024.0}),
            (True, {"loss_scale": 3.0}),
            (False, {"gradient_predivide_factor": 2.0}),  # keeps 1e5 from overflowing
            (
                True,
                {"gradient_predivide_factor": 1.7, "loss_scale": 0.3, "algorithm": "two_shot"},
            ),
        )
    ),
]


@pytest.mark.parametrize(("world_size", "wire", "options"), ORACLE_CASES, ids=str)
@on_ranks()
def test_fused_hook_of_random_gradients_follows_oracle(
    rank: Rank, wire: Format, options: dict[str, Any]
) -> None:
    rank.init("gloo")
    state = rota.HookState(wire_dtype=wire.dtype, block_scaling=wire.block_scaling, **options)
    buckets: list[list[torch.Tensor]] = []

    def note_bucket(state, bucket):  # DDP refuses text
        buckets.append(bucket.parameters())
        return rota.fused_hook(state, bucket)

    model = ExactGradients()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
    ddp.register_comm_hook(state, note_bucket)
    predivide = options.get("gradient_predivide_factor", 1.0)
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
        dist.all_gather_object(
            of_ranks := [""] * rank.world_size, f"{norm.item()} {gradients_of(model).tolist()}"
        )
        assert len(set(of_ranks)) == 1, "bits differ between ranks"


@on_ranks(2)
def test_gradients_travel_in_their_own_dtype_where_the_wire_has_none(rank: Rank) -> None:
    rank.init("gloo")
    ddp = fused_ddp(ExactGradients(), rota.HookState(wire_dtype=None))
    ddp(torch.full((2050,), 1 + 2**-20)).backward()
    assert gradients_of(ddp).unique().tolist() == [1 + 2**-20]


@on_ranks(2)
def test_fused_hook_of_complex_parameters_equals_ddp_without_hook(rank: Rank) -> None:
    """test_random_ddp.py has other kinds of models and ways to train."""
    rank.init("gloo")
    dtypes = (torch.complex64, torch.float32) * 2 + (torch.complex128,)
    state = rota.HookState()
    ours = fused_ddp(ExactGradients(dtypes), state)
    torchs = DistributedDataParallel(ExactGradients(dtypes), bucket_cap_mb=SMALL_BUCKETS_MB)
    for step in range(4):
        for ddp in (ours, torchs):
            ddp.zero_grad()
            ddp(exact_batch(rank.rank, step)).backward()
        for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"step {step}"
        assert not state.found_inf and state.grad_norm().item() == norm_of(ours).item()


# ---- the state's results of the last backward pass


@on_ranks(1)
def test_results_before_a_backward_pass_are_refused(rank: Rank) -> None:
    rank.init("gloo")
    state = rota.HookState()
    ddp = fused_ddp(ExactGradients(), state)
    errors = [error_of(state.grad_norm), error_of(lambda: state.found_inf)]
    with ddp.no_sync():
        ddp(exact_batch(0, 0)).backward()
    for error in (*errors, error_of(state.grad_norm)):
        check_error(error, "RuntimeError", "backward()")


@on_ranks(2)
def test_results_of_a_failed_backward_pass_are_refused(rank: Rank) -> None:
    rank.init("gloo", timeout_s=2.0)
    state = rota.HookState()
    ddp = fused_ddp(ExactGradients(), state)
    for step in range(3):
        ddp(exact_batch(rank.rank, step)).backward()
    if rank.rank == 1:
        return  # leaves
    error, text = error_of(lambda: ddp(exact_batch(rank.rank, 3)).backward())
    assert error in ("PeerFailed", "Timeout"), text
    check_error(error_of(state.grad_norm), "RuntimeError")


@on_ranks(2)
def test_backward_pass_after_one_that_failed_begins_anew(rank: Rank) -> None:
    """The first fails on all ranks after its first buckets."""
    rank.init("gloo")
    model = ExactGradients()
    state = rota.HookState(
        wire_dtype=torch.bfloat16, error_feedback=True, stochastic_rounding=True, model=model
    )
    batch = random_inputs(1, 2050, torch.float32)[0]
    ddp = fused_ddp(model, state, bucket_cap_mb=TINY_BUCKETS_MB)
    for _ in range(3):
        ddp.zero_grad()
        ddp(batch).backward()
    before = state.state_dict()

    def fail_halfway(gradient: torch.Tensor) -> None:
        raise RuntimeError("halfway")

    hook = model.weights[2].register_hook(fail_halfway)
    ddp.zero_grad()
    assert error_of(lambda: ddp(batch).backward()) == ("RuntimeError", "halfway")
    hook.remove()
    check_error(error_of(state.grad_norm), "RuntimeError")
    after = state.state_dict()
    assert after["num_reductions"] == before["num_reductions"]
    for name, residual in before["residuals"].items():
        assert torch.equal(after["residuals"][name], residual), name
    del ddp
    model.zero_grad()
    # The first bucket holds parameters that the failed pass has not come to.
    model.weights = torch.nn.ParameterList(reversed(list(model.weights)))
    ddp = fused_ddp(model, state)
    ddp(batch).backward()
    assert state.grad_norm().item() == pytest.approx(norm_of(ddp).item(), rel=1e-6)
    assert rota.clip_grad_norm_(ddp.parameters(), 1e9).item() == state.grad_norm().item()


# ---- stochastic rounding


def test_split_mix_64_gives_the_published_sequence() -> None:
    """The sequence of https://prng.di.unimi.it/splitmix64.c from seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [split_mix_64(1234567, i) for i in range(3)] == expected


@on_ranks(2)
def test_stochastic_rounding_goes_on_where_state_dict_was_taken(rank: Rank) -> None:
    rank.init("gloo")

    def start(**options: Any) -> tuple[rota.HookState, DistributedDataParallel]:
        state = rota.HookState(
            None, torch.bfloat16, stochastic_rounding=True, error_feedback=False, **options
        )
        # One parameter, so that a new DDP has the same buckets.
        return state, fused_ddp(ExactGradients(sizes=(2050,)), state)

    def gradients_by_step(seed: int, stop_at: int | None = None) -> list[list[float]]:
        """With `stop_at`, a new state continues from that step."""
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

    straight = gradients_by_step(7)
    dist.all_gather_object(of_ranks := [None] * 2, straight)
    assert of_ranks == [straight] * 2
    assert straight[0] != straight[1], "every step draws anew"
    assert set(straight[0]) == {0.33203125, 0.333984375}, "both neighbours are drawn"
    assert gradients_by_step(7, stop_at=2) == straight
    assert gradients_by_step(8) != straight


# ---- copies


@on_ranks(2)
def test_hook_state_can_be_copied_and_pickled_without_a_group(rank: Rank) -> None:
    rank.init("gloo")
    state = rota.HookState(
        None, torch.float8_e5m2, loss_scale=4.0, seed=5, stochastic_rounding=True, algorithm="ring"
    )
    ddp = fused_ddp(make_model(), state)
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
    check_error(error_of(pickle.dumps, rota.HookState(group)), "TypeError", "state_dict")
