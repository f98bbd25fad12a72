"""How many micro-batches of a step each rank computes, and the mean of their gradients.

Knows nothing of models and data; examples/uneven.py trains with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import rota

SMOOTHING = 0.5  # the weight of the newest measurement

# ---------------------------------------------------------------------------------------------
# Who computes how much


def split_by_speed(speeds: Sequence[float], num_micro_batches: int) -> list[int]:
    """Splits a step so that the slowest rank's time is the least that whole micro-batches allow.

    Every rank gets one, so that its speed stays known. Each of the others goes to the rank that
    would be done with it first: D'Hondt's method, which minimises max(micro-batches / speed).

    Args:
        speeds: micro-batches per second, by rank.
        num_micro_batches: of a step, at least one per rank.

    Returns:
        The number of micro-batches of each rank; equal speeds are served in ascending rank.

    Raises:
        ValueError: there are fewer micro-batches than ranks, or a speed is not a positive number.
    """
    if num_micro_batches < len(speeds):
        raise ValueError(
            f"a step has {num_micro_batches} micro-batches for {len(speeds)} ranks, expected at "
            f"least one per rank"
        )
    for rank, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise ValueError(f"the speed of rank {rank} is {speed}, expected a positive number")
    split = [1] * len(speeds)
    for _ in range(num_micro_batches - len(speeds)):
        split[max(range(len(speeds)), key=lambda rank: speeds[rank] / (split[rank] + 1))] += 1
    return split


class Speed:
    """Micro-batches per second of this rank, smoothed."""

    def __init__(self) -> None:
        self._num_micro_batches = 0  # since the last agreement, as are the seconds
        self._seconds = 0.0
        self._smoothed = 0.0  # 0: not measured

    def add(self, num_micro_batches: int, seconds: float) -> None:
        self._num_micro_batches += num_micro_batches
        self._seconds += seconds

    def agree_on_split(self, comm: rota.Communicator, num_micro_batches: int) -> list[int]:
        """The split by the speeds of all ranks. A collective call: 8 bytes from each rank."""
        newest = self._num_micro_batches / self._seconds
        weight = SMOOTHING if self._smoothed > 0 else 1.0
        self._smoothed += weight * (newest - self._smoothed)
        self._num_micro_batches, self._seconds = 0, 0.0
        speeds = torch.empty(comm.world_size, dtype=torch.float64)
        comm.all_gather(speeds, torch.tensor([self._smoothed], dtype=torch.float64))
        return split_by_speed(speeds.tolist(), num_micro_batches)


# ---------------------------------------------------------------------------------------------
# The mean of a step's gradients


class Subtree(NamedTuple):
    """A complete subtree: num_leaves is a power of two that divides the first leaf's number."""

    first: int
    num_leaves: int


def subtrees(begin: int, end: int) -> list[Subtree]:
    """The fewest subtrees that cover the leaves in [begin, end), in order."""
    nodes = []
    while begin < end:
        largest = 1 << ((end - begin).bit_length() - 1)  # that fits
        aligned = begin & -begin or largest  # the lowest bit that is set
        nodes.append(Subtree(begin, min(largest, aligned)))
        begin += nodes[-1].num_leaves
    return nodes


def push(stack: list[tuple[Subtree, Tensor]], subtree: Subtree, total: Tensor) -> None:
    """Puts a subtree's sum on the stack, and adds up siblings in place, right into left.

    Pushing the subtrees() of a range in order, or all of its leaves, leaves its subtrees().
    """
    stack.append((subtree, total))
    while len(stack) > 1:
        (left, left_sum), (right, right_sum) = stack[-2:]
        num_leaves = 2 * left.num_leaves
        if left.num_leaves != right.num_leaves or left.first % num_leaves != 0:
            return
        left_sum += right_sum
        stack[-2:] = [(Subtree(left.first, num_leaves), left_sum)]


class TreeMean:
    """The mean of the gradients of a step's micro-batches, added in one balanced binary tree.

    The tree is that of rota.LogicalShards, whose ranks hold one aligned block each. Here a rank
    holds any range of leaves. It adds them as far as the tree goes, which leaves at most
    2 * log2(num_micro_batches) subtrees, and sends the r-th slice of each sum to rank r. Rank r
    finishes the tree for its slice, and an all_gather returns the slices. So no order depends on
    the split.

    The cost on N ranks, for gradients of G bytes and k subtrees of a rank: it sends (N - 1) / N * G
    bytes k + 1 times, where a ring all-reduce does so twice. The sums need up to
    2 * log2(num_micro_batches) + 1 times G bytes of memory.

    Args:
        model: all parameters get a gradient in each micro-batch, in float32 on the CPU.
        num_micro_batches: of a step, a power of two.
        comm: of the ranks that share the step.
    """

    def __init__(self, model: nn.Module, num_micro_batches: int, comm: rota.Communicator) -> None:
        self._parameters = list(model.parameters())
        self._num_elems = sum(parameter.numel() for parameter in self._parameters)
        self._num_micro_batches = num_micro_batches
        self._comm = comm
        slice_elems = -(-self._num_elems // comm.world_size)
        # A row for each place of the stack, cut into slices. The padding stays zero.
        num_rows = 2 * num_micro_batches.bit_length() - 1
        self._rows = torch.zeros(num_rows, comm.world_size, slice_elems)
        self._stack: list[tuple[Subtree, Tensor]] = []

    def add(self, micro_batch: int) -> None:
        """Takes the gradients of this rank's next micro-batch from the parameters."""
        row = self._rows[len(self._stack)].view(-1)
        torch.cat(gradients_of(self._parameters), out=row[: self._num_elems])
        push(self._stack, Subtree(micro_batch, 1), row)

    def reduce(self, split: Sequence[int]) -> None:
        """Sets every parameter's gradient to the mean; ends the step. A collective call."""
        bounds = itertools.pairwise([0, *itertools.accumulate(split)])
        of_ranks = [subtrees(begin, end) for begin, end in bounds]
        slice_elems = self._rows.shape[-1]
        sums = self._rows[: len(self._stack)].transpose(0, 1)  # (ranks, subtrees, slice)
        received = torch.empty(sum(map(len, of_ranks)), slice_elems)
        self._comm.all_to_all(
            received,
            sums,
            output_splits=[len(nodes) * slice_elems for nodes in of_ranks],
            input_splits=[len(self._stack) * slice_elems] * len(split),
        )
        self._stack.clear()
        whole: list[tuple[Subtree, Tensor]] = []
        for node, total in zip(itertools.chain(*of_ranks), received, strict=True):
            push(whole, node, total)
        ((_, total),) = whole
        mean = torch.empty(len(split) * slice_elems)
        self._comm.all_gather(mean, total.div_(self._num_micro_batches))
        set_gradients(self._parameters, mean[: self._num_elems])


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Takes the gradients away from the parameters, flat."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad.flatten())
        parameter.grad = None
    return gradients


def set_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
