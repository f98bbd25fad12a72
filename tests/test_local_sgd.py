"""LocalSGD and DiLoCo beside DDP and beside the algorithm by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkpoints
import rota
from local_sgd_workers import (
    NESTEROV,
    check_equal_on_all_ranks,
    flat,
    make_diloco,
    train,
)
from models import ExactGradients, batch_of, exact_batch, make_model
from oracle import assert_same
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota.local_sgd import DiLoCo, LocalSGD

# ---- DDP


@on_ranks(2)
def test_every_step_with_exact_sums_has_the_bits_of_ddp(rank: Rank) -> None:
    """Gradients are small integers and rates powers of two, so every sum is exact."""
    rank.init()
    for with_optimizer in (False, True):
        alone, replica = ExactGradients(), ExactGradients()
        plain = torch.optim.SGD(alone.parameters(), lr=1.0)
        outer = DiLoCo(alone, plain, 1) if with_optimizer else LocalSGD(alone, 1)
        ddp = DistributedDataParallel(replica)
        for step in range(4):
            for model, forward in ((alone, alone), (replica, ddp)):
                forward(exact_batch(rank.rank, step)).backward()
                torch.optim.SGD(model.parameters(), lr=0.25).step()
                if model is alone:
                    outer.step()
                model.zero_grad()
            assert_same(flat(alone), flat(replica), f"{type(outer).__name__}, step {step}")


# ---- the outer reduction


WIRES: dict[str, dict[str, Any]] = {
    "float32": {"wire_dtype": torch.float32},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "float16": {"wire_dtype": torch.float16, "block_scaling": False},
    "scaled": {"wire_dtype": torch.float16},
    "e4m3": {"wire_dtype": torch.float8_e4m3fn},
    "e5m2": {"wire_dtype": torch.float8_e5m2},
}


@pytest.mark.parametrize("world_size", (2, 3))
@on_ranks()
def test_outer_reduction_has_the_bits_of_the_communicator(rank: Rank) -> None:
    communicator = rank.communicator()
    for name, options in WIRES.items():
        for feedback in (False, True):
            torch.manual_seed(rank.rank)
            model = nn.Linear(1000, 1, bias=False)
            state = rota.HookState(error_feedback=feedback, **options)
            outer = LocalSGD(model, 2, state=state)
            common = model.weight.detach().clone()
            residual = torch.zeros(1000) if feedback else None
            stats = torch.zeros(2, dtype=torch.float64)
            for step in range(6):
                with torch.no_grad():
                    model.weight += torch.randn(1, 1000) * 10.0 ** torch.randint(-6, 2, (1, 1000))
                if step % 2 == 1:
                    difference = common - model.weight.detach()
                    if not state.block_scaling and not feedback:
                        wire_dtype = state.wire_dtype
                        communicator.all_reduce(difference, "avg", wire_dtype=wire_dtype)
                    else:
                        communicator.reduce_bucket(
                            difference,
                            stats,
                            wire_dtype=state.wire_dtype,
                            block_scaling=state.block_scaling,
                            divisor=rank.world_size,
                            residual=residual,
                        )
                    common -= difference
                outer.step()
                if step % 2 == 1:
                    assert_same(model.weight.detach(), common, f"{name} {feedback} {step}")
            if residual is not None:
                saved = outer.state_dict()["state"]["residuals"]["weight"]
                assert_same(saved, residual.view(1, 1000), name)


# ---- the algorithm


class Mixed(nn.Module):
    """Has several dtypes, statistics, a layout that is not contiguous, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 24)
        self.first.weight = nn.Parameter(torch.randn(32, 24).mul_(0.1).t())
        self.norm = nn.BatchNorm1d(24)
        self.narrow = nn.Linear(24, 24).bfloat16()
        self.wave = nn.Parameter(torch.randn(24, dtype=torch.complex64))
        self.last = nn.Linear(24, 8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 1.1), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(batch))
        hidden = self.narrow(hidden.bfloat16()).float() * self.wave.abs()
        out: torch.Tensor = self.last(hidden) * self.scale + self.frozen
        return out


@on_ranks(2)
def test_all_ranks_have_equal_parameters_and_statistics_after_an_outer_step(rank: Rank) -> None:
    rank.init()
    for make in (LocalSGD, make_diloco):
        for name, options in WIRES.items():
            for num_fragments in (1, 3):
                torch.manual_seed(rank.rank)
                model = Mixed()
                state = rota.HookState(error_feedback=True, **options)
                outer = make(model, 4, state=state, num_fragments=num_fragments)
                what = f"{make.__name__} {name} {num_fragments}"
                check_equal_on_all_ranks(model, f"{what} at the start")
                start = flat(model)
                train(rank, model, outer, range(6), lr=0.01, momentum=0.9)
                assert (flat(model) != start).sum() > 1000
                outer.sync()
                check_equal_on_all_ranks(model, what)
                assert outer.num_skipped == 0
                assert model.norm.num_batches_tracked == 6
                assert torch.isfinite(flat(model)).all()
                assert set(outer.state_dict()["parameters"]) >= {"wave", "norm.running_mean"}


@on_ranks(2)
def test_statistics_are_averaged(rank: Rank) -> None:
    rank.init()
    for make in (LocalSGD, make_diloco):
        model = nn.BatchNorm1d(2)
        outer = make(model, 1)
        model.running_mean.fill_(rank.rank)
        outer.step()
        assert model.running_mean.tolist() == [0.5, 0.5]
        model.running_mean = model.running_mean + rank.rank  # another tensor
        outer.step()
        assert model.running_mean.tolist() == [1, 1]


@on_ranks(2)
def test_small_outer_steps_of_16_bit_parameters_add_up(rank: Rank) -> None:
    """Each outer step is 1/16 of what bfloat16 can add to 1."""
    rank.init()
    model = nn.ParameterList([torch.ones(1, dtype=torch.bfloat16)])
    outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=2.0**-4), 1)
    for _ in range(16):
        with torch.no_grad():
            model[0] += 2.0**-7
        outer.step()
    assert model[0].item() == 1 + 2.0**-7


def diloco_by_hand(num_steps: int, sync_every: int) -> torch.Tensor:
    """Both workers in this process, with the outer step as in the paper."""
    common = make_model()
    outer_optimizer = torch.optim.SGD(common.parameters(), **NESTEROV)
    workers = [copy.deepcopy(common) for _ in range(2)]
    optimizers = [torch.optim.AdamW(w.parameters(), lr=0.01) for w in workers]
    for step in range(num_steps):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            worker(batch_of(rank, step)).square().mean().backward()
            optimizer.step()
        if (step + 1) % sync_every == 0:
            tensors = zip(common.parameters(), *(w.parameters() for w in workers), strict=True)
            with torch.no_grad():
                for global_, first, second in tensors:
                    global_.grad = ((global_ - first) + (global_ - second)) / 2
                outer_optimizer.step()
                for worker in workers:
                    worker.load_state_dict(common.state_dict())
    return flat(common)


@on_ranks(2, env={"OMP_NUM_THREADS": "1"})
def test_diloco_has_the_bits_of_the_algorithm_by_hand(rank: Rank) -> None:
    rank.init()
    model = make_model()
    outer = make_diloco(model, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        model(batch_of(rank.rank, step)).square().mean().backward()
        optimizer.step()
        outer.step()
    assert_same(flat(model), diloco_by_hand(9, 3), "parameters")


@on_ranks(2)
def test_fragments_are_synchronised_in_turns(rank: Rank) -> None:
    """Every step adds 1 on rank 0 and 3 on rank 1; a synchronised weight is the same on both."""
    rank.init()
    model = nn.ParameterList(torch.zeros(4) for _ in range(3))
    outer = LocalSGD(model, 6, num_fragments=3)
    synced_at: list[set[int]] = [set(), set(), set()]
    for step in range(1, 13):
        with torch.no_grad():
            for weight in model:
                weight += 1 + 2 * rank.rank
        outer.step()
        for i, weight in enumerate(model):
            if weight[0] == 2 * step:  # the mean of both
                synced_at[i].add(step)
    assert synced_at == [{2, 8}, {4, 10}, {6, 12}]


@on_ranks(2)
def test_sync_passes_over_what_is_synchronised(rank: Rank) -> None:
    rank.init()
    for num_fragments in (1, 2):
        model = make_model()
        outer = make_diloco(model, 4, num_fragments=num_fragments)
        train(rank, model, outer, range(4))
        scheduled = flat(model)
        outer.sync()  # of the fragment that was not synchronised in the last step, if any
        once = flat(model)
        assert torch.equal(once, scheduled) == (num_fragments == 1)
        again = make_diloco(model, 4, num_fragments=num_fragments)
        again.load_state_dict(copy.deepcopy(outer.state_dict()))
        for one in (outer, again):
            one.sync()
            assert_same(flat(model), once, "parameters")
        train(rank, model, outer, range(1))
        outer.sync()
        assert not torch.equal(flat(model), once)
        check_equal_on_all_ranks(model, "at the end")


@on_ranks(2)
def test_delayed_result_is_mixed_with_what_has_come_since(rank: Rank) -> None:
    rank.init()
    model = nn.ParameterList([torch.zeros(4)])
    outer = LocalSGD(model, 4, fragment_sync_delay=2, fragment_update_alpha=0.5)
    seen = []
    for step in range(1, 9):
        with torch.no_grad():
            model[0] += 1 + 2 * rank.rank
        outer.step()
        seen.append(model[0][0].item())
        if step == 5:
            check_error(error_of(outer.state_dict), "RuntimeError", "until step 6, this is step 5")
    outer.sync()  # the one in flight, then another
    assert not torch.equal(model[0], torch.zeros(4))
    # At step 4 the mean is 8; it is applied after step 6, half and half.
    of_first = [1, 2, 3, 4, 5, (6 + 8) / 2, 8, 9]
    assert seen == (of_first, [3, 6, 9, 12, 15, (18 + 8) / 2, 16, 19])[rank.rank]


# ---- workers of several ranks


@on_ranks(4, env={"OMP_NUM_THREADS": "1"})
def test_workers_may_be_groups_of_ranks(rank: Rank) -> None:
    """Two workers of two ranks each, whose inner group is DDP's or FSDP's, in three ways."""
    rank.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    results = []
    for way in ("peers", "all", "fsdp"):
        model = make_model()
        if way == "fsdp":
            fully_shard(model, mesh=mesh["inner"])
            forward: nn.Module = model
        else:
            forward = DistributedDataParallel(model, process_group=mesh.get_group("inner"))
        group = None if way == "all" else mesh.get_group("outer")
        model_group = mesh.get_group("inner") if way == "fsdp" else None
        state = rota.HookState(
            group, torch.bfloat16, error_feedback=True, block_scaling=False, model_group=model_group
        )
        outer = make_diloco(forward, 2, state=state)
        train(rank, forward, outer, range(4))
        if way == "fsdp":
            full = [parameter.full_tensor() for parameter in model.parameters()]
            results.append(torch.cat([tensor.detach().flatten().double() for tensor in full]))
        else:
            check_equal_on_all_ranks(model, way)
            results.append(flat(model))
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][rank.rank in (1, 2)]
    of_other_shards = rota.HookState(crossed, torch.float32)
    error = error_of(LocalSGD, model, 2, state=of_other_shards)
    check_error(error, "Mismatch", "disagree on shard: ")
    peers, every_rank, sharded = results
    assert_same(sharded, peers, "shards and replicas")
    # The same mean of four ranks, of which two and two are equal: every sum is exact.
    assert_same(every_rank, peers, "a group of all ranks and one of peers")


# ---- saving


def go_on(rank: Rank, num_steps: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """What is saved after so many more steps."""
    model = make_model()
    state = rota.HookState(
        wire_dtype=torch.float8_e4m3fn, error_feedback=True, stochastic_rounding=True, seed=3
    )
    outer = make_diloco(model, 4, state=state, num_fragments=2)
    if saved is not None:
        model.load_state_dict(saved["model"])
        outer.load_state_dict(copy.deepcopy(saved["outer"]))
        assert outer.num_steps == saved["outer"]["num_steps"]
    train(rank, model, outer, range(outer.num_steps, outer.num_steps + num_steps))
    return copy.deepcopy({"model": model.state_dict(), "outer": outer.state_dict()})


@on_ranks(2, env={"OMP_NUM_THREADS": "1"}, timeout_s=180)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(rank: Rank) -> None:
    rank.init()
    whole = go_on(rank, 11, None)
    assert any(residual.any() for residual in whole["outer"]["state"]["residuals"].values())
    for num_steps in (1, 3, 4, 7):
        part = go_on(rank, num_steps, None)
        checkpoints.assert_same(go_on(rank, 11 - num_steps, part), whole)


def resume(rank: Rank, saved: list[Any] | None) -> dict[str, Any]:
    rank.init()
    return go_on(rank, 4, saved and copy.deepcopy(saved[min(rank.rank, len(saved) - 1)]))


def test_another_number_of_workers_goes_on() -> None:
    saved = run_ranks(2, resume, None)
    for world_size in (1, 3):
        states = run_ranks(world_size, resume, saved)
        for state in states:
            assert state["outer"]["num_steps"] == 8
            parameters = state["outer"]["parameters"]
            checkpoints.assert_same(parameters, states[0]["outer"]["parameters"])
            assert state["outer"]["outer_optimizer"]["state"].keys() == {0, 1, 2, 3, 4, 5}
        again = run_ranks(2, resume, states)
        assert again[0]["outer"]["num_steps"] == 12
