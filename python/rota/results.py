"""The results of a backward pass: which gradients they cover, and whether they are still valid.

DDP calls a hook when a bucket is full, but does not tell it when the backward pass is over and the
results are in the gradients. Autograd's final callbacks do. They run in the order in which they
were queued, and DDP queues its own, which waits for the buckets, after the last bucket's hook. So
the last bucket's hook queues a callback that queues another one: the second runs after DDP's, and
does not run if DDP's raises.

Changing a gradient in place changes its version; replacing it changes its identity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from rota.model_group import ModelGroup


class _Mark(NamedTuple):
    """A gradient's identity and version at the end of its backward pass."""

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
    """What to check of a bucket at the end of the backward pass."""

    parameters: Sequence[torch.Tensor]
    # By position, for gradients that are not views into the bucket. If a version is the same after
    # backward, DDP has not written that gradient, because no rank used the parameter.
    versions: dict[int, int]


class Results:
    """The gradients of a state's last backward pass, valid until the next one begins."""

    def __init__(self, model_group: ModelGroup | None) -> None:
        self._model_group = model_group
        # Whether all gradients of the last backward pass have been written.
        self.is_complete = False
        # The number of complete backward passes so far, which identifies the last one.
        self.generation = 0
        self.loss_scale = 1.0  # by which its gradients were divided
        self._buckets: list[_Bucket] = []  # until it is complete
        # For each bucket, float64: number of non-finite elements, sum of squares.
        self._stats: list[torch.Tensor] = []
        # The sum of all ranks' stats, if the model lies on several ranks.
        self._model_stats: torch.futures.Future[torch.Tensor] | None = None
        self._totals: tuple[bool, float] | None = None  # the totals of the stats, once read
        self._marks: dict[int, _Mark] = {}  # by identity of the parameter
        self._dropped = False  # the stats count something that is in no gradient
        self._norm_factor = 1.0
        self._at_next_backward: list[Callable[[], None]] = []

    # ---- written by the hook

    def begin(self, loss_scale: float) -> None:
        """Call it when the first bucket of a backward pass comes."""
        self.is_complete = False
        self.loss_scale = loss_scale
        self._buckets = []
        self._stats = []
        self._model_stats = None
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
        """Call it before a bucket is reduced, which writes `stats`."""
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
        """Call it after the last bucket: completes the results when the backward pass is over.

        Args:
            sends_without_gradient: a parameter without a gradient may add to the stats.
        """

        def end() -> None:
            self.end(sends_without_gradient)

        if torch._C._current_graph_task_id() == -1:
            end()  # the hook was called by hand, on a saved bucket
            return
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: queue_callback(end))

    def end(self, sends_without_gradient: bool) -> None:
        """Completes the results; call it when the reduced gradients have been written."""
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
        if self._model_group is not None:
            self._model_stats = self._model_group.start(
                self._stats, [parameter for parameter, _ in self.gradients()]
            )
        self.is_complete = True
        self.generation += 1

    def _mark(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        refs = weakref.ref(parameter), weakref.ref(gradient)
        self._marks[id(parameter)] = _Mark(*refs, gradient._version)

    # ---- read by the state, the scaler and clipping, between backward passes

    def _read_stats(self) -> tuple[bool, float]:
        # Reads all stats once and together: with caches cold after a bucket, each torch call costs
        # some 50 us; on a GPU each copy waits for all queued work.
        if self._totals is None:
            stats = [self._model_stats.wait()] if self._model_stats is not None else self._stats
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
        """Over all buckets of the model, rounded once; the same number on every rank."""
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
        """The parameters that the hook saw and that still have a gradient, with their gradients."""
        for mark in self._marks.values():
            parameter = mark.parameter()
            if parameter is not None and parameter.grad is not None:
                yield parameter, parameter.grad

    def is_norm_of(self, parameters: Collection[int]) -> bool:
        """Whether the stats count only gradients of `parameters`, which are given by id()."""
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
        """Call it after multiplying the gradients, or if an optimizer will (not in_place)."""
        self._norm_factor *= factor
        if in_place:
            for parameter, gradient in list(self.gradients()):
                self._mark(parameter, gradient)

    def forget(self) -> None:
        """Call it when the gradients change units, and more will be added to them."""
        self.is_complete = False

    def at_next_backward(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the first bucket of the next backward pass comes."""
        self._at_next_backward.append(callback)
