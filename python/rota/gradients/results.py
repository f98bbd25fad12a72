"""The results of a backward pass: which gradients they cover, and whether they are still valid.

DDP calls a hook when a bucket is full, but does not tell it which backward pass the bucket is of,
nor when that is over and the results are in the gradients. A bucket's index does not tell either:
in the first pass of a static graph all have 0, and DDP may leave out the first and the last bucket.
So a reduction begins with a parameter that the last one has had, or after the end of the graph task
that the last one's buckets came in. Reentrant checkpoints run a part of the pass in a graph task of
its own, inside a node of another. A task that dies without having run its final callbacks belongs
to a pass that has failed.

Final callbacks run in the order in which they were queued, and DDP queues its own, which waits for
the buckets, after the last bucket's hook. So a hook queues a callback that queues another one: the
second runs after DDP's, and does not run if DDP's raises.

Changing a gradient in place changes its version; replacing it changes its identity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import torch

from rota import _torch
from rota.gradients.model_group import ModelGroup


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
            and _torch.version_of(gradient) == self.version
        )


class _Reduced(NamedTuple):
    """What to check of a bucket at the end of the backward pass."""

    parameters: Sequence[weakref.ref[torch.Tensor]]
    # By position, for gradients that are not views into the bucket. If a version is the same after
    # backward, DDP has not written that gradient, because no rank used the parameter.
    versions: dict[int, int]


class Outcome:
    """What became of the results of one reduction; decides what error feedback owes afterwards.

    A result counts as used if it was written to a gradient and was finite, unless somebody knows
    better: a GradScaler decides by optimizer.
    """

    def __init__(self, found_inf: Callable[[], bool | torch.Tensor]) -> None:
        """found_inf: whether the step is to be skipped; a tensor if that would wait for a GPU."""
        self._found_inf = found_inf
        # Whether all results have been written: not if the backward pass has failed.
        self.is_over = False
        self.goes_on = False  # the gradients will be added to and reduced again
        self._unwritten: set[int] = set()  # parameters, by id()
        self._told: dict[int, bool] = {}

    def end(self, unwritten: set[int]) -> None:
        self.is_over = True
        self._unwritten = unwritten

    def tell(self, parameters: Iterable[torch.Tensor], was_used: bool) -> None:
        """Call it when an optimizer has applied the results of its parameters, or will not; the
        first verdict holds."""
        for parameter in parameters:
            self._told.setdefault(id(parameter), was_used)

    def drop(self) -> None:
        """Call it if no result will be used."""
        self.is_over = False

    def freeze(self) -> None:
        """Call it before the next reduction, which overwrites what has been found."""
        if self.is_over:
            found = self._found_inf()
            self._found_inf = lambda: found

    def was_used(self, parameters: Iterable[int]) -> list[bool | torch.Tensor | None]:
        """Whether the results of parameters, which are given by id(), were used; None where it is
        still open, a tensor of one bool if only a GPU knows."""
        if not self.is_over:
            return [False for _ in parameters]
        default: bool | torch.Tensor | None = None
        if not self.goes_on:
            found = self._found_inf()
            default = ~found if isinstance(found, torch.Tensor) else not found
        return [
            False if parameter in self._unwritten else self._told.get(parameter, default)
            for parameter in parameters
        ]

    @property
    def was_dropped(self) -> bool:
        """Whether no result was used, so that the reduction might not have been."""
        if self.is_over and not any(self._told.values()) and not self.goes_on:
            found = self._found_inf()
            return bool(self._told) or (not isinstance(found, torch.Tensor) and found)
        return not self.is_over


class Results:
    """The gradients of a state's last backward pass, valid until the next one begins."""

    def __init__(self, model_group: ModelGroup | None) -> None:
        self._model_group = model_group
        # Instead of the buckets' stats: found_inf and the sum of squares.
        self.measure: Callable[[], tuple[bool, float]] | None = None
        # The number of complete backward passes so far, which identifies the last one.
        self.generation = 0
        self._dropped = False  # the stats count something that is in no gradient
        self._norm_factor = 1.0
        self._check_results: Callable[[], None] = lambda: None  # of the last bucket's communicator
        self._at_next_backward: list[Callable[[], None]] = []
        self._clear(loss_scale=1.0)
        self._is_closed = True  # it gets no more buckets

    def _clear(self, loss_scale: float) -> None:
        # Whether all gradients of the last backward pass have been written.
        self.is_complete = False
        self.loss_scale = loss_scale  # by which its gradients were divided
        self.outcome = self._new_outcome()
        self.seen: set[int] = set()  # all parameters in its buckets, by id()
        self._is_closed = False
        # Those that its buckets came in and that are not over: by id, what dies with the task.
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._buckets: list[_Reduced] = []  # until it is closed and complete
        # For each bucket, float64: number of non-finite elements, sum of squares.
        self._stats: list[torch.Tensor] = []
        # The sum of all ranks' stats, if the model lies on several ranks.
        self._model_stats: torch.futures.Future[torch.Tensor] | None = None
        self._totals: tuple[bool, float] | None = None  # the totals of the stats, once read
        self._marks: dict[int, _Mark] = {}  # by identity of the parameter

    # ---- written by the hook

    def continues(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a bucket of these parameters belongs to the reduction under way."""
        has_failed = any(ref() is None for ref in self._tasks.values())
        return not (self._is_closed or has_failed) and self.seen.isdisjoint(map(id, parameters))

    def begin(self, loss_scale: float) -> None:
        self._start_model_sum()
        self._clear(loss_scale)
        callbacks, self._at_next_backward = self._at_next_backward, []
        for callback in callbacks:
            callback()

    def _new_outcome(self) -> Outcome:
        # A cycle of references would keep a state among the live ones after its last use.
        own = weakref.ref(self)

        def found_inf() -> bool | torch.Tensor:
            results = own()
            return results is not None and results._found_inf()

        return Outcome(found_inf)

    def add_bucket(
        self,
        parameters: Sequence[weakref.ref[torch.Tensor]],
        stats: torch.Tensor,
        buffer: torch.Tensor,
        may_have_unused: bool,
        check_results: Callable[[], None],
    ) -> None:
        """Call it before a bucket is reduced, which writes `stats`; check_results() raises if that
        fails on a GPU."""
        self.is_complete = self.outcome.is_over = False
        self._totals = None
        versions = {}
        memory = buffer.untyped_storage().data_ptr()
        for i, ref in enumerate(parameters):
            parameter = ref()
            self.seen.add(id(parameter))
            gradient = parameter.grad if may_have_unused and parameter is not None else None
            if gradient is not None and gradient.untyped_storage().data_ptr() != memory:
                versions[i] = _torch.version_of(gradient)
        self._buckets.append(_Reduced(parameters, versions))
        self._stats.append(stats)
        self._check_results = check_results

    def end_with_backward(self, sends_without_gradient: bool, at_end: Callable[[], None]) -> None:
        """Call it after each bucket: completes the results when its graph task is over.

        sends_without_gradient: a parameter without a gradient may add to the stats. at_end() is
        called when the backward pass is over, which raises what it raises.
        """
        task, tasks = _torch.graph_task(), self._tasks
        if task == -1:
            self.end(sends_without_gradient)  # the hook was called by hand, on a saved bucket
            at_end()
            return
        if task in tasks:
            return

        def end() -> None:
            del tasks[task]
            if tasks is self._tasks:
                if not self.is_complete:
                    self.end(sends_without_gradient)
                if not _torch.is_inside_node():  # of another graph task
                    self.close()
                    at_end()

        tasks[task] = weakref.ref(end)  # nothing but the graph task holds it
        _torch.after_backward(lambda: _torch.after_backward(end))

    def end(self, sends_without_gradient: bool) -> None:
        """Completes the results; call it when the reduced gradients have been written."""
        self._dropped = False
        self._norm_factor = 1.0
        self._marks = {}
        unwritten = set()
        for bucket in self._buckets:
            for i, ref in enumerate(bucket.parameters):
                parameter = ref()
                if parameter is None:
                    continue
                gradient = parameter.grad
                if gradient is None:
                    unwritten.add(id(parameter))
                    self._dropped |= sends_without_gradient
                elif bucket.versions.get(i) == _torch.version_of(gradient):
                    unwritten.add(id(parameter))
                    self._dropped = True
                else:
                    self._mark(parameter, gradient)
        self.is_complete = True
        self.generation += 1
        self.outcome.end(unwritten)

    def close(self) -> None:
        """Call it when results are complete and no more will come."""
        self._is_closed = True
        self._buckets = []
        self._start_model_sum()

    def void(self) -> None:
        """Call it if the results turn out to be of no use."""
        self.is_complete = False
        self.outcome.drop()

    def _start_model_sum(self) -> None:
        """Starts it once for each reduction, as soon as that is known to be complete."""
        if self._model_group is not None and self.is_complete and self._model_stats is None:
            self._model_stats = self._model_group.start(
                self._stats, [parameter for parameter, _ in self.gradients()]
            )

    def _mark(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        refs = weakref.ref(parameter), weakref.ref(gradient)
        self._marks[id(parameter)] = _Mark(*refs, _torch.version_of(gradient))

    # ---- read by the state, the scaler and clipping, between backward passes

    def _read_stats(self) -> tuple[bool, float]:
        # Reads all stats once and together: with caches cold after a bucket, each torch call costs
        # some 50 us; on a GPU each copy waits for all queued work.
        if self._totals is None and self.measure is not None:
            self._totals = self.measure()
        if self._totals is None:
            stats = self._all_stats()
            rows = (
                torch.stack(stats).tolist() if len(stats) > 1 else [row.tolist() for row in stats]
            )
            # A collective that gave up on a GPU has left NaN, which must not count as an overflow.
            if self._stats and self._stats[0].is_cuda:
                self._check_results()
                if self._model_group is not None:
                    self._model_group.check_results()
            self._totals = any(row[0] for row in rows), math.fsum(row[1] for row in rows)
        return self._totals

    def _all_stats(self) -> list[torch.Tensor]:
        self._start_model_sum()
        return [self._model_stats.wait()] if self._model_stats is not None else self._stats

    def _found_inf(self) -> bool | torch.Tensor:
        """found_inf, as a tensor if the CPU would have to wait for it."""
        if self._totals is None and self.measure is None:
            stats = self._all_stats()
            if len({row.device for row in stats}) == 1 and stats[0].is_cuda:
                return torch.stack(stats)[:, 0].sum() > 0
        return self.found_inf

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

    def is_norm_of(self, parameters: Set[int]) -> bool:
        """Whether the stats count only gradients of `parameters`, which are given by id()."""
        return self.is_complete and not self._dropped and self._marks.keys() <= parameters

    # ---- what the scaler and clipping do to the gradients

    def scaled_by(self, factor: float, in_place: bool) -> None:
        """Call it after multiplying the gradients, or if an optimizer will (not in_place)."""
        self._norm_factor *= factor
        if in_place:
            for parameter, gradient in list(self.gradients()):
                self._mark(parameter, gradient)

    def forget(self) -> None:
        """Call it when the gradients change units, and more will be added to them."""
        self.close()
        self.is_complete = False
        self.outcome.goes_on = True
        gone = [m.parameter() for m in self._marks.values() if m.gradient_now() is None]
        self.outcome.tell([p for p in gone if p is not None], was_used=False)

    def at_next_backward(self, callback: Callable[[], None]) -> None:
        self._at_next_backward.append(callback)
