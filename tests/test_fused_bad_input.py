"""Options, models and groups that rota.fused_hook does not support are refused on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients, exact_batch, norm_of
from ranks import Rank, check_error, error_of, on_ranks


class Case(NamedTuple):
    call: Callable[[], object]
    error: str
    facts: str  # what the text must name, with bars between them


def state(error: str, facts: str, **options: Any) -> Case:
    """Makes a state with these options."""
    return Case(lambda: rota.HookState(**options), error, facts)


def shards(error: str, facts: str, model: Any = None, **options: Any) -> Case:
    call = lambda: rota.LogicalShards(Linear(1, 1) if model is None else model, 2, **options)  # noqa: E731
    return Case(call, error, f"rota.LogicalShards | {facts}")


WIRES = "float32 | bfloat16 | float16 | float8_e4m3fn | float8_e5m2"

CASES: dict[str, Case] = {
    "integer-wire": state("TypeError", f"wire_dtype | torch.int8 | {WIRES}", wire_dtype=torch.int8),
    "wire-as-text": state("TypeError", f"'float16' | {WIRES}", wire_dtype="float16"),
    "scaled-bfloat16": state(
        "ValueError",
        "block_scaling | bfloat16 | float8_e5m2",
        wire_dtype=torch.bfloat16,
        block_scaling=True,
    ),
    "loss-scale-0": state("ValueError", "loss_scale is 0.0", loss_scale=0.0),
    "loss-scale-inf": state("ValueError", "loss_scale is inf | finite", loss_scale=math.inf),
    "loss-scale-set": Case(
        lambda: setattr(rota.HookState(), "loss_scale", 0.0), "ValueError", "loss_scale is 0.0"
    ),
    "predivide-factor": state(
        "ValueError", "gradient_predivide_factor", gradient_predivide_factor=-1.0
    ),
    "seed": state("ValueError", f"seed | {2**64} | [0, 2**64)", seed=2**64),
    "seed-float": state("ValueError", "seed is 0.5", seed=0.5),
    "algorithm": state("ValueError", "'tree' | one_shot | ordered_ring", algorithm="tree"),
    "group": state("TypeError", "str | ProcessGroup", group="world"),
    "other-group": state("ValueError", "not in the group", group=dist.GroupMember.NON_GROUP_MEMBER),
    "scaler-state": Case(
        lambda: rota.amp.GradScaler([None]), "TypeError", "NoneType | rota.HookState"
    ),
    "scaler-nothing": Case(
        lambda: rota.amp.GradScaler(None),
        "TypeError",
        "NoneType | rota.HookState",
    ),
    "model": state("TypeError", "model is of type int | Module", model=3),
    "error-feedback": state(
        "TypeError", "error_feedback is 'yes' | True or Fal", error_feedback="yes"
    ),
    "stochastic-rounding": state("TypeError", "stochastic_rounding is 2", stochastic_rounding=2),
    "block-scaling": state("TypeError", "block_scaling is 'on'", block_scaling="on"),
    "loss-scale-text": state("TypeError", "loss_scale is '2'", loss_scale="2"),
    "many-shards": state("ValueError", "num_shards | 2**30", num_shards=1 << 40),
    "state-dict": Case(
        lambda: rota.HookState().load_state_dict({"seed": 1}),
        "ValueError",
        "state_dict lacks ['num_reductions', 'residuals'] | rota.HookState.state_dict()",
    ),
    "state-dict-type": Case(
        lambda: rota.HookState().load_state_dict([]),
        "TypeError",
        "state_dict is of type list",
    ),
    "parameters-text": Case(
        lambda: rota.reduce_gradients("abc", rota.HookState()),
        "TypeError",
        "parameters holds a str, expected tensors",
    ),
    "parameters-none": Case(
        lambda: rota.clip_grad_norm_(None, 1.0),
        "TypeError",
        "rota.clip_grad_norm_: parameters is of type NoneType",
    ),
    "parameters-model": Case(
        lambda: rota.reduce_gradients(Linear(1, 1), rota.HookState()),
        "TypeError",
        "parameters is of type Linear | pass model.parameters()",
    ),
    "ops-communicator": Case(
        lambda: rota.ops.all_reduce(torch.ones(1), None),
        "TypeError",
        "communicator is of type NoneType, expected a rota.Communicator",
    ),
    "shards-seed": shards("ValueError", "seed is -1 | [0, 2**64)", seed=-1),
    "shards-model": shards("TypeError", "model is of type list", model=[]),
    "shards-state": shards("TypeError", "state is of type int", state=3),
}


@pytest.mark.parametrize("name", CASES)
def test_option_is_refused_with_a_clear_error(name: str) -> None:
    case = CASES[name]
    check_error(error_of(case.call), case.error, "rota.", *case.facts.split(" | "))


@pytest.mark.parametrize("state", [3, rota.HookState()], ids=["int", "state"])
def test_hook_takes_a_group_for_its_state(state: Any) -> None:
    bucket: Any = None
    for hook in (rota.allreduce_hook, rota.fp16_compress_hook, rota.bf16_compress_hook):
        error = error_of(hook, state, bucket)
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
    """Or with its place, where the state does not know the model."""
    rank.init("gloo")
    for has_model, name in (
        (True, "'embedding.weight'"),
        (False, "parameter 0 of bucket 1, shape [64, 8]"),
    ):
        model = Words(True)
        state = rota.HookState(model=model if has_model else None)
        words = torch.tensor([1, 2, 3])
        error = error_of(train, model, state, rota.fused_hook, words)
        check_error(error, "TypeError", name, "sparse_coo", "sparse=False")


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
    error = error_of(rota.fused_hook, rota.HookState(), bucket)
    check_error(
        error,
        "TypeError",
        "parameter 0 of bucket 0, shape [7, 3]",
        "complex64",
        "float32",
        "bfloat16",
    )


@on_ranks(3)
def test_state_averages_over_the_group_of_its_ddp_and_refuses_another(rank: Rank) -> None:
    rank.init("gloo")
    own, other = dist.new_group([0, 2]), dist.new_group([0, 1])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    if rank.rank == 1:
        return
    ddp = DistributedDataParallel(ExactGradients(), process_group=own)
    state = rota.HookState(model=ddp)
    ddp.register_comm_hook(state, rota.fused_hook)
    ddp(torch.full((2050,), float(rank.rank))).backward()
    assert next(ddp.parameters()).grad[0].item() == 1.0
    if rank.rank == 0:
        error = error_of(rota.HookState, other, model=ddp)
        check_error(error, "ValueError", "2 ranks [0, 1]", "2 ranks [0, 2]", "leave group out")


@pytest.mark.parametrize("how", ["registered", "wrapped"])
@on_ranks(2)
def test_one_state_on_two_models_is_refused(rank: Rank, how: str) -> None:
    rank.init("gloo")
    state = rota.HookState()
    batch = exact_batch(rank.rank, 0)

    def unregistered(_, bucket):  # DDP refuses annotations as text
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
    rank.init("gloo")
    state = rota.HookState(error_feedback=True)
    norms = []
    for _ in range(2):
        train(ExactGradients(), state, rota.fused_hook, exact_batch(rank.rank, 0))
        norms.append(state.grad_norm().item())
    assert norms[0] == norms[1] > 0


# ---- only one rank is wrong


@pytest.mark.parametrize(
    ("what", "fact"),
    [
        ("sparse", "'embedding.weight'"),
        ("state", "NoneType; register it as ddp.register_comm_hook(rota.HookState(...)"),
    ],
)
@on_ranks(3)
def test_error_of_one_rank_is_raised_on_all(rank: Rank, what: str, fact: str) -> None:
    rank.init("gloo")
    is_wrong = rank.rank == 1
    if what == "sparse":
        # Alone: otherwise ranks would already differ in bucket 0.
        model, batch = Words(is_wrong, alone=True), torch.tensor([1])
        state = rota.HookState(model=model)
    else:
        model, batch = ExactGradients(), exact_batch(rank.rank, 0)
        state = None if is_wrong else rota.HookState()
    error = error_of(train, model, state, rota.fused_hook, batch)
    if is_wrong:
        check_error(error, "TypeError", fact)
    else:
        check_error(error, "PeerFailed", "rank 1", fact)
