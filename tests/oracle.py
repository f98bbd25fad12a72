"""All-reduce by DESIGN.md section 3, in plain numpy; uses no code of rota."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Array = Any  # numpy's precise types are long and would add little

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
DTYPES = FLOAT_DTYPES + INTEGER_DTYPES
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # too coarse for exact_inputs
ALGORITHMS = ("one_shot", "two_shot", "ordered_ring", "ring", "auto")
# These sum in ascending rank, so all give the same bits.
CANONICAL_ALGORITHMS = ("one_shot", "two_shot", "ordered_ring", "auto")


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The ops defined for a dtype."""
    averages = () if dtype == torch.bool else ("avg",)
    bits = () if dtype.is_floating_point else ("band", "bor", "bxor")
    return ("sum", "product", "min", "max", *averages, *bits)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Format(NamedTuple):
    precision: int  # significant bits, the hidden one included
    min_exponent: int  # of the smallest normal number, as in 1.x * 2**min_exponent
    max_finite: float
    overflow: float = np.inf  # larger values become this


_FORMATS = {
    torch.float8_e4m3fn: _Format(4, -6, 448.0, np.nan),
    torch.float8_e5m2: _Format(3, -14, 57344.0),
    torch.float16: _Format(11, -14, 65504.0),
    torch.bfloat16: _Format(8, -126, (2 - 2.0**-7) * 2.0**127),
    torch.float32: _Format(24, -126, (2 - 2.0**-23) * 2.0**127),
}


def round_to(values: Array, dtype: torch.dtype) -> Array:
    """float64 values rounded once to a dtype, to nearest, ties to even; still float64."""
    values = np.asarray(values, dtype=np.float64)
    if dtype == torch.float64:
        return values
    form = _FORMATS[dtype]
    with np.errstate(all="ignore"):
        exponent = np.frexp(values)[1] - 1
        # Spacing of representable numbers here; constant below min_exponent.
        unit = np.ldexp(1.0, np.maximum(exponent, form.min_exponent) - (form.precision - 1))
        rounded = np.where(np.isfinite(values), np.rint(values / unit) * unit, values)
        overflow = np.copysign(form.overflow, values)
        return np.where(np.abs(rounded) > form.max_finite, overflow, rounded)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Floating tensors as float64, which is exact; others in their own dtype."""
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": lambda a, b: np.where((a < b) | np.isnan(a), a, b),
    "max": lambda a, b: np.where((a > b) | np.isnan(a), a, b),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def exact(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The result in float64 or integers, for inputs that need no rounding except the last."""
    dtype = inputs[0].dtype
    if not dtype.is_floating_point:
        return _reduce_integers(inputs, op)
    total = functools.reduce(OPS[op], [to_numpy(tensor) for tensor in inputs])
    return to_tensor(round_to(total / len(inputs) if op == "avg" else total, dtype), dtype)


def reduce_in_order(
    add: Callable[[Array, Array], Array],
    values: Sequence[Array],
    *,
    group_size: int | None,
    order: str,
) -> Array:
    """The sum of the ranks' values. group_size, order: as in contract."""
    if order == "tree":
        if len(values) == 1:
            return values[0]
        half = (len(values) + 1) // 2
        halves = [
            reduce_in_order(add, part, group_size=None, order=order)
            for part in (values[:half], values[half:])
        ]
        return add(*halves)
    group_size = group_size or len(values)
    groups = [values[i : i + group_size] for i in range(0, len(values), group_size)]
    return functools.reduce(add, [functools.reduce(add, group) for group in groups])


def contract(
    inputs: Sequence[torch.Tensor],
    op: str,
    wire_dtype: torch.dtype | None = None,
    hop_dtype: torch.dtype | None = None,
    first_rank: int = 0,
    group_size: int | None = None,
    order: str = "rank",
) -> torch.Tensor:
    """The result by the numeric contract: contributions are rounded once, summed in the accumulate
    dtype, and the sum is rounded once.

    Args:
        inputs: by rank, all of one shape and dtype.
        op: as for all_reduce.
        wire_dtype: None means the tensors' own.
        hop_dtype: partial sums are rounded to it at each hop; None means the accumulate dtype.
        first_rank: the rank whose contribution comes first in the sum; not 0 in a ring only.
        group_size: ranks per group; groups are summed first, then their sums. None: one group.
        order: "rank" adds in ascending rank, "tree" in a balanced binary tree.
    """
    dtype = inputs[0].dtype
    inputs = [*inputs[first_rank:], *inputs[:first_rank]]
    if not dtype.is_floating_point:
        return _reduce_integers(inputs, op)
    wire = wire_dtype or dtype
    accumulate = np.float64 if wire == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        values = [to_numpy(tensor) for tensor in inputs]
        if wire != dtype:
            values = [round_to(contribution, wire) for contribution in values]
        values = [contribution.astype(accumulate) for contribution in values]

        def add(total: Array, other: Array) -> Array:
            if hop_dtype is not None:
                total = round_to(total, hop_dtype).astype(accumulate)
            return OPS[op](total, other)

        total = reduce_in_order(add, values, group_size=group_size, order=order)
        if op == "avg":
            total = total / accumulate(len(inputs))
        return to_tensor(round_to(round_to(total, wire), dtype), dtype)


def _reduce_integers(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Wraps like two's complement, averages too, before they are divided and truncated; for bools,
    a sum is "any" and a product is "all"."""
    if inputs[0].dtype == torch.bool:
        op = {"sum": "bor", "product": "band", "min": "band", "max": "bor"}.get(op, op)
    total = functools.reduce(OPS[op], [to_numpy(t) for t in inputs])
    if op == "avg":
        total = (total - np.fmod(total, len(inputs))) // len(inputs)
    return torch.from_numpy(total)


def to_tensor(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """Converts float64 values, which the dtype must represent exactly, to a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bit pattern of each element, as integers."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def assert_same(actual: torch.Tensor, expected: torch.Tensor, case: str) -> None:
    """Asserts equal bits in every element; all NaNs are equal, as payloads are unspecified."""
    same = bits_of(actual) == bits_of(expected)
    if actual.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    if same.all():
        return
    wrong = (~same).nonzero().flatten()
    first = int(wrong[0])
    raise AssertionError(
        f"{case}: {wrong.numel()} of {actual.numel()} elements are wrong, the first is [{first}]: "
        f"got {actual.flatten()[first].item()!r}, expected {expected.flatten()[first].item()!r}"
    )


def exact_inputs(
    world_size: int, num_elems: int, dtype: torch.dtype, op: str = "sum"
) -> list[torch.Tensor]:
    """By rank: values whose sums are exact in every dtype; for a product, powers of two.

    Neighbouring ranks and elements differ, so that a lost, doubled or misplaced contribution is
    detected.
    """
    index = np.arange(num_elems)
    inputs = []
    for rank in range(world_size):
        digits = (index * 7 + rank * 5 + index // 13) % 11
        if dtype == torch.bool:
            values = digits % 3 != 0
        elif op == "product" and dtype.is_floating_point:
            values = np.exp2(digits % 3 - 1) * np.where(digits % 2 == 0, 1, -1)
        else:
            values = digits - 5 if dtype.is_signed else digits
        inputs.append(torch.from_numpy(values).to(dtype))
    return inputs


def random_inputs(world_size: int, num_elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank: values over a wide range of magnitudes, the same in every process.

    Integers span their dtype, so that sums wrap.
    """
    inputs = []
    for rank in range(world_size):
        generator = np.random.default_rng([rank, num_elems])
        if dtype.is_floating_point:
            values = generator.standard_normal(num_elems)
            values *= np.exp2(generator.integers(-6, 7, num_elems))
            inputs.append(to_tensor(round_to(values, dtype), dtype))
        elif dtype == torch.bool:
            inputs.append(torch.from_numpy(generator.integers(0, 2, num_elems) == 1))
        else:
            info = torch.iinfo(dtype)
            values = generator.integers(info.min, info.max, num_elems, np.int64, endpoint=True)
            inputs.append(torch.from_numpy(values).to(dtype))
    return inputs


def random_patterns(world_size: int, num_elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank: uniformly random bit patterns, including NaN, Inf and denormals."""
    inputs = []
    for rank in range(world_size):
        generator = np.random.default_rng([rank, num_elems, 1])
        # One extra element, because torch cannot view zero bytes as another dtype.
        num_patterns = 2 if dtype == torch.bool else 256
        pattern = generator.integers(0, num_patterns, (num_elems + 1) * dtype.itemsize, np.uint8)
        inputs.append(torch.from_numpy(pattern).view(dtype)[:num_elems])
    return inputs


def special_values(world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank: every combination of zeros, denormals, extremes, infinities and NaN."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    values = [0.0, -0.0, 1.0, tiny, tiny / 2, tiny * info.eps, -tiny * info.eps]
    values += [info.max, info.min, torch.nan]
    values += [torch.inf, -torch.inf] if dtype != torch.float8_e4m3fn else []
    grids = np.meshgrid(*[np.array(values)] * world_size, indexing="ij")
    return [to_tensor(grid.ravel(), dtype) for grid in grids]


def rounding_traps(world_size: int, wire_dtype: torch.dtype) -> list[torch.Tensor]:
    """By rank: float64 values at, just above and just below midpoints of two wire values.

    Rounding them to float32 first moves them onto the midpoint, which then rounds to even.
    """
    form = _FORMATS[wire_dtype]
    inputs = []
    for rank in range(world_size):
        generator = np.random.default_rng(rank)
        steps = generator.integers(2 ** (form.precision - 1), 2**form.precision, 300) + 0.5
        middle = np.ldexp(steps, generator.integers(-20, 1, steps.size))
        nearby = [middle, middle * (1 + 2.0**-45), middle * (1 - 2.0**-45)]
        inputs.append(torch.from_numpy(np.concatenate([*nearby, *(-x for x in nearby)])))
    return inputs
