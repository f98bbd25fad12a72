"""A rank's state as tensors and the rest: what is copied, and what is pickled.

Tensors are found wherever pickle finds them. A DTensor stands for this rank's part, a Parameter
for its data; tensors that are the same memory are kept once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rota.errors import Mismatch
from rota.sharding import local_of
from rota.shared.apart import pickle_without

WHAT = "rota.checkpoint.Checkpoint"


class Look(NamedTuple):
    """What a tensor must be like to take what was saved of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Look:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="cpu")

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


@dataclass
class Contents:
    """A state taken apart."""

    looks: list[Look]
    tensors: list[torch.Tensor]  # plain ones on the CPU, of any strides
    originals: list[torch.Tensor]  # what they are in the state, such as a DTensor
    rest: bytes  # everything else, pickled

    @classmethod
    def of(cls, state: object) -> Contents:
        """Takes a state apart and copies nothing; TypeError for what cannot be saved."""
        names = {id(tensor): name for name, tensor in named_tensors(state)}
        looks: list[Look] = []
        tensors: list[torch.Tensor] = []
        originals: list[torch.Tensor] = []
        index_of: dict[object, int] = {}

        def place_of(original: torch.Tensor) -> int:
            tensor = local_of(original).detach()
            name = names.get(id(original), f"tensor {len(tensors)}")
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
                raise TypeError(
                    f"{WHAT}: {name} is {tensor.layout} on {tensor.device}, expected a dense "
                    f"tensor on the CPU"
                )
            index = index_of.setdefault(_memory_of(tensor), len(tensors))
            if index == len(tensors):
                looks.append(Look.of(name, tensor))
                tensors.append(tensor)
                originals.append(original)
            return index

        try:
            rest = pickle_without(state, place_of)
        except (pickle.PicklingError, AttributeError) as error:
            raise TypeError(f"{WHAT}.save: the state cannot be pickled: {error}") from error
        return cls(looks, tensors, originals, rest)


def match(
    saved: Sequence[Look], into: object
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The tensors of `into` that take the saved ones, and their originals, in the saved order;
    new tensors if it is None."""
    if into is None:
        new = [look.empty() for look in saved]
        return new, new
    contents = Contents.of(into)
    have = {look.name: look for look in contents.looks}
    expected = {look.name: look for look in saved}
    for name in [*expected, *have]:
        if have.get(name) != expected.get(name):
            was, is_now = (
                "missing" if look is None else str(look)
                for look in (expected.get(name), have.get(name))
            )
            raise Mismatch(
                f"{WHAT}.load: {name} is {is_now} in `into`, but {was} in what was saved; nothing "
                f"was loaded; pass a state of the same model and optimizer, or none"
            )
    index_of = {look.name: index for index, look in enumerate(contents.looks)}
    order = [index_of[look.name] for look in saved]
    return [contents.tensors[i] for i in order], [contents.originals[i] for i in order]


def named_tensors(state: object, name: str = "state") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested mappings and sequences, named as one would write their place in Python."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from named_tensors(value, f"{name}[{index}]")


# Tensors without elements have no memory, and are never the same.
def _memory_of(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return object()
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
