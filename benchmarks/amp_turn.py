"""The mixed-precision turn as a call to time: a bucket reduced, unscaled, checked for Inf, clipped.

A training step does that between backward and the optimiser's update. A turn leaves the gradient
unchanged, so that turns can follow each other without a refill: all ranks hold the same values, so
the average equals them; where unscale_ and clip_grad_norm_ write the gradient, it is doubled (the
loss scale is 1/2) and then halved (max_norm is half of the norm). Where clipping is left to the
optimiser, the loss scale is 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # imported there, not listed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import error_bound
from error_bound import Wire
from hook_turn import make_bucket
from protocol import Entry, Turn
from tiles import spread

# The parts of a turn; an entry's api is one of these.
TORCH_AMP = "torch hook, torch amp"
ROTA_HOOK_TORCH_AMP = "rota hook, torch amp"
FUSED = "rota fused"
FUSED_UNSCALED = "rota fused, unscaled blocks"
FUSED_IN_PLACE = "rota fused, clipped in place"
HOOK_ALONE = "rota hook alone"
APIS = (TORCH_AMP, ROTA_HOOK_TORCH_AMP, FUSED, FUSED_UNSCALED, FUSED_IN_PLACE, HOOK_ALONE)

# Inputs repeat after this many elements: a prime number of whole blocks, so that a misplaced chunk
# is detected.
PERIOD_ELEMS = 64 * 509
# Error of the float32 arithmetic after the reduction: unscale, clip factor, clip.
ARITHMETIC_ERROR = 2.0**-20


@dataclass(frozen=True)
class Pipeline:
    """One way to do the turn. `run` takes max_norm and returns the norm; None if it does not clip.

    An optimiser divides gradients by its `grad_scale`, if it has one.
    """

    run: Callable[[float], torch.Tensor | None]
    loss_scale: float
    optimizer: torch.optim.Optimizer


def amp_call(
    turn: Turn, rota: Any, group: dist.ProcessGroup | None
) -> tuple[Callable[[], object], int | None]:
    """The turn to time, and the number of wrong elements after a first one on random gradients.
    `group` is of torch's hook."""
    bucket = make_bucket(turn.num_elems)
    gradient = bucket.buffer()
    # If rota warns, it falls back to torch, and torch's time would be reported as rota's.
    warnings.filterwarnings("error", message=r"rota\.")
    pipeline = make_pipeline(turn.entry, rota, group, bucket)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = turn.check_seed or 0

    num_wrong = None
    if turn.check_seed is not None:
        inputs = [random_gradient(peer, seed) for peer in range(world_size)]
        gradient.copy_(spread(inputs[rank], turn.num_elems))
        num_wrong = count_wrong(pipeline, gradient, inputs, bound_of(turn.entry, inputs))

    gradient.copy_(spread(random_gradient(0, seed), turn.num_elems))
    max_norm = float(gradient.double().norm()) / pipeline.loss_scale / 2
    return lambda: pipeline.run(max_norm), num_wrong


def random_gradient(rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(PERIOD_ELEMS, generator=generator)


def make_pipeline(
    entry: Entry, rota: Any, group: dist.ProcessGroup | None, bucket: GradBucket
) -> Pipeline:
    parameters = bucket.parameters()
    optimizer = torch.optim.AdamW(parameters, fused=True)
    if entry.api == HOOK_ALONE:

        def reduce(_max_norm: float) -> None:
            rota.allreduce_hook(None, bucket).wait()

        return Pipeline(reduce, 1.0, optimizer)

    loss = torch.zeros(())
    in_place = entry.api not in (FUSED, FUSED_UNSCALED)
    loss_scale = 0.5 if in_place else 1.0
    # The scale must not grow, because that would change the gradient.
    options: Any = {"init_scale": loss_scale, "growth_interval": 1 << 30}
    if entry.api in (TORCH_AMP, ROTA_HOOK_TORCH_AMP):
        hooks = default_hooks if entry.api == TORCH_AMP else rota
        hook, state = hooks.fp16_compress_hook, group
        scaler: Any = torch.amp.GradScaler("cpu", **options)
        clip: Any = torch.nn.utils.clip_grad_norm_
        clip_options = {}
    else:
        wire_dtype = getattr(torch, str(entry.wire_dtype))
        block_scaling = False if entry.api == FUSED_UNSCALED else None
        hook = rota.fused_hook
        state = rota.HookState(wire_dtype=wire_dtype, block_scaling=block_scaling)
        scaler = rota.amp.GradScaler(state, **options)
        clip = rota.clip_grad_norm_
        clip_options = {} if in_place else {"optimizer": optimizer}

    def run(max_norm: float) -> torch.Tensor:
        scaler.scale(loss)
        hook(state, bucket).wait()
        scaler.unscale_(optimizer)
        norm: torch.Tensor = clip(parameters, max_norm, **clip_options)
        scaler.update()
        return norm

    return Pipeline(run, loss_scale, optimizer)


def count_wrong(
    pipeline: Pipeline,
    gradient: torch.Tensor,
    inputs: list[torch.Tensor],
    bound: torch.Tensor,
) -> int:
    """Runs a first turn on `inputs`, and counts the elements whose error exceeds `bound`, the error
    bound of the average; a wrong norm counts as one more."""
    exact = error_bound.exact_average(inputs) / pipeline.loss_scale
    bound = bound / pipeline.loss_scale + ARITHMETIC_ERROR * exact.abs()
    exact_norm, norm_bound = (
        float(spread(values, gradient.numel()).norm()) for values in (exact, bound)
    )
    max_norm = exact_norm / 2

    norm = pipeline.run(max_norm)
    factor = 1.0  # by which clipping multiplied the result
    num_wrong = 0
    if norm is not None:
        factor = min(1.0, max_norm / (float(norm) + 1e-6))  # as in torch.nn.utils.clip_grad_norm_
        num_wrong += not abs(float(norm) - exact_norm) <= norm_bound
    divisor = float(getattr(pipeline.optimizer, "grad_scale", None) or 1.0)
    for part in gradient.split(PERIOD_ELEMS):
        here = slice(0, part.numel())
        error = (part.double() / divisor / factor - exact[here]).abs()
        num_wrong += int((~(error <= bound[here])).sum())
    return num_wrong


def wire_of(entry: Entry) -> Wire:
    dtype: torch.dtype = getattr(torch, str(entry.wire_dtype))
    return error_bound.rota_wire(dtype, entry.api in (FUSED, FUSED_IN_PLACE))


def bound_of(entry: Entry, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Error bound of the average that the entry's hook computes of `inputs`."""
    if entry.api == TORCH_AMP:
        return error_bound.torch_hook_bound(inputs, wire_of(entry).dtype)
    return error_bound.average_bound(inputs, wire_of(entry))
