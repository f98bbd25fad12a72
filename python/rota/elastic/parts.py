"""The objects of a training state: which tensors are read by peers in place, and all the rest.

Parameters and optimiser state are "kept": their storages move into one arena. The rest is small, or
made anew by every state_dict(): it is copied when it is needed.

Objects replace their tensors (buffers that a module assigns, `parameter.data = ...`, state that an
optimiser makes in its first step), so no part keeps a list of them: each looks its tensors up
whenever it reads or writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from rota import _torch
from rota.shared.apart import take_apart, unpickle_with


@runtime_checkable
class Stateful(Protocol):
    """As in torch.distributed.checkpoint: whatever can save and load its state."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class KeptTensor:
    """Stands for a kept tensor in a state that goes to another process."""

    storage: int  # its number among the kept storages of all objects
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in the storage, in elements

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


StorageOn = Callable[[int, int], torch.UntypedStorage]


class Storages:
    """Distinct storages of tensors, in the order in which they come."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # one of each storage
        self._numbers: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> KeptTensor:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(_torch.storage_id(storage), len(self.tensors))
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


class Snapshot:
    """A copy of the state that was taken last; its memory serves the next one, too."""

    def __init__(self) -> None:
        self._rest = b""
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, state: object) -> None:
        """Copies a state, in one pass over its tensors, which are found wherever pickle does."""
        rest, tensors = take_apart(state)
        copies = []
        # The next take() writes to the copies, maybe outside of inference mode.
        with torch.inference_mode(False):
            for i, tensor in enumerate(tensors):
                if i < len(self._copies) and _fits(self._copies[i], tensor):
                    copies.append(self._copies[i].copy_(tensor))
                else:
                    copies.append(tensor.detach().clone())
        self._copies = copies
        self._rest = rest

    def state(self) -> Any:
        copies = [copy.clone() for copy in self._copies]
        return unpickle_with(self._rest, copies.__getitem__)


def _fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """False for sparse and quantized ones, which have other memory from one state to the next."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return (
        is_plain
        and tensor.layout == copy.layout == torch.strided
        and (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)
    )


class Part:
    """An object with a state_dict(), of which nothing is kept."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target
        self._snapshot: Snapshot | None = None  # of volatile()

    def describe(self) -> str:
        """What must be the same on all ranks, for errors."""
        num_shards = getattr(self.target, "num_shards", None)
        of = "" if num_shards is None else f" of {num_shards} logical shards"
        return f"{type(self.target).__name__}{of}"

    def save(self, kept: Storages) -> Any:
        """The state, with a KeptTensor in place of each kept tensor, which goes to `kept`."""
        return self.target.state_dict()

    def load(self, state: Any, storage_on: StorageOn) -> None:
        """Takes a state of save() from another process; storage_on gives kept storages."""
        self.target.load_state_dict(state)

    def remember(self) -> None:
        """Copies volatile(): what a step changes before it can fail."""
        snapshot = self._snapshot or Snapshot()
        with refusing_unpicklable(self.name):
            snapshot.take(self.volatile())
        self._snapshot = snapshot

    def roll_back(self) -> None:
        if self._snapshot is not None:
            self.restore(self._snapshot.state())

    def volatile(self) -> Any:
        return self.target.state_dict()

    def restore(self, volatile: Any) -> None:
        self.target.load_state_dict(volatile)

    def num_changes(self) -> int:
        """Grows when an optimiser changes parameters, which nothing rolls back."""
        return 0

    def regroup(self) -> None:
        """Forgets a step that has not ended; the ranks are others now."""
        if hasattr(self.target, "regroup"):
            self.target.regroup()


class ModulePart(Part):
    """A module: its parameters are kept."""

    def __init__(self, name: str, target: torch.nn.Module) -> None:
        super().__init__(name, target)
        # What was remembered: the tensors that were buffers, and the modules with extra state.
        self._buffers: dict[torch.nn.Module, dict[str, torch.Tensor | None]] = {}
        self._with_extra: list[torch.nn.Module] = []

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
        layout = self.layout(kept)
        state = self.target.state_dict()
        return layout, {name: value for name, value in state.items() if name not in layout}

    def layout(self, kept: Storages) -> dict[str, KeptTensor]:
        """Where its parameters lie, by name."""
        return {
            name: kept.add(parameter)
            for name, parameter in self.target.named_parameters(remove_duplicate=False)
        }

    def load(self, state: Any, storage_on: StorageOn) -> None:
        _, rest = state  # its parameters are there already
        self._make_room(rest)
        self.target.load_state_dict(rest, strict=False)

    @torch.no_grad()
    def copy_parameters(self, layout: dict[str, KeptTensor], storage_on: StorageOn) -> None:
        """Takes parameters that lie otherwise in their storages than this module's."""
        for name, parameter in self.target.named_parameters():
            kept = layout[name]
            parameter.copy_(kept.on(storage_on(kept.storage, kept.num_bytes)))

    def _make_room(self, rest: Mapping[str, Any]) -> None:
        """Replaces the buffers that load_state_dict() would pass over or refuse: those that a
        forward pass has yet to make here, or makes in another shape."""
        own, modules = self.target.state_dict(), dict(self.target.named_modules())
        for name, value in rest.items():
            path, _, key = name.rpartition(".")
            is_buffer = path in modules and key in _torch.buffers_of(modules[path])
            if is_buffer and (name not in own or own[name].shape != value.shape):
                _torch.buffers_of(modules[path])[key] = torch.empty_like(value)

    def volatile(self) -> Any:
        modules = list(self.target.modules())
        without_extra = torch.nn.Module.get_extra_state
        self._buffers = {m: dict(_torch.buffers_of(m)) for m in modules if _torch.buffers_of(m)}
        self._with_extra = [m for m in modules if type(m).get_extra_state is not without_extra]
        return (
            [list(buffers.values()) for buffers in self._buffers.values()],
            [module.get_extra_state() for module in self._with_extra],
        )

    @torch.no_grad()
    def restore(self, volatile: Any) -> None:
        values_by_module, extra = volatile
        for module in self.target.modules():
            for key in _torch.buffers_of(module).keys() - self._buffers.get(module, {}).keys():
                del _torch.buffers_of(module)[key]
        for (module, buffers), values in zip(self._buffers.items(), values_by_module, strict=True):
            for (key, buffer), value in zip(buffers.items(), values, strict=True):
                # The tensor that it was, since others may refer to it.
                is_restored = buffer is not None and _write(buffer, value)
                _torch.buffers_of(module)[key] = buffer if is_restored else value
        for module, state in zip(self._with_extra, extra, strict=True):
            module.set_extra_state(state)

    def regroup(self) -> None:
        for parameter in self.target.parameters():
            parameter.grad = None


class OptimizerPart(Part):
    """An optimiser: its tensors are kept, but not its counters."""

    def describe(self) -> str:
        groups = ", ".join(str(len(group["params"])) for group in self.target.param_groups)
        return f"{type(self.target).__name__} of {groups} parameters"

    def save(self, kept: Storages) -> Any:
        return _torch.tree_map(
            lambda leaf: kept.add(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
            self.target.state_dict(),
        )

    def load(self, state: Any, storage_on: StorageOn) -> None:
        def found(leaf: Any) -> Any:
            if isinstance(leaf, KeptTensor):
                return leaf.on(storage_on(leaf.storage, leaf.num_bytes))
            return leaf

        self.target.load_state_dict(_torch.tree_map(found, state))

    def volatile(self) -> Any:
        # Learning rates; step(), which changes the rest, is the last thing in a step.
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.target.param_groups
        ]

    def restore(self, volatile: Any) -> None:
        for group, saved in zip(self.target.param_groups, volatile, strict=False):
            for key, value in saved.items():
                own = group.get(key)
                if not (isinstance(own, torch.Tensor) and _write(own, value)):
                    group[key] = value

    def num_changes(self) -> int:
        # What was made in inference mode counts no changes.
        return sum(
            _torch.version_of(parameter)
            for group in self.target.param_groups
            for parameter in group["params"]
            if not parameter.is_inference()
        )

    def regroup(self) -> None:
        self.target.zero_grad(set_to_none=True)


class GradScalerPart(Part):
    """A torch.amp.GradScaler."""

    def regroup(self) -> None:
        # What unscale_() has done in a step that was dropped.
        if self.target.is_enabled():
            _torch.unscaled_by(self.target).clear()


@torch.no_grad()
def _write(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Gives a tensor its old value back; False if it is not like that any more."""
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        return False
    if tensor.is_inference():
        return False
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    if not any(n > 1 and stride == 0 for n, stride in lengths):  # nothing can write to others
        tensor.copy_(value)
    return True


@contextlib.contextmanager
def refusing_unpicklable(name: str) -> Iterator[None]:
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"rota.elastic.State: the state of {name} cannot be pickled: {error}"
        ) from error


def part_of(name: str, target: object) -> Part:
    """Raises TypeError: the object has no state."""
    if isinstance(target, torch.nn.Module):
        return ModulePart(name, target)
    if isinstance(target, torch.optim.Optimizer):
        return OptimizerPart(name, target)
    if isinstance(target, torch.amp.GradScaler):
        return GradScalerPart(name, target)
    if not isinstance(target, Stateful):
        raise TypeError(
            f"rota.elastic.State: {name} is of type {type(target).__name__}, expected an object "
            f"with state_dict() and load_state_dict()"
        )
    return Part(name, target)
