"""torch's own DDP hooks on rota: the gradients and parameters that they give on Gloo.

Two ranks, so sums are equal whatever their order. Hooks whose callbacks make calls (PowerSGD) have
one bucket: with several, torch orders a callback's calls in no way among those of the next bucket,
on any backend whose work ends in another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel

from ranks import Rank, error_of, on_ranks

NUM_STEPS = 6
LEARNING_RATE = 0.05
Hook: TypeAlias = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
Registered: TypeAlias = tuple[Any, Hook]
Group: TypeAlias = dist.ProcessGroup


def power_sgd(hook: Hook, wrap: Callable[[Hook], Hook] = lambda hook: hook) -> Any:
    def make(group: Group, _: DistributedDataParallel) -> Registered:
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        return state, wrap(hook)

    return make


def post_local_sgd(group: Group, _: DistributedDataParallel) -> Registered:
    state = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2)
    return state, post_localSGD_hook.post_localSGD_hook


def plain(hook: Hook) -> Any:
    return lambda group, _: (group, hook)


def bf16(wrapped: Hook) -> Hook:
    """DDP refuses torch's name of it without NCCL."""
    hook = default_hooks.bf16_compress_wrapper(wrapped)
    return lambda state, bucket: hook(state, bucket)


def optimizer_overlap(group: Group, model: DistributedDataParallel) -> Registered:
    optimizer = _FunctionalSGD([], lr=LEARNING_RATE, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(optimizer, model.parameters())
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    return group, hook


# Whether it may have several buckets, and what registers it.
HOOKS: dict[str, tuple[bool, Any]] = {
    "powerSGD": (False, power_sgd(powerSGD_hook.powerSGD_hook)),
    "fp16-powerSGD": (
        False,
        power_sgd(powerSGD_hook.powerSGD_hook, default_hooks.fp16_compress_wrapper),
    ),
    "bf16-powerSGD": (False, power_sgd(powerSGD_hook.powerSGD_hook, bf16)),
    "post_localSGD": (True, post_local_sgd),
    "fp16-allreduce": (
        True,
        plain(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ),
    "bf16-allreduce": (True, plain(bf16(default_hooks.allreduce_hook))),
    "optimizer_overlap": (True, optimizer_overlap),
}


# torch 2.13's fail on Gloo: batched PowerSGD in its own orthogonalisation, on any backend; the
# others look for NCCL's form of an all-gather's future.
FAILING = {
    "batched_powerSGD": (False, power_sgd(powerSGD_hook.batched_powerSGD_hook)),
    "quantization_pertensor": (False, plain(quantization_hooks.quantization_pertensor_hook)),
    "quantization_perchannel": (False, plain(quantization_hooks.quantization_perchannel_hook)),
}


def make_model(group: Group, has_several_buckets: bool) -> DistributedDataParallel:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(48, 48) for _ in range(4)]
    return DistributedDataParallel(
        torch.nn.Sequential(*layers),
        process_group=group,
        bucket_cap_mb=0.01 if has_several_buckets else 25,
    )


def train(
    model: DistributedDataParallel,
    rank: Rank,
    optimizer: torch.optim.Optimizer | None,
    first_step: int = 0,
) -> list[torch.Tensor]:
    """Every step's gradients, and the parameters at the end.

    Args:
        optimizer: makes its steps from `first_step` on; none: the hook does.
    """
    values = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank.rank)
        model.zero_grad()
        model(torch.randn(8, 48, generator=generator)).square().mean().backward()
        values += [parameter.grad.clone() for parameter in model.parameters()]
        if optimizer is not None and step >= first_step:
            optimizer.step()
    return values + [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", [*HOOKS, *FAILING])
@on_ranks(2)
def test_hook_of_torch_gives_what_it_gives_on_gloo(rank: Rank, name: str) -> None:
    has_several_buckets, register = (HOOKS | FAILING)[name]
    rank.init()
    results: list[list[torch.Tensor]] = []
    errors = []
    for backend in ("gloo", "rota"):
        group = dist.new_group(backend=backend)
        model = make_model(group, has_several_buckets)
        model.register_comm_hook(*register(group, model))
        overlaps = name == "optimizer_overlap"
        optimizer = None if overlaps else torch.optim.SGD(model.parameters(), LEARNING_RATE)
        step = functools.partial(train, model, rank, optimizer)
        errors.append(error_of(lambda step=step: results.append(step())))
        dist.barrier()
    if name in FAILING and errors[0][0] != "nothing":
        # Stacks below the first line depend on the thread that runs the callback.
        assert len({(kind, text.partition("\n")[0]) for kind, text in errors}) == 1, errors
        return
    assert [error for error, _ in errors] == ["nothing"] * 2, errors
    are_equal = [torch.equal(*pair) for pair in zip(*results, strict=True)]
    assert all(are_equal), are_equal


@pytest.mark.parametrize("interleaved", [False, True], ids=["step", "interleaved"])
@on_ranks(2)
def test_overlapping_zero_gives_the_parameters_of_zero(rank: Rank, interleaved: bool) -> None:
    """Its first two steps only look at the buckets, so the model without overlap skips them."""
    rank.init()
    group = dist.group.WORLD
    hook = default_hooks.allreduce_hook
    without, overlapping = (make_model(group, not interleaved) for _ in range(2))

    def zero(model: DistributedDataParallel, overlap: bool) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            process_group=group,
            overlap_with_ddp=overlap,
            lr=LEARNING_RATE,
        )

    wrap = ddp_zero_hook.hook_with_zero_step
    if interleaved:
        wrap = ddp_zero_hook.hook_with_zero_step_interleaved
    overlapping.register_comm_hook(group, wrap(hook, overlapping, zero(overlapping, True)))
    train(overlapping, rank, None)
    without.register_comm_hook(group, hook)
    train(without, rank, zero(without, False), first_step=2)
    pairs = zip(without.parameters(), overlapping.parameters(), strict=True)
    are_equal = [torch.equal(one, other) for one, other in pairs]
    assert all(are_equal), are_equal
