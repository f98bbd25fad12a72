"""Options, models and groups that rota.fused_hook does not support are refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients, exact_batch, norm_of
from ranks import Rank, check_error, error_of, on_ranks, run_ranks


class Case(NamedTuple):
    call: Callable[[], object]
    error: str
    facts: tuple[str, ...]  # what the text must name


def with_options(**options: Any) -> Callable[[], object]:
    return lambda: rota.HookState(**options)


WIRE_NAMES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

CASES: dict[str, Case] = {
    "integer-wire": Case(
        with_options(wire_dtype=torch.int8), "TypeError", ("wire_dtype", "torch.int8", *WIRE_NAMES)
    ),
    "wide-wire": Case(
        with_options(wire_dtype=torch.float64), "TypeError", ("torch.float64", *WIRE_NAMES)
    ),
    "wire-as-text": Case(
        with_options(wire_dtype="float16"), "TypeError", ("'float16'", *WIRE_NAMES)
    ),
    "scaled-bfloat16": Case(
        with_options(wire_dtype=torch.bfloat16, block_scaling=True),
        "ValueError",
        ("block_scaling", "bfloat16", "float8_e5m2"),
    ),
    "scaled-float32": Case(
        with_options(wire_dtype=torch.float32, block_scaling=True),
        "ValueError",
        ("block_scaling", "float32", "float16"),
    ),
    "loss-scale-0": Case(with_options(loss_scale=0.0), "ValueError", ("loss_scale is 0.0",)),
    "loss-scale-negative": Case(with_options(loss_scale=-2.0), "ValueError", ("loss_scale",)),
    "loss-scale-inf": Case(
        with_options(loss_scale=float("inf")), "ValueError", ("loss_scale is inf", "finite")
    ),
    "loss-scale-nan": Case(with_options(loss_scale=float("nan")), "ValueError", ("loss_scale",)),
    "loss-scale-set": Case(
        lambda: setattr(rota.HookState(), "loss_scale", 0.0), "ValueError", ("loss_scale is 0.0",)
    ),
    "predivide-factor": Case(
        with_options(gradient_predivide_factor=-1.0), "ValueError", ("gradient_predivide_factor",)
    ),
    "seed": Case(with_options(seed=2**64), "ValueError", ("seed", str(2**64), "[0, 2**64)")),
    "seed-float": Case(with_options(seed=0.5), "ValueError", ("seed is 0.5",)),
    "algorithm": Case(
        with_options(algorithm="tree"), "ValueError", ("'tree'", "one_shot", "ordered_ring")
    ),
    "group": Case(with_options(group="world"), "TypeError", ("str", "ProcessGroup")),
    "other-group": Case(
        with_options(group=dist.GroupMember.NON_GROUP_MEMBER), "ValueError", ("not in the group",)
    ),
    "scaler-state": Case(
        lambda: rota.amp.GradScaler([None]), "TypeError", ("NoneType", "rota.HookState")
    ),
    "scaler-nothing": Case(
        lambda: rota.amp.GradScaler(None),  # type: ignore[arg-type]
        "TypeError",
        ("NoneType", "rota.HookState"),
    ),
    "model": Case(with_options(model=3), "TypeError", ("model is of type int", "Module")),
    "error-feedback": Case(
        with_options(error_feedback="yes"), "TypeError", ("error_feedback is 'yes'", "True or Fal")
    ),
    "stochastic-rounding": Case(
        with_options(stochastic_rounding=2), "TypeError", ("stochastic_rounding is 2",)
    ),
    "block-scaling": Case(
        with_options(block_scaling="on"), "TypeError", ("block_scaling is 'on'",)
    ),
    "loss-scale-text": Case(with_options(loss_scale="2"), "TypeError", ("loss_scale is '2'",)),
    "many-shards": Case(with_options(num_shards=1 << 40), "ValueError", ("num_shards", "2**30")),
    "state-dict": Case(
        lambda: rota.HookState().load_state_dict({"seed": 1}),
        "ValueError",
        ("state_dict lacks ['num_reductions', 'residuals']", "rota.HookState.state_dict()"),
    ),
    "state-dict-type": Case(
        lambda: rota.HookState().load_state_dict([]),  # type: ignore[arg-type]
        "TypeError",
        ("state_dict is of type list",),
    ),
    "parameters-text": Case(
        lambda: rota.reduce_gradients("abc", rota.HookState()),  # type: ignore[arg-type]
        "TypeError",
        ("parameters holds a str, expected tensors",),
    ),
    "parameters-none": Case(
        lambda: rota.clip_grad_norm_(None, 1.0),  # type: ignore[arg-type]
        "TypeError",
        ("rota.clip_grad_norm_: parameters is of type NoneType",),
    ),
    "parameters-model": Case(
        lambda: rota.reduce_gradients(Linear(1, 1), rota.HookState()),  # type: ignore[arg-type]
        "TypeError",
        ("parameters is of type Linear", "pass model.parameters()"),
    ),
    "ops-communicator": Case(
        lambda: rota.ops.all_reduce(torch.ones(1), None),  # type: ignore[arg-type]
        "TypeError",
        ("communicator is of type NoneType, expected a rota.Communicator",),
    ),
    "shards-seed": Case(
        lambda: rota.LogicalShards(Linear(1, 1), 2, seed=-1),
        "ValueError",
        ("rota.LogicalShards: seed is -1", "[0, 2**64)"),
    ),
    "shards-model": Case(
        lambda: rota.LogicalShards([], 2),  # type: ignore[arg-type]
        "TypeError",
        ("rota.LogicalShards: model is of type list",),
    ),
    "shards-state": Case(
        lambda: rota.LogicalShards(Linear(1, 1), 2, state=3),  # type: ignore[arg-type]
        "TypeError",
        ("rota.LogicalShards: state is of type int",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_option_is_refused_with_a_clear_error(name: str) -> None:
    case = CASES[name]
    check_error(error_of(case.call), case.error, "rota.", *case.facts)


@pytest.mark.parametrize("state", [3, rota.HookState()], ids=["int", "state"])
def test_hook_takes_a_group_for_its_state(state: Any) -> None:
    bucket: Any = None
    for hook in (rota.allreduce_hook, rota.fp16_compress_hook, rota.bf16_compress_hook):
        error = error_of(lambda hook=hook: hook(state, bucket))
        check_error(
            error,
            "TypeError",
            f"rota hooks: the state is of type {type(state).__name__}, expected a Proc",
        )


# ---- refused on the first bucket


class Words(torch.nn.Module):
    """The gradient of its embedding is sparse."""

    def __init__(self, sparse: bool, alone: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8, sparse=sparse)
        self.out = torch.nn.Identity() if alone else torch.nn.Linear(8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.embedding(words))
        return result.sum()


def train(model: torch.nn.Module, state: object, hook: Any, *args: Any, **options: Any) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    ddp.register_comm_hook(state, hook)
    ddp(*args).backward()


@on_ranks(2)
def test_sparse_gradient_is_refused_with_the_parameters_name(rank: Rank) -> None:
    rank.init("gloo")
    model = Words(True)
    words = torch.tensor([1, 2, 3])
    error = error_of(lambda: train(model, rota.HookState(model=model), rota.fused_hook, words))
    check_error(error, "TypeError", "'embedding.weight'", "sparse_coo", "sparse=False")


class Bucket:
    """The bucket that DDP would pass if it supported other dtypes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._parameter = torch.nn.Parameter(torch.zeros(buffer.shape))

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]

    def buffer(self) -> torch.Tensor:
        return self._buffer


@on_ranks(2)
def test_bucket_of_other_dtype_is_refused(rank: Rank) -> None:
    rank.init("gloo")
    bucket: Any = Bucket(torch.zeros(7, 3, dtype=torch.complex64))
    error = error_of(lambda: rota.fused_hook(rota.HookState(), bucket))
    check_error(
        error,
        "TypeError",
        "parameter 0 of bucket 0, shape [7, 3]",
        "complex64",
        "float32",
        "bfloat16",
    )


@pytest.mark.parametrize("state", [None, 5], ids=["none", "int"])
@on_ranks(2)
def test_state_of_other_type_is_refused(rank: Rank, state: object) -> None:
    rank.init("gloo")
    error = error_of(
        lambda: train(ExactGradients(), state, rota.fused_hook, exact_batch(rank.rank, 0))
    )
    check_error(error, "TypeError", type(state).__name__, "rota.HookState(...), rota.fused_hook")


def use_group(rank: Rank, ranks_of_state: list[int]) -> tuple[str, str]:
    rank.init("gloo")
    group = dist.new_group(ranks_of_state)
    ddp = DistributedDataParallel(ExactGradients())
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    return error_of(lambda: rota.HookState(group, model=ddp))


def test_group_other_than_ddps_is_refused() -> None:
    for error in run_ranks(3, use_group, [0, 1])[:2]:
        check_error(error, "ValueError", "2 ranks [0, 1]", "3 ranks [0, 1, 2]", "leave group out")


def take_group_of_model(rank: Rank) -> float | None:
    rank.init("gloo")
    group = dist.new_group([0, 2])
    dist.barrier()
    if rank.rank == 1:
        return None
    model = ExactGradients()
    ddp = DistributedDataParallel(model, process_group=group)
    state = rota.HookState(model=ddp)
    ddp.register_comm_hook(state, rota.fused_hook)
    ddp(torch.full((2050,), float(rank.rank))).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return float(gradient.flatten()[0])


def test_state_averages_over_the_group_of_its_ddp() -> None:
    assert run_ranks(3, take_group_of_model) == [1.0, None, 1.0]


@pytest.mark.parametrize("how", ["registered", "wrapped"])
@on_ranks(2)
def test_one_state_on_two_models_is_refused(rank: Rank, how: str) -> None:
    rank.init("gloo")
    state = rota.HookState()
    batch = exact_batch(rank.rank, 0)

    def unregistered(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        return rota.fused_hook(state, bucket)

    first, second = (DistributedDataParallel(ExactGradients()) for _ in range(2))
    if how == "wrapped":
        first.register_comm_hook(None, unregistered)
        second.register_comm_hook(None, unregistered)
    else:
        first.register_comm_hook(state, rota.fused_hook)
        second.register_comm_hook(state, rota.fused_hook)
    first(batch).backward()
    error = error_of(lambda: second(batch).backward())
    first.zero_grad()
    first(batch).backward()  # goes on
    assert torch.equal(state.grad_norm(), norm_of(first))
    check_error(error, "ValueError", "one rota.HookState", "model")


@on_ranks(2)
def test_state_of_a_model_that_is_gone_takes_another(rank: Rank) -> None:
    """A state may be used with another model once the first one is gone."""
    rank.init("gloo")
    state = rota.HookState(error_feedback=True)
    norms = []
    for _ in range(2):
        train(ExactGradients(), state, rota.fused_hook, exact_batch(rank.rank, 0))
        norms.append(state.grad_norm().item())
    assert norms[0] == norms[1] > 0


# ---- parameter names


@on_ranks(2)
def test_parameter_of_an_unknown_model_is_named_by_position(rank: Rank) -> None:
    rank.init("gloo")
    error, text = error_of(
        lambda: train(Words(True), rota.HookState(), rota.fused_hook, torch.tensor([1]))
    )
    assert error == "TypeError", text
    assert "parameter 0 of bucket 1, shape [64, 8]" in text


# ---- only one rank is wrong


def be_wrong_alone(rank: Rank, what: str) -> tuple[str, str]:
    rank.init("gloo")
    is_wrong = rank.rank == 1
    if what == "sparse":
        words = torch.tensor([1])
        model = Words(is_wrong, alone=True)  # otherwise ranks would already differ in bucket 0
        state = rota.HookState(model=model)
        return error_of(lambda: train(model, state, rota.fused_hook, words))
    return use(rota.HookState() if not is_wrong else None, rank)


def use(state: object, rank: Rank) -> tuple[str, str]:
    batch = exact_batch(rank.rank, 0)
    return error_of(lambda: train(ExactGradients(), state, rota.fused_hook, batch))


@pytest.mark.parametrize(
    ("what", "fact"), [("sparse", "'embedding.weight'"), ("state", "rota.HookState(...)")]
)
def test_error_of_one_rank_is_raised_on_all(what: str, fact: str) -> None:
    first, wrong, last = run_ranks(3, be_wrong_alone, what)
    check_error(wrong, "TypeError", fact)
    for error in (first, last):
        check_error(error, "PeerFailed", "rank 1", fact)


@on_ranks(2)
def test_states_of_different_options_raise_mismatch(rank: Rank) -> None:
    rank.init("gloo")
    wire_dtype = torch.float16 if rank.rank == 0 else torch.bfloat16
    check_error(use(rota.HookState(wire_dtype=wire_dtype), rank), "Mismatch", "float16", "bfloat16")
