"""What a hook's state knows of the model whose gradients it reduces.

DDP does not tell its hooks which model a bucket belongs to. The user may pass the model; otherwise
the parameters seen in buckets tell models apart.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary


class NamedModel:
    """The model that the user passed; held weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp is None else ddp.module
        self._module = weakref.ref(module)
        self._ddp = None if ddp is None else weakref.ref(ddp)
        # Modules replace their parameters: name() looks again for one that it lacks.
        self._names = WeakTensorKeyDictionary()
        self._ignored = set() if ddp is None else set(ddp.parameters_to_ignore)

    @property
    def is_alive(self) -> bool:
        return self._module() is not None

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp is None else self._ddp()

    @property
    def names(self) -> set[str]:
        module = self._module()
        return set() if module is None else {name for name, _ in module.named_parameters()}

    @property
    def reduced_names(self) -> set[str]:
        """The names of trained parameters whose gradients come in buckets."""
        module = self._module()
        named = [] if module is None else module.named_parameters()
        return {name for name, p in named if p.requires_grad} - self._ignored

    def copied(self, memo: Mapping[int, Any]) -> NamedModel:
        """The same model, or its copy if copy.deepcopy, whose memo this is, has copied it."""
        module = self._module()
        ddp = self.ddp
        other = copy.copy(self)
        other._names = WeakTensorKeyDictionary()
        if id(module) in memo:
            other._module = weakref.ref(memo[id(module)])
            other._ddp = weakref.ref(memo[id(ddp)]) if id(ddp) in memo else None
        return other

    @property
    def may_have_unused(self) -> bool:
        """Whether a parameter may get no gradient; DDP then leaves its old gradient as it was."""
        ddp = self.ddp
        return ddp is None or bool(ddp.find_unused_parameters or ddp.static_graph)

    def name(self, parameter: torch.Tensor) -> str | None:
        """As in the wrapped module's state_dict; None for a parameter of another model."""
        module = self._module()
        if module is None:
            return None
        if parameter not in self._names:
            self._names = WeakTensorKeyDictionary({p: n for n, p in module.named_parameters()})
        name: str | None = self._names.get(parameter)
        return name


class NamedCopies:
    """Copies that stand for the parameters of a model, as those of LocalSGD; held weakly."""

    may_have_unused = False

    def __init__(self, copies: Mapping[str, torch.Tensor]) -> None:
        self._names = WeakTensorKeyDictionary({copy: name for name, copy in copies.items()})
        self.names = self.reduced_names = set(copies)

    @property
    def is_alive(self) -> bool:
        return len(self._names) > 0

    def name(self, copy: torch.Tensor) -> str | None:
        name: str | None = self._names.get(copy)
        return name


class SeenParameters:
    """The parameters of all backward passes so far, held weakly.

    DDP rebuilds its buckets, may leave out one whose parameters are unused, and is made anew after
    layers were frozen or thawed. So a pass is taken for one of another model, which uses the same
    state, if a bucket comes again with new parameters, and the pass has none of those before, which
    still live. Only its end tells: buckets of thawed layers may come before the others.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._indices: set[int] = set()  # of the buckets
        self._frozen: dict[int, weakref.ref[torch.Tensor]] = {}
        # What the pass under way has seen, by bucket.
        self._new: list[tuple[int, list[weakref.ref[torch.Tensor]]]] = []

    def has(self, parameter: torch.Tensor) -> bool:
        return _has(self._refs, parameter)

    def has_frozen(self, parameter: torch.Tensor) -> bool:
        """Whether it was listed with them, but requires no gradient."""
        return _has(self._frozen, parameter)

    def note_frozen(self, parameters: Iterable[torch.Tensor]) -> None:
        self._frozen = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def _are_gone(self) -> bool:
        gc.collect()  # a model without references does not count
        return all(ref() is None for ref in self._refs.values())

    def begin(self) -> None:
        """Call it before a pass, of which buckets that are new will be added."""
        self._new = []

    def add_bucket(self, index: int, parameters: Sequence[torch.Tensor]) -> None:
        self._new.append((index, [weakref.ref(parameter) for parameter in parameters]))

    def end(self, seen: Set[int], is_same_model: bool) -> bool:
        """Ends a pass over `seen` (by id()); whether it can be of the model of those before."""
        new, self._new = self._new, []
        if not new:
            return True
        shares = is_same_model or any(i in seen and r() is not None for i, r in self._refs.items())
        if not shares and not self._indices.isdisjoint(index for index, _ in new):
            if not self._are_gone():
                return False
            self._refs, self._indices = {}, set()
        self._refs |= {id(ref()): ref for _, refs in new for ref in refs}
        self._indices |= {index for index, _ in new}
        return True

    @property
    def are_none(self) -> bool:
        return not self._refs

    @property
    def are_none_of_model(self) -> bool:
        """Whether this rank's part of the model has no parameters at all."""
        return not self._refs and not self._frozen

    def replace(self, parameters: Sequence[torch.Tensor], is_same_model: bool) -> bool:
        """Takes a whole list of parameters instead of those before.

        Returns whether it can belong to the same model: it may be longer or shorter, as layers are
        frozen and thawed, but has one of the parameters before, unless `is_same_model`.
        """
        shares = is_same_model or any(self.has(parameter) for parameter in parameters)
        if parameters and self._refs and not shares and not self._are_gone():
            return False
        self._refs = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        return True


def _has(refs: Mapping[int, weakref.ref[torch.Tensor]], parameter: torch.Tensor) -> bool:
    ref = refs.get(id(parameter))
    return ref is not None and ref() is parameter


def group_of(
    group: dist.ProcessGroup | None, model: torch.nn.Module | None
) -> dist.ProcessGroup | None:
    """Returns the group, which must have DDP's ranks, or else DDP's; None is the default group."""
    if not isinstance(model, DistributedDataParallel):
        return group
    if group is None:
        is_default = model.process_group is dist.group.WORLD
        return None if is_default else model.process_group
    ranks = dist.get_process_group_ranks(group)
    ranks_of_model = dist.get_process_group_ranks(model.process_group)
    if ranks != ranks_of_model:
        raise ValueError(
            f"rota.HookState: group has {len(ranks)} ranks {ranks}, that of the model's "
            f"DistributedDataParallel has {len(ranks_of_model)} ranks {ranks_of_model}; leave "
            f"group out, or give both the same one"
        )
    return group
