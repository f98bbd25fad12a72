"""The objects of a training state: which tensors are read by peers in place, and all the rest.

Parameters and optimiser state are "kept": their storages move into one arena. The rest is small, or
made anew by every state_dict(): it is copied when it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree


@runtime_checkable
class Stateful(Protocol):
    """As in torch.distributed.checkpoint: whatever can save and load its state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class KeptTensor:
    """Stands for a kept tensor in a state that goes to another process.

    Args:
        storage: its number among the kept storages of all objects.
        offset: in the storage, in elements, as `stride`.
    """

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class LooseTensor:
    """Stands for a tensor that a state_dict() has made anew.

    Args:
        number: among all of them.
    """

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]


StorageOn = Callable[[int, int], torch.UntypedStorage]


class Storages:
    """Distinct storages of tensors, in the order in which they come."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # one of each storage
        self._numbers: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> KeptTensor:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return KeptTensor(
            number,
            storage.nbytes(),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )


class Part:
    """An object with a state_dict(), of which nothing is kept."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def describe(self) -> str:
        """What must be the same on all ranks, for errors."""
        num_shards = getattr(self.target, "num_shards", None)
        of = "" if num_shards is None else f" of {num_shards} logical shards"
        return f"{type(self.target).__name__}{of}"

    def save(self, kept: Storages) -> Any:
        """The state, with a KeptTensor in place of each kept tensor, which goes to `kept`."""
        return self.target.state_dict()

    def load(self, state: Any, storage_on: StorageOn) -> None:
        """Takes a state of save() from another process.

        Args:
            storage_on: the kept storage with this number and length.
        """
        self.target.load_state_dict(state)

    def volatile(self) -> Any:
        """What a step changes before it can fail, to be restored afterwards; small."""
        return self.target.state_dict()

    def restore(self, volatile: Any) -> None:
        self.target.load_state_dict(volatile)

    def regroup(self) -> None:
        """Forgets a step that has not ended; the ranks are others now."""
        if hasattr(self.target, "regroup"):
            self.target.regroup()


class ModulePart(Part):
    """A module: its parameters are kept."""

    def __init__(self, name: str, target: torch.nn.Module) -> None:
        super().__init__(name, target)
        self._buffers = list(target.buffers())

    def describe(self) -> str:
        parameters = list(self.target.named_parameters())
        layout = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters]
        num_elems = sum(p.numel() for _, p in parameters)
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        return (
            f"{type(self.target).__name__} of {len(parameters)} parameters, {num_elems} elements, "
            f"names and shapes {digest}"
        )

    def save(self, kept: Storages) -> Any:
        names = set()
        for name, parameter in self.target.named_parameters(remove_duplicate=False):
            names.add(name)
            kept.add(parameter)
        state = self.target.state_dict()
        return {name: value for name, value in state.items() if name not in names}

    def load(self, state: Any, storage_on: StorageOn) -> None:
        # Its parameters have their storages already.
        self.target.load_state_dict(state, strict=False)

    def volatile(self) -> Any:
        return [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self, volatile: Any) -> None:
        for buffer, saved in zip(self._buffers, volatile, strict=True):
            buffer.copy_(saved)

    def regroup(self) -> None:
        for parameter in self.target.parameters():
            parameter.grad = None


class OptimizerPart(Part):
    """An optimiser: its tensors are kept, but not its counters."""

    def describe(self) -> str:
        groups = ", ".join(str(len(group["params"])) for group in self.target.param_groups)
        return f"{type(self.target).__name__} of {groups} parameters"

    def save(self, kept: Storages) -> Any:
        return _pytree.tree_map(
            lambda leaf: kept.add(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
            self.target.state_dict(),
        )

    def load(self, state: Any, storage_on: StorageOn) -> None:
        def found(leaf: Any) -> Any:
            if isinstance(leaf, KeptTensor):
                return leaf.on(storage_on(leaf.storage, leaf.num_bytes))
            return leaf

        self.target.load_state_dict(_pytree.tree_map(found, state))

    def volatile(self) -> Any:
        return None  # step() is the last thing in a step

    def restore(self, volatile: Any) -> None:
        pass


def part_of(name: str, target: object) -> Part:
    """Raises TypeError: the object has no state."""
    if isinstance(target, torch.nn.Module):
        return ModulePart(name, target)
    if isinstance(target, torch.optim.Optimizer):
        return OptimizerPart(name, target)
    if not isinstance(target, Stateful):
        raise TypeError(
            f"rota.elastic.State: {name} is of type {type(target).__name__}, expected an object "
            f"with state_dict() and load_state_dict()"
        )
    return Part(name, target)
