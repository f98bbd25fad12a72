"""Gradients like those of training, and the comparison of results with the format's bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import error_bound
from arguments import FLOAT32_BYTES
from error_bound import Wire
from gpu.bench import Bench

MANY = 300
# Elements compared with a bound, at the start and at the end of each tensor.
CHECKED_ELEMS = 1 << 18
TILE_ELEMS = 512  # blocks never cross these, counted from a tensor's start

Bound = Callable[[Sequence[Tensor]], Tensor]


def num_many(bench: Bench) -> int:
    """Tensors of a list like a model's."""
    return 20 if bench.is_small else MANY


def shapes(bench: Bench) -> dict[str, int]:
    """The measured lists of gradients: name, and number of tensors."""
    many = num_many(bench)
    return {"1 tensor": 1, f"{many} tensors": many}


def mixed_sizes(num_elems: int, num_tensors: int, is_aligned: bool = False) -> list[int]:
    """Elements of each of `num_tensors` tensors, `num_elems` in all.

    Like a model's: log-uniform over four decades. Every second one is a multiple of 256, or, if
    they are to be aligned, each of 64 elements.
    """
    generator = torch.Generator().manual_seed(1)
    weights = 10 ** (4 * torch.rand(num_tensors, generator=generator, dtype=torch.float64))
    sizes = [max(1, int(num_elems * weight)) for weight in weights / weights.sum()]
    if is_aligned:
        sizes = [max(64, size & ~63) for size in sizes]
    else:
        sizes = [size & ~255 if i % 2 == 0 and size > 256 else size for i, size in enumerate(sizes)]
    largest = max(range(num_tensors), key=sizes.__getitem__)
    sizes[largest] += num_elems - sum(sizes)
    return sizes


def make(
    bench: Bench, num_bytes: int, num_tensors: int, seed: int, is_aligned: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """DDP's bucket, and the gradients that are views of it."""
    flat = bench.random(num_bytes // FLOAT32_BYTES, seed)
    return flat, list(flat.split(mixed_sizes(flat.numel(), num_tensors, is_aligned)))


def one_way(wire: Wire) -> Bound:
    """Error bound of a gradient after pack and unpack with a factor."""

    def bound(contributions: Sequence[Tensor]) -> Tensor:
        magnitude = contributions[0].double().abs()
        rounding = 2 * error_bound.FLOAT32_UNIT * magnitude + error_bound.FLOAT32_TINY
        return error_bound.conversion_bound(magnitude, wire) + rounding

    return bound


def num_wrong(result: Tensor, contributions: Sequence[Tensor], bound: Bound) -> int:
    """Counts wrong elements of `result`: beyond `bound` at both ends, and NaN anywhere."""
    wrong = int(result.isnan().sum())
    last = max(0, result.numel() - CHECKED_ELEMS) // TILE_ELEMS * TILE_ELEMS
    for begin in {0, last}:
        part = slice(begin, begin + CHECKED_ELEMS)
        parts = [contribution[part] for contribution in contributions]
        error = (result[part].double() - error_bound.exact_average(parts)).abs()
        wrong += int((~(error <= bound(parts))).sum())
    return wrong
