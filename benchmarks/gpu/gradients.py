"""Gradients as training has them: sizes of parameters, values to judge a wire format by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import error_bound
from error_bound import Wire
from gpu.frame import Bench

MANY = 300
SHAPES = {"1 tensor": 1, f"{MANY} tensors": MANY}

# Elements of one tensor that are compared with the bound, at its start and at its end.
CHECKED_ELEMS = 1 << 18
TILE_ELEMS = 512  # blocks never cross these, counted from a tensor's start


def mixed_sizes(num_elems: int, num_tensors: int) -> list[int]:
    """Elements of each of `num_tensors` tensors, `num_elems` in all.

    As a model has them: biases of some hundred elements to matrices of millions, log-uniform over
    four decades, whole powers and odd numbers side by side; the same ones in every run.
    """
    generator = torch.Generator().manual_seed(1)
    weights = 10 ** (4 * torch.rand(num_tensors, generator=generator, dtype=torch.float64))
    sizes = [max(1, int(num_elems * weight)) for weight in weights / weights.sum()]
    sizes = [size & ~255 if i % 2 == 0 and size > 256 else size for i, size in enumerate(sizes)]
    largest = max(range(num_tensors), key=sizes.__getitem__)
    sizes[largest] += num_elems - sum(sizes)
    if sizes[largest] < 1:
        raise ValueError(f"{num_elems} elements are too few for {num_tensors} tensors")
    return sizes


def make(bench: Bench, num_elems: int, num_tensors: int, seed: int) -> list[Tensor]:
    """Normal numbers in tensors of their own."""
    sizes = mixed_sizes(num_elems, num_tensors) if num_tensors > 1 else [num_elems]
    return [bench.random(size, seed * 7919 + i) for i, size in enumerate(sizes)]


def poison(bench: Bench, tensors: Sequence[Tensor]) -> None:
    """NaN everywhere, in every wire dtype too, so that what is not written shows."""
    for tensor in tensors:
        value = 255 if tensor.dtype == torch.uint8 else math.nan
        if bench.target.runs_torch_kernels:
            tensor.fill_(value)
        else:
            tensor.copy_(torch.full(tensor.shape, value, dtype=tensor.dtype))


class Snapshot:
    """What gradients were, to compare with and to go back to."""

    def __init__(self, bench: Bench, tensors: Sequence[Tensor]) -> None:
        self._bench = bench
        self._tensors = list(tensors)
        self._saved = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    def restore(self) -> None:
        """Back to what they were."""
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)

    def num_wrong(self, wire: Wire, factor: float = 1.0) -> int:
        """Elements that one conversion to `wire` and the factor cannot explain, among those of a
        piece at the start and one at the end of each tensor; elsewhere those that are NaN."""
        device = self._bench.check_device
        num_wrong = 0
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            num_wrong += int(tensor.to(device).isnan().sum())
            last = max(0, tensor.numel() - CHECKED_ELEMS) // TILE_ELEMS * TILE_ELEMS
            for begin in {0, last}:
                piece = slice(begin, begin + CHECKED_ELEMS)
                before = saved.view(-1)[piece].to(device).double()
                after = tensor.view(-1)[piece].to(device).double() / factor
                bound = error_bound.conversion_bound(before.abs(), wire)
                # The factor's product is rounded to float32.
                bound += error_bound.FLOAT32_UNIT * before.abs() * 2 + error_bound.FLOAT32_TINY
                num_wrong += int((~((after - before).abs() <= bound)).sum())
        return num_wrong

    def stats_wrong(self, stats: Tensor) -> int:
        """1 if `stats` is not what the tensors hold now: no Inf or NaN, and this sum of squares."""
        device = self._bench.check_device
        squares = sum(float(t.to(device).double().square().sum()) for t in self._tensors)
        num_non_finite, sum_of_squares = stats.cpu().tolist()
        return int(num_non_finite != 0 or not math.isclose(sum_of_squares, squares, rel_tol=1e-9))
