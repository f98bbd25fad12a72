"""Error feedback (Seide et al. 2014): adds a gradient's encoding error to the next gradient.

What a reduction sends is still owed until its result has been used: if no rank uses a parameter, or
the step is skipped, the result is thrown away. That is known when the next reduction begins. Until
then the residuals before and after both exist.

DDP rebuilds its buckets after the first step, in the order in which gradients came, and again in a
new process. So each bucket's residual is split into parts that belong to parameters, and a rebuilt
bucket's residual is assembled from its parameters' parts, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from rota.gradients.layout import num_reals, shaped
from rota.gradients.results import Outcome
from rota.sharding import local_of


class BucketResidual:
    """What a bucket owes: flat float32 tensors, laid out like it, in units of the gradients."""

    def __init__(self, before: torch.Tensor, after: torch.Tensor | None) -> None:
        self._before = before  # owed if the results of the last reduction are not used
        self._after = after  # owed if they are; None: it is made when it is needed
        self._outcome: Outcome | None = None  # of the last reduction, until it is settled
        self._parts: dict[int, slice] = {}  # by id() of the parameter

    def add(self, parameter: torch.Tensor, part: slice) -> None:
        self._parts[id(parameter)] = part

    def for_reduction(self, outcome: Outcome) -> torch.Tensor:
        """What a reduction with this outcome adds to its gradients, and overwrites."""
        self.settle()
        self._outcome = outcome
        if self._after is None:
            self._after = self._before.clone()
        return self._after

    def settle(self) -> None:
        """Makes both residuals what is owed after the last reduction."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or self._after is None:
            return
        if not outcome.is_over:
            self._after = None  # the reduction may still write to it
            return
        uses = outcome.was_used(self._parts)
        parts = list(self._parts.values())
        if all(use is uses[0] for use in uses):
            uses, parts = uses[:1], [slice(None)]
        for part, was_used in zip(parts, uses, strict=True):
            if was_used is None:
                continue  # the next reduction goes on from `after`
            before, after = self._before[part], self._after[part]
            if was_used is not False:
                before.copy_(_owed(before, after, was_used))
            if was_used is not True:
                after.copy_(before)

    def free(self) -> None:
        """Frees one of the two residuals until the next reduction."""
        self.settle()
        self._after = None

    def both(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parameter's parts of the residuals, once it is settled."""
        part = self._parts[id(parameter)]
        return self._before[part], self._after[part] if self._after is not None else None

    def owed(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the next reduction of the parameter adds, flat; may share the residual's memory."""
        before, after = self.both(parameter)
        if self._outcome is None or after is None:
            return before
        return _owed(before, after, self._outcome.was_used([id(parameter)])[0])


def _owed(
    before: torch.Tensor, after: torch.Tensor, was_used: bool | torch.Tensor | None
) -> torch.Tensor:
    if isinstance(was_used, torch.Tensor):
        return torch.where(was_used, after, before)
    return after if was_used else before


class Residuals:
    """The residuals of a state's buckets: one for each element of each gradient."""

    def __init__(self) -> None:
        self._buckets = WeakTensorKeyDictionary()  # the BucketResidual of each parameter
        self._loaded: dict[str, torch.Tensor] = {}  # that no bucket has used yet
        self._loaded_without: set[str] | None = None  # None: what was loaded has been checked

    def of_bucket(
        self, parameters: Sequence[torch.Tensor], name_of: Callable[[torch.Tensor], str]
    ) -> BucketResidual:
        """The residual of a bucket of these parameters, from those of the buckets they were in.
        Raises ValueError: a loaded one does not fit its parameter."""
        parts = [self._parts(parameter, name_of) for parameter in parameters]
        before = torch.cat([before for before, _ in parts])
        after = None
        if any(after is not None for _, after in parts):
            after = torch.cat([before if after is None else after for before, after in parts])
        bucket = BucketResidual(before, after)
        start = 0
        for parameter in parameters:
            length = num_reals(parameter)
            bucket.add(parameter, slice(start, start + length))
            self._buckets[parameter] = bucket
            start += length
        return bucket

    def _parts(
        self, parameter: torch.Tensor, name_of: Callable[[torch.Tensor], str]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        bucket: BucketResidual | None = self._buckets.get(parameter)
        if bucket is not None:
            bucket.settle()
            parts = bucket.both(parameter)
            if parts[0].numel() == num_reals(parameter):  # else it changed shape
                return parts
        part = torch.zeros(num_reals(parameter), dtype=torch.float32, device=parameter.device)
        if self._loaded:
            name = name_of(parameter)
            residual = self._loaded.get(name)  # None: the parameter was not trained then
            if residual is None:
                return part, None
            shape = local_of(parameter).shape
            if residual.shape != shape:
                raise ValueError(
                    f"rota.HookState: the residual of {name!r} that was loaded has shape "
                    f"{list(residual.shape)}, the parameter has {list(shape)}; load the "
                    f"state of the same model"
                )
            shaped(part, parameter).copy_(residual)
            del self._loaded[name]
        return part, None

    def by_name(self, name_of: Callable[[torch.Tensor], str]) -> dict[str, torch.Tensor]:
        """Copies with the parameters' shapes, including loaded ones that no bucket has used yet."""
        copies = {name: residual.clone() for name, residual in self._loaded.items()}
        for parameter, bucket in self._buckets.items():
            copies[name_of(parameter)] = shaped(bucket.owed(parameter), parameter).clone()
        return copies

    def copied(self, memo: Mapping[int, Any]) -> Residuals:
        """Copies, of the same parameters or of their copies in the memo of copy.deepcopy."""
        other = Residuals()
        other.load(self._loaded, ())
        other._loaded_without = self._loaded_without
        for parameter, bucket in self._buckets.items():
            residual = BucketResidual(bucket.owed(parameter).clone(), None)
            target = memo.get(id(parameter), parameter)
            residual.add(target, slice(None))
            other._buckets[target] = residual
        return other

    def load(self, residuals: Mapping[str, torch.Tensor], without: Iterable[str]) -> None:
        """Replaces all residuals, which parameters take when their buckets come; `without` are the
        model's other parameters."""
        self._buckets = WeakTensorKeyDictionary()
        self._loaded = {name: residual.clone() for name, residual in residuals.items()}
        self._loaded_without = set(without)

    def check_loaded(self, names: Set[str], reduced_names: Set[str]) -> None:
        """Raises ValueError, before the first bucket takes one, if they are of another model."""
        if self._loaded_without is None or not self._loaded:
            return
        missing = reduced_names - self._loaded.keys() - self._loaded_without
        unexpected = self._loaded.keys() - names
        if missing or unexpected:
            raise ValueError(
                f"rota.HookState: the residuals that were loaded are not those of this model: "
                f"missing {sorted(missing)}, unexpected {sorted(unexpected)}; load the "
                f"state_dict() of the same model, or, to owe nothing, one with residuals={{}}"
            )
        self._loaded_without = None

    def free(self) -> None:
        for bucket in self._buckets.values():
            bucket.free()
