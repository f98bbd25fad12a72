"""Random DistributedDataParallel trainings on rota beside the same on Gloo with torch's own parts.

hypothesis draws a training: a model, options of DDP, a hook, a scaler, clipping, optimizers, and
what each step does. The ranks train it twice, once with torch's parts over Gloo and once with
rota's, and compare gradients, parameters, buffers, norm and scale after each step. What torch
refuses on Gloo is left out. Gradients are small integers, so they have the same bits on both.

`make test` trains the same cases every time; `make test-long` sets ROTA_PROPERTY_CASES for more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rota
from check_groups import CheckGroup, check_groups
from models import SMALL_BUCKETS_MB, TINY_BUCKETS_MB
from ranks import Rank

USUAL_CASES = 150
NUM_CASES = int(os.environ.get("ROTA_PROPERTY_CASES", USUAL_CASES))
WORLD_SIZES = (2, 3)
TIMEOUT_S = 10.0  # of a wait for another rank

# By name: the hook of the training with rota, and whether it rounds to float16 on the wire.
HOOKS: dict[str, tuple[Any, bool]] = {
    "none": (None, False),
    "allreduce": (rota.allreduce_hook, False),
    "fp16": (rota.fp16_compress_hook, True),
    "fused-float32": (rota.fused_hook, False),
    "fused-float16": (rota.fused_hook, True),
}
DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    # Without momentum, which torch's fused step leaves uninitialized if it skips the first.
    "sgd": (torch.optim.SGD, {"lr": 0.125}),
    # With a usual eps, a step along a gradient of 1e-9 is as long as along one of 1.
    "adamw": (torch.optim.AdamW, {"lr": 0.125, "eps": 0.1}),
}
# The backward passes of a step. In a joint one, two forward passes share it.
PASSES = (
    ("sync",),
    ("no_sync", "sync"),
    ("sync", "sync"),
    ("joint",),
    ("no_sync", "no_sync", "joint"),
    ("evaluate", "sync"),
)
# Their last gradients are of one rank. DDP then takes weights for used that the next pass may skip.
UNREDUCED_PASSES = (("no_sync",), ("sync", "no_sync"))


def _halve_in_place(weight: torch.Tensor) -> None:
    weight.grad.mul_(0.5)


def _replace(weight: torch.Tensor) -> None:
    weight.grad = weight.grad * 0.5


def _drop(weight: torch.Tensor) -> None:
    weight.grad = None


EDITS = {"": None, "halve in place": _halve_in_place, "replace": _replace, "drop": _drop}


class Weight(NamedTuple):
    num_elems: int
    dtype: torch.dtype
    is_trained: bool
    num_uses: int  # in several modules, if more than one


class Step(NamedTuple):
    """From zero_grad() to the optimizers' steps."""

    passes: tuple[str, ...]
    skipped: tuple[frozenset[int], ...]  # by rank, the weights that the loss does not use
    inf: tuple[int, int] | None  # a rank, and the weight whose gradient has an Inf there
    set_to_none: bool
    edit: str  # what user code does to the first weight's gradient: a key of EDITS


class Case(NamedTuple):
    """A training."""

    world_size: int
    weights: tuple[Weight, ...]
    steps: tuple[Step, ...]
    ddp: dict[str, Any]  # its options
    checkpoint: str  # how part of the forward pass is run again: "", "plain" or "reentrant"
    hook: str  # a key of HOOKS
    on_gloo: bool  # rota's hook in a DDP over Gloo
    error_feedback: bool
    scaler: str  # "", "torch" or "rota"
    unscales: bool  # by unscale_() before the step
    clip: str  # "", "torch", "rota", or "folded" into the optimizer's step
    optimizer: tuple[str, str]  # a key of OPTIMIZERS, and "fused", "foreach" or ""
    num_optimizers: int

    @property
    def tolerance(self) -> float:
        """0 where both sides must have the same bits: halves are exact, and 1/3 and norms not."""
        if self.world_size == 2 and not self.clip:
            return 0
        is_narrow = HOOKS[self.hook][1] or any(w.dtype.itemsize == 2 for w in self.weights)
        return 2e-2 if is_narrow else 1e-5


# ---- what hypothesis draws

weights = st.builds(
    Weight,
    num_elems=st.sampled_from((3, 1, 0, 64, 700, 2050)),
    dtype=st.sampled_from((*[torch.float32] * 3, torch.float64, torch.bfloat16, torch.float16)),
    is_trained=st.sampled_from((True, True, True, False)),
    num_uses=st.sampled_from((1, 1, 2)),
)


@st.composite
def graphs(
    draw: st.DrawFn, world_size: int, trained: list[int]
) -> tuple[str, dict[str, Any], tuple[Step, ...]]:
    """The kind of checkpoint, options of DDP, and steps that DDP can train with them."""
    checkpoint = draw(st.sampled_from(("", "", "plain", "reentrant")))
    is_reentrant = checkpoint == "reentrant"  # which DDP supports in a static graph only
    kinds_of_unused = ("none", "static", "left out", "dynamic")[: 2 if is_reentrant else 4]
    unused = draw(st.sampled_from(kinds_of_unused))
    # Every loss uses the first three, so that each optimizer keeps a gradient if one is dropped.
    some = st.frozensets(st.sampled_from(trained[3:])) if trained[3:] else st.just(frozenset())
    always_unused = (draw(some) if unused != "none" else frozenset(),) * world_size
    static_graph = is_reentrant or unused == "static" or (unused == "none" and draw(st.booleans()))
    passes = PASSES if unused == "dynamic" else PASSES + UNREDUCED_PASSES
    if is_reentrant:
        passes = tuple(names for names in passes if "joint" not in names)
    step = st.builds(
        Step,
        passes=st.sampled_from(passes),
        skipped=st.tuples(*[some] * world_size) if unused == "dynamic" else st.just(always_unused),
        inf=st.none() | st.tuples(st.integers(0, world_size - 1), st.sampled_from(trained)),
        set_to_none=st.booleans(),
        edit=st.sampled_from(("",) * 4 + tuple(EDITS)),
    )
    steps = draw(st.lists(step, min_size=3, max_size=5))
    if static_graph:  # which DDP learns in the first pass
        steps[0] = steps[0]._replace(passes=("sync",))
    options = {
        "bucket_cap_mb": draw(st.sampled_from((25.0, SMALL_BUCKETS_MB, TINY_BUCKETS_MB))),
        "gradient_as_bucket_view": draw(st.booleans()),
        "broadcast_buffers": draw(st.booleans()),
        "static_graph": static_graph,
        "find_unused_parameters": unused in ("left out", "dynamic"),
        "skip_all_reduce_unused_params": unused == "left out",
        "batched_grad_copy": draw(st.booleans()),
    }
    options = {name: value for name, value in options.items() if name in DDP_OPTIONS}
    return checkpoint, options, tuple(steps)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.sampled_from(WORLD_SIZES))
    hook = draw(st.sampled_from(tuple(HOOKS)))
    has_state = hook.startswith("fused")
    scaler = draw(st.sampled_from(("", "torch", "rota") if has_state else ("", "torch")))
    clip = draw(st.sampled_from(("", "torch", "rota", "folded")))
    always = [Weight(num_elems, torch.float32, True, 1) for num_elems in (3, 5, 1)]
    model = [*always, *draw(st.lists(weights, max_size=6))]
    if scaler:  # torch's refuses float16
        model = [
            weight._replace(dtype=torch.bfloat16) if weight.dtype == torch.float16 else weight
            for weight in model
        ]
    trained = [number for number, weight in enumerate(model) if weight.is_trained]
    checkpoint, ddp, steps = draw(graphs(world_size, trained))
    return Case(
        world_size=world_size,
        weights=tuple(model),
        steps=steps,
        ddp=ddp,
        checkpoint=checkpoint,
        hook=hook,
        on_gloo=hook != "none" and draw(st.booleans()),
        error_feedback=has_state and draw(st.booleans()),
        scaler=scaler,
        unscales=bool(clip) or draw(st.booleans()),
        clip=clip,
        optimizer=(
            draw(st.sampled_from(tuple(OPTIMIZERS))),
            draw(st.sampled_from(("", "foreach", "fused"))),
        ),
        num_optimizers=1 if clip == "folded" else draw(st.sampled_from((1, 2))),
    )


# ---- the training


class Batch(NamedTuple):
    rank: int
    number: int
    skipped: frozenset[int]
    weight_with_inf: int | None

    def gradient(self, number: int, weight: torch.Tensor) -> torch.Tensor:
        """Small integers, of which halves, quarters and sums are exact in every dtype."""
        index = torch.arange(weight.numel())
        values = (index * 3 + index // 7 + self.rank * 5 + self.number * 2 + number) % 7 - 3
        gradient = values.to(weight.dtype)
        if number == self.weight_with_inf and weight.numel() > 0:
            gradient[-1] = math.inf
        return gradient


Term = tuple[int, torch.Tensor, torch.Tensor]  # the number of a weight, it, its gradient


class Model(torch.nn.Module):
    """Its gradients are those that the batch names, once for each use of a weight."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList()
        for number, spec in enumerate(case.weights):
            # DDP starts with rank 0's values.
            values = (torch.arange(spec.num_elems) % 5 + number + rank).to(spec.dtype)
            self.weights.append(torch.nn.Parameter(values, requires_grad=spec.is_trained))
        self.uses = [i for i, spec in enumerate(case.weights) for _ in range(spec.num_uses)]
        self.again = torch.nn.ParameterList(self.weights[number] for number in self.uses)
        self.register_buffer("num_batches", torch.zeros(2))
        self.checkpoint = case.checkpoint

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_batches += batch.rank + 1
        terms = [
            (number, weight, batch.gradient(number, weight))
            for number, weight in zip(self.uses, self.again, strict=True)
            if number not in batch.skipped
        ]
        if not self.checkpoint:
            return self.sum_of(terms, torch.zeros(()))
        rest = checkpoint(
            self.sum_of,
            [term for term in terms if term[0] % 2],
            torch.zeros((), requires_grad=True),  # what reentrant backward passes need
            use_reentrant=self.checkpoint == "reentrant",
        )
        return self.sum_of([term for term in terms if term[0] % 2 == 0], rest)

    @staticmethod
    def sum_of(terms: list[Term], rest: torch.Tensor) -> torch.Tensor:
        for _, weight, gradient in terms:
            rest = rest + (weight * gradient).sum().float()
        return rest


def batches_of(step: Step, rank: int, step_number: int) -> Iterator[tuple[str, list[Batch]]]:
    """The passes of a step with their batches; the first that reduces has the Inf."""
    weight_with_inf = step.inf[1] if step.inf is not None and step.inf[0] == rank else None
    number = 10 * step_number
    for name in step.passes:
        batches = []
        for _ in range(2 if name == "joint" else 1):
            reduces = name in ("sync", "joint")
            inf = weight_with_inf if reduces else None
            weight_with_inf = None if reduces else weight_with_inf
            batches.append(Batch(rank, number, step.skipped[rank], inf))
            number += 1
        yield name, batches


class Training:
    """One side: torch's parts over Gloo, or rota's."""

    def __init__(self, case: Case, rank: int, group: dist.ProcessGroup, is_rota: bool) -> None:
        self.case, self.rank = case, rank
        self.ddp = DistributedDataParallel(Model(case, rank), process_group=group, **case.ddp)
        hook, rounds = HOOKS[case.hook]
        self.state: rota.HookState | None = None
        if is_rota and hook is rota.fused_hook:
            self.state = rota.HookState(
                wire_dtype=torch.float16 if rounds else torch.float32,
                error_feedback=case.error_feedback,
                model=self.ddp,
            )
        if is_rota and hook is not None:
            self.ddp.register_comm_hook(self.state or group, hook)
        elif rounds:
            self.ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)

        self.parameters = [weight for weight in self.ddp.parameters() if weight.requires_grad]
        name, implementation = case.optimizer
        optimizer, options = OPTIMIZERS[name]
        self.optimizers = [
            optimizer(part, **options, **({implementation: True} if implementation else {}))
            for i in range(case.num_optimizers)
            if (part := self.parameters[i :: case.num_optimizers])
        ]
        scaling = {"init_scale": 2.0**6, "growth_interval": 2, "enabled": bool(case.scaler)}
        self.scaler: torch.amp.GradScaler
        self.hook_unscales = is_rota and case.scaler == "rota"
        if self.hook_unscales:
            self.scaler = rota.amp.GradScaler(self.state, **scaling)
        else:
            self.scaler = torch.amp.GradScaler("cpu", **scaling)
        self.clips_with_rota = is_rota and case.clip in ("rota", "folded")

    def step(self, number: int) -> dict[str, Any]:
        """Trains a step and returns what this rank then has, and what was measured, by name."""
        step = self.case.steps[number]
        seen: dict[str, Any] = {}
        self.ddp.zero_grad(set_to_none=step.set_to_none)
        for name, batches in batches_of(step, self.rank, number):
            with self.ddp.no_sync() if name == "no_sync" else contextlib.nullcontext():
                if name == "evaluate":
                    with torch.no_grad():
                        self.ddp(batches[0])
                    continue
                self.scaler.scale(sum(self.ddp(batch) for batch in batches)).backward()
        if step.passes[-1] != "no_sync":  # so that the hook saw the last gradients
            seen |= self.measured()
        if self.case.unscales and self.case.scaler:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        edit = EDITS[step.edit]
        if edit is not None:
            edit(self.parameters[0])
        if self.case.clip:
            seen["norm"] = self.clip()
        if self.case.clip != "folded" and (self.case.unscales or not self.case.scaler):
            for name, weight in self.ddp.module.named_parameters():
                seen[f"gradient of {name}"] = None if weight.grad is None else weight.grad.clone()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        seen["scale"] = self.scaler.get_scale()
        for name, tensor in self.ddp.module.state_dict().items():
            seen[name] = tensor.clone()
        return seen

    def measured(self) -> dict[str, Any]:
        """What a state of fused_hook has measured in the last pass."""
        if not self.case.hook.startswith("fused"):
            return {}
        if self.state is not None:
            norm, found_inf = self.state.grad_norm().item(), self.state.found_inf
        else:
            gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
            squares = [gradient.double().square().sum() for gradient in gradients]
            norm = torch.stack(squares).sum().sqrt().item()
            found_inf = not all(gradient.isfinite().all() for gradient in gradients)
        if not self.hook_unscales and self.case.scaler == "rota":
            norm /= self.scaler.get_scale()
        return {"found_inf": found_inf, "norm before clipping": None if found_inf else norm}

    def clip(self) -> float:
        if not self.clips_with_rota:
            return torch.nn.utils.clip_grad_norm_(self.parameters, 4.0).item()
        folded = self.optimizers[0] if self.case.clip == "folded" else None
        return rota.clip_grad_norm_(self.parameters, 4.0, optimizer=folded).item()


def is_close(value: Any, other: Any, tolerance: float) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        finite = value[value.isfinite()]
        largest = finite.abs().max().item() if finite.numel() > 0 else 0
        limit = tolerance * max(1, largest)
        return torch.allclose(other.double(), value.double(), 0, limit, equal_nan=True)
    if isinstance(value, float) and isinstance(other, float):
        # Norms are rounded in other places.
        return math.isclose(value, other, rel_tol=max(tolerance, 1e-6)) or value != value != other
    return bool(value == other)


def differences(expected: dict[str, Any], got: dict[str, Any], tolerance: float) -> Iterator[str]:
    """A line for each entry that differs by more than the tolerance."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        if not is_close(value, got[name], tolerance):
            yield f"{name}: torch has {value}, rota {got[name]}"


# ---- the ranks


@functools.cache
def groups_of(rank: Rank) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Over Gloo and over rota."""
    warnings.simplefilter("ignore")
    torch.set_printoptions(threshold=20)
    assert dist.group.WORLD is not None
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.group.WORLD, dist.new_group(backend="rota", timeout=timeout)


EXPECTED: list[dict[str, Any]] = []  # by step; of a rank, between the two sides


def train_with_torch(rank: Rank, case: Case) -> str:
    """Returns the error, if any."""
    gloo, _ = groups_of(rank)
    EXPECTED.clear()
    return error_of_training(case, rank.rank, gloo, False, EXPECTED)


def train_with_rota(rank: Rank, case: Case) -> None:
    gloo, over_rota = groups_of(rank)
    got: list[dict[str, Any]] = []
    error = error_of_training(case, rank.rank, gloo if case.on_gloo else over_rota, True, got)
    lines = [
        f"step {number}: {line}"
        for number, (a, b) in enumerate(zip(EXPECTED, got, strict=False))
        for line in differences(a, b, case.tolerance)
    ]
    if lines or error:
        raise AssertionError("\n".join([str(case), *lines, error]))


def error_of_training(
    case: Case, rank: int, group: dist.ProcessGroup, is_rota: bool, steps: list[dict[str, Any]]
) -> str:
    """Trains a side, adds what each step shows to `steps`, and returns the error, if any."""
    try:
        training = Training(case, rank, group, is_rota)
        for number in range(len(case.steps)):
            steps.append(training.step(number))
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, CheckGroup]]:
    limit_s = 120 + NUM_CASES
    with check_groups(*WORLD_SIZES, limit_s=limit_s, backend="gloo", timeout_s=TIMEOUT_S) as made:
        yield made


@given(case=cases())
@settings(
    max_examples=NUM_CASES,
    deadline=None,  # ranks share the cores
    derandomize=NUM_CASES <= USUAL_CASES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_ddp_trains_as_torch_over_gloo(groups: dict[int, CheckGroup], case: Case) -> None:
    group = groups[case.world_size]
    if any(group.run(train_with_torch, case)):
        event("refused by torch")
        group.end()  # which it may have left unusable
    else:
        group.run(train_with_rota, case)
