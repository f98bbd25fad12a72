"""The expected result of reduce_bucket, in plain numpy by its definition; uses no code of rota.

Elements are float64 here, rounded to float32 after every step that rota does in float32. For a
single sum, product or quotient of float32 numbers, that equals float32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from oracle import Array, reduce_in_order, round_to, to_numpy

WIRE_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
BUCKET_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Blocks(NamedTuple):
    num_elems: int
    top_exponent: int  # the largest magnitude of a block lies in [2**top, 2**(top + 1))


BLOCKS = {
    torch.float16: Blocks(64, 14),
    torch.float8_e4m3fn: Blocks(32, 7),
    torch.float8_e5m2: Blocks(64, 14),
}
# Half the spacing of the format's numbers: relative to the number, and absolute for denormals.
HALF_ULP = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
HALF_SPACING_OF_DENORMALS = {
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
    torch.float8_e4m3fn: 2.0**-10,
    torch.float8_e5m2: 2.0**-17,
}


class Format(NamedTuple):
    dtype: torch.dtype
    block_scaling: bool

    def __str__(self) -> str:
        scaled = "-scaled" if self.block_scaling else ""
        return str(self.dtype).removeprefix("torch.") + scaled


FORMATS = [Format(dtype, False) for dtype in WIRE_DTYPES] + [
    Format(dtype, True) for dtype in BLOCKS
]


def block_exponents(values: Array, wire: Format) -> Array:
    """The exponent of each element's scale; 0 without block scaling."""
    if not wire.block_scaling:
        return np.zeros(len(values), dtype=np.int64)
    blocks = BLOCKS[wire.dtype]
    exponents = []
    for start in range(0, len(values), blocks.num_elems):
        block = np.abs(values[start : start + blocks.num_elems])
        largest = np.max(block[np.isfinite(block)], initial=0.0)
        exponent = 0
        if largest > 0:
            floor_log2 = int(np.frexp(largest)[1]) - 1
            exponent = min(max(floor_log2 - blocks.top_exponent, -125), 127)
        exponents += [exponent] * len(block)
    return np.array(exponents, dtype=np.int64)


def through_wire(values: Array, wire: Format) -> Array:
    """Rounds to the wire format and converts back."""
    if not wire.block_scaling:
        return round_to(values, wire.dtype)
    exponents = block_exponents(values, wire)
    scaled = round_to(np.ldexp(values, -exponents), wire.dtype)
    # float8_e4m3fn has no Inf; in scaled blocks its largest code, unused by finite numbers, is Inf.
    scaled = np.where(np.isinf(values), values, scaled)
    # Near float32's maximum, rounding up may overflow.
    return round_to(np.ldexp(scaled, exponents), torch.float32)


def reduce_bucket(
    inputs: Sequence[torch.Tensor],
    wire: Format,
    *,
    contribution_factor: float = 1.0,
    divisor: float = 1.0,
    result_factor: float = 1.0,
    group_size: int | None = None,
    order: str = "rank",
) -> torch.Tensor:
    """The bucket after the collective, given all ranks' buckets before it."""
    dtype = inputs[0].dtype
    float32 = torch.float32
    with np.errstate(all="ignore"):
        sent = []
        for bucket in inputs:
            gradients = round_to(to_numpy(bucket).ravel(), float32)
            wanted = round_to(gradients * float(np.float32(contribution_factor)), float32)
            sent.append(through_wire(wanted, wire))
        total = reduce_in_order(
            lambda a, b: round_to(a + b, float32), sent, group_size=group_size, order=order
        )
        average = round_to(total / float(np.float32(divisor)), float32)
        rounded = through_wire(average, wire)
        result = round_to(rounded * float(np.float32(result_factor)), float32)
        result = round_to(result, dtype)
    return torch.from_numpy(np.asarray(result)).to(dtype).reshape(inputs[0].shape)


def stats_of(result: torch.Tensor) -> tuple[int, float]:
    """The number of non-finite elements, and the sum of squares."""
    values = to_numpy(result).ravel()
    with np.errstate(all="ignore"):
        return int((~np.isfinite(values)).sum()), float((values * values).sum())


def error_bound(inputs: Sequence[torch.Tensor], wire: Format) -> tuple[Array, Array]:
    """The exact average, and how far the averaged bucket may be from it, per element.

    Each conversion (one per contribution, one of the result) errs by up to half a unit in the last
    place or, below the normal range of its block, half the spacing there. The sum is in float32.
    """
    values = [to_numpy(bucket).ravel() for bucket in inputs]
    exact = np.sum(values, axis=0) / len(values)
    bound = np.zeros(len(exact))
    for contribution in values:
        bound += _conversion_error(contribution, wire) / len(values)
    magnitudes = np.sum(np.abs(values), axis=0) / len(values)
    bound += magnitudes * len(values) * 2.0**-24
    # The converted result already has this error, and so may the largest element of its block.
    bound += _conversion_error(np.abs(exact) + bound, wire)
    return exact, bound


def _conversion_error(values: Array, wire: Format) -> Array:
    relative = np.abs(values) * HALF_ULP[wire.dtype]
    exponents = block_exponents(values, wire)
    return np.maximum(relative, np.ldexp(HALF_SPACING_OF_DENORMALS[wire.dtype], exponents))
