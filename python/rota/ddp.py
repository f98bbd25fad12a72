"""What a hook's state knows of the model whose gradients it reduces.

DDP does not tell its hooks which model a bucket belongs to. The user may pass the model; otherwise
the parameters seen in buckets tell models apart.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class NamedModel:
    """The model that the user passed; held weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp is None else ddp.module
        self._module = weakref.ref(module)
        self._ddp = None if ddp is None else weakref.ref(ddp)
        # By id(). Modules replace their parameters: name() looks again for one that it lacks.
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        # DDP's buckets are for the parameters that require a gradient when it is made.
        self._names_in_ddp = None if ddp is None else _trained(module) - ddp.parameters_to_ignore

    @property
    def is_alive(self) -> bool:
        return self._module() is not None

    @property
    def reduced_names(self) -> set[str]:
        """The names of all parameters whose gradients come in buckets."""
        module = self._module()
        if self._names_in_ddp is not None or module is None:
            return self._names_in_ddp or set()
        return _trained(module)

    @property
    def may_have_unused(self) -> bool:
        """Whether a parameter may get no gradient; DDP then leaves its old gradient as it was."""
        ddp = self._ddp() if self._ddp is not None else None
        return ddp is None or bool(ddp.find_unused_parameters or ddp.static_graph)

    def name(self, parameter: torch.Tensor) -> str | None:
        """As in the wrapped module's state_dict; None for a parameter of another model."""
        module = self._module()
        if module is None:
            return None
        if not self._knows(parameter):
            self._names = {id(p): (name, weakref.ref(p)) for name, p in module.named_parameters()}
        return self._names[id(parameter)][0] if self._knows(parameter) else None

    def _knows(self, parameter: torch.Tensor) -> bool:
        known = self._names.get(id(parameter))
        return known is not None and known[1]() is parameter


def _trained(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


class NamedCopies:
    """Copies that stand for the parameters of a model, as those of rota.LocalSGD; held weakly."""

    may_have_unused = False

    def __init__(self, copies: Mapping[str, torch.Tensor]) -> None:
        self._names = {id(copy): (name, weakref.ref(copy)) for name, copy in copies.items()}
        self.reduced_names = set(copies)

    @property
    def is_alive(self) -> bool:
        return any(ref() is not None for _, ref in self._names.values())

    def name(self, copy: torch.Tensor) -> str | None:
        """The name that it was given; None for another tensor."""
        name, ref = self._names.get(id(copy), (None, None))
        return name if ref is not None and ref() is copy else None


class SeenParameters:
    """The parameters of the first complete backward pass, held weakly.

    DDP rebuilds its buckets, but from the same parameters, and may leave out a bucket whose
    parameters are unused. So a new parameter in a bucket that has come before, while these live,
    belongs to another model that uses the same state.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._indices: set[int] = set()  # of the buckets
        self._is_complete = False
        self._frozen: dict[int, weakref.ref[torch.Tensor]] = {}

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of them."""
        return _has(self._refs, parameter)

    def has_frozen(self, parameter: torch.Tensor) -> bool:
        """Whether it was listed with them, but requires no gradient."""
        return _has(self._frozen, parameter)

    def note_frozen(self, parameters: Iterable[torch.Tensor]) -> None:
        self._frozen = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def _are_gone(self) -> bool:
        return all(ref() is None for ref in self._refs.values())

    def add_bucket(self, index: int, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether these can belong to the same model as those before."""
        if self._is_complete and not all(self.has(parameter) for parameter in parameters):
            gc.collect()  # a model without references does not count
            if self._are_gone():
                self._refs, self._indices, self._is_complete = {}, set(), False
            elif index in self._indices:
                return False
        self._refs |= {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self._indices.add(index)
        return True

    def complete(self) -> None:
        """Call it after a whole backward pass: further parameters come in further buckets."""
        self._is_complete = bool(self._refs)

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
        if parameters and self._refs and not shares:
            gc.collect()
            if not self._are_gone():
                return False
        self._refs = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        self._is_complete = True
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
