"""Error bounds of averaged gradients, per element.

A conversion to a wire dtype rounds to nearest. It errs by at most u·|x|, where u is half of the
dtype's eps, or, if |x|/scale is below the dtype's smallest normal number, by half of the spacing
there, u·smallest_normal·scale; so by at most u·max(|x|, smallest_normal·scale). `scale` is the
power of two by which a scaled block was divided, else 1. rota converts every contribution once and
the average once, and computes in float32 in between. torch's 16-bit hooks round at every addition.

This file depends on formats only, not on how a reduction works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT32_UNIT = torch.finfo(torch.float32).eps / 2
FLOAT32_TINY = 2.0**-149  # the smallest denormal
# Exponents that a block's scale may have.
MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT = -125, 127


@dataclass(frozen=True)
class Wire:
    """A wire format: a float dtype, with scaled blocks of `block_elems` unless that is None."""

    dtype: torch.dtype
    block_elems: int | None = None

    @property
    def unit(self) -> float:
        """The relative error of rounding a normal number once."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def elem_bytes(self) -> float:
        """Bytes of an element, with its share of a block's scale."""
        return self.dtype.itemsize + (1 / self.block_elems if self.block_elems else 0.0)

    @property
    def top_exponent(self) -> int:
        """A block is scaled so that its largest magnitude lies in [2**top, 2**(top + 1)), so that
        rounding up cannot exceed the dtype's largest number."""
        return math.frexp(torch.finfo(self.dtype).max)[1] - 2


def rota_wire(dtype: torch.dtype, block_scaling: bool) -> Wire:
    """The wire format for these arguments of rota.HookState; wide dtypes are never scaled."""
    if not block_scaling or dtype in (torch.float32, torch.bfloat16):
        return Wire(dtype)
    from rota._C import block_elems  # here, so that only ranks that measure rota load it

    return Wire(dtype, block_elems(dtype))


def exact_average(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The average per element in float64, exact to a relative error of 2**-53."""
    return torch.stack([x.double() for x in contributions]).sum(dim=0) / len(contributions)


def average_bound(contributions: Sequence[torch.Tensor], wire: Wire) -> torch.Tensor:
    """Bound of the distance of rota's average from `exact_average`, per element, in float64.

    The converted result already has an error, so its conversion is bounded at the largest magnitude
    that it can have. Additions, division and factors in float32 add their own errors.

    Args:
        contributions: by rank, 1-D float32, starting at the start of the bucket or of a block.

    Returns:
        inf where there is no bound: where the exact average is not finite, or, without block
        scaling, a value is beyond the wire dtype's range.
    """
    world_size = len(contributions)
    average = exact_average(contributions).abs()
    magnitudes = torch.zeros_like(average)  # mean magnitude of the contributions, errors included
    error = torch.zeros_like(average)
    for contribution in contributions:
        magnitude = contribution.double().abs()
        rounding = conversion_bound(magnitude, wire)
        error += rounding / world_size
        magnitudes += (magnitude + rounding) / world_size
    error += (world_size + 2) * FLOAT32_UNIT * magnitudes + FLOAT32_TINY
    error += conversion_bound(average + error, wire)
    return torch.where(average.isfinite(), error, math.inf)


def conversion_bound(magnitudes: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Error bound of one conversion of values of these `magnitudes` (1-D, float64)."""
    info = torch.finfo(wire.dtype)
    scales = block_scales(magnitudes, wire)
    bound = wire.unit * magnitudes.clamp(min=info.smallest_normal * scales)
    if wire.block_elems is None:
        bound[magnitudes > info.max] = math.inf
    return bound


def block_scales(magnitudes: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The power of two by which each element is divided before rounding, in float64."""
    if wire.block_elems is None:
        return torch.ones_like(magnitudes)
    num_elems = magnitudes.numel()
    finite = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    padding = -num_elems % wire.block_elems
    blocks = torch.nn.functional.pad(finite, (0, padding)).view(-1, wire.block_elems)
    largest = blocks.amax(dim=1)
    exponents = torch.frexp(largest).exponent - 1 - wire.top_exponent
    exponents = exponents.clamp(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
    exponents = torch.where(largest == 0, 0, exponents)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    return scales.repeat_interleave(wire.block_elems)[:num_elems]


def torch_hook_bound(contributions: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Like average_bound, for torch's hook of that dtype, which divides each contribution after
    casting it and rounds every partial sum, so that errors grow with the number of ranks."""
    info = torch.finfo(dtype)
    mean = torch.stack([x.double().abs() for x in contributions]).mean(dim=0)
    return (len(contributions) + 1) * info.eps / 2 * (mean + info.smallest_normal)
