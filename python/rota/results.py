"""The results of a backward pass: which gradients they cover, and whether they still hold.

DDP calls a hook when a bucket is full, but tells it nothing when the backward pass is over and the
results are in the gradients. Autograd's final callbacks do: they run in the order in which they
were queued, and DDP queues its own, which waits for the buckets, after the last bucket's hook. So
the last bucket's hook queues a callback that queues another one: the second runs after DDP's, and
not at all if DDP's raises.

A gradient that was changed in place has another version, one that was replaced another identity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch


class _Mark(NamedTuple):
    """A gradient as it was when its backward pass was over."""

    parameter: weakref.ref[torch.Tensor]
    gradient: weakref.ref[torch.Tensor]
    version: int

    def gradient_now(self) -> torch.Tensor | None:
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def is_current(self) -> bool:
        gradient = self.gradient_now()
        return (
            gradient is not None
            and gradient is self.gradient()
            and gradient._version == self.version
        )


class _Bucket(NamedTuple):
    """What to look at when the backward pass is over."""

    parameters: Sequence[torch.Tensor]
    # By position, of gradients that are not views into the bucket: a version that is still the same
    # after backward means that DDP has written nothing there, as no rank used the parameter.
    versions: dict[int, int]


class Results:
    """The gradients of a state's last backward pass, valid until the next one begins."""

    def __init__(self) -> None:
        # Of the last backward pass: complete once DDP has written all gradients.
        self.is_complete = False
        # How many backward passes were complete so far; so it names the last of them.
        self.generation = 0
        self.loss_scale = 1.0  # what its gradients were divided by
        self._buckets: list[_Bucket] = []  # until then
        # Of each bucket, float64: number of non-finite elements, sum of squares.
        self._stats: list[torch.Tensor] = []
        self._totals: tuple[bool, float] | None = None  # what they add up to, once asked for
        self._marks: dict[int, _Mark] = {}  # by identity of the parameter
        self._dropped = False  # something is in the stats that is in no gradient
        self._norm_factor = 1.0
        self._at_next_backward: list[Callable[[], None]] = []

    # ---- written by the hook

    def begin(self, loss_scale: float) -> None:
        """The first bucket of a backward pass has come."""
        self.is_complete = False
        self.loss_scale = loss_scale
        self._buckets = []
        self._stats = []
        self._totals = None
        self._marks = {}
        callbacks, self._at_next_backward = self._at_next_backward, []
        for callback in callbacks:
            callback()

    def add_bucket(
        self,
        parameters: Sequence[torch.Tensor],
        stats: torch.Tensor,
        buffer: torch.Tensor,
        may_have_unused: bool,
    ) -> None:
        """A bucket is about to be reduced; `stats` is written then."""
        versions = {}
        if may_have_unused:
            memory = buffer.untyped_storage().data_ptr()
            for i, parameter in enumerate(parameters):
                gradient = parameter.grad
                if gradient is not None and gradient.untyped_storage().data_ptr() != memory:
                    versions[i] = gradient._version
        self._buckets.append(_Bucket(parameters, versions))
        self._stats.append(stats)

    def end_with_backward(self, sends_without_gradient: bool) -> None:
        """All buckets have come: the results are complete when the backward pass is over.

        Args:
            sends_without_gradient: a parameter without a gradient may add to the stats.
        """

        def end() -> None:
            self._end(sends_without_gradient)

        if torch._C._current_graph_task_id() == -1:
            end()  # called by hand, on a bucket that was kept
            return
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: queue_callback(end))

    def _end(self, sends_without_gradient: bool) -> None:
        self._dropped = False
        self._norm_factor = 1.0
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                gradient = parameter.grad
                if gradient is None:
                    self._dropped |= sends_without_gradient
                elif bucket.versions.get(i) == gradient._version:
                    self._dropped = True
                else:
                    self._mark(parameter, gradient)
        self._buckets = []
        self.is_complete = True
        self.generation += 1

    def _mark(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        refs = weakref.ref(parameter), weakref.ref(gradient)
        self._marks[id(parameter)] = _Mark(*refs, gradient._version)

    # ---- read by the state, the scaler and clipping, between backward passes

    def _read_stats(self) -> tuple[bool, float]:
        # Once, and together: after a bucket has gone through the caches, each torch call costs some
        # 50 us; on a GPU each copy waits for all that is queued.
        if self._totals is None:
            stats = self._stats
            rows = (
                torch.stack(stats).tolist() if len(stats) > 1 else [row.tolist() for row in stats]
            )
            self._totals = any(row[0] for row in rows), math.fsum(row[1] for row in rows)
        return self._totals

    @property
    def found_inf(self) -> bool:
        return self._read_stats()[0]

    @property
    def sum_of_squares(self) -> float:
        """Of all buckets, rounded once; the same number on every rank."""
        return self._read_stats()[1] * self._norm_factor**2

    def saw(self, parameter: torch.Tensor) -> bool:
        """Whether the hook's result was written to the parameter's gradient."""
        mark = self._marks.get(id(parameter))
        return self.is_complete and mark is not None and mark.parameter() is parameter

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether the hook's result is in the parameter's gradient, and unchanged."""
        mark = self._marks.get(id(parameter))
        return self.is_complete and mark is not None and mark.is_current()

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that the hook saw and that still have a gradient, each with it."""
        for mark in self._marks.values():
            parameter = mark.parameter()
            if parameter is not None and parameter.grad is not None:
                yield parameter, parameter.grad

    def is_norm_of(self, parameters: Collection[int]) -> bool:
        """Whether all that was summed is in gradients of `parameters`, given by identity."""
        return (
            self.is_complete
            and not self._dropped
            and all(
                identity in parameters or mark.gradient_now() is None
                for identity, mark in self._marks.items()
            )
        )

    # ---- what the scaler and clipping do to the gradients

    def scaled_by(self, factor: float, in_place: bool) -> None:
        """The gradients have been multiplied, or (not in_place) an optimizer will do it."""
        self._norm_factor *= factor
        if in_place:
            for parameter, gradient in list(self.gradients()):
                self._mark(parameter, gradient)

    def forget(self) -> None:
        """The gradients are in other units now, and more will be added to them."""
        self.is_complete = False

    def at_next_backward(self, callback: Callable[[], None]) -> None:
        """Calls back once, when the first bucket of the next backward pass comes."""
        self._at_next_backward.append(callback)
