"""A state taken apart: tensors, which are copied, and the rest, which is pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch


def pickle_without(state: object, place_of: Callable[[torch.Tensor], object]) -> bytes:
    """Pickles a state, with tensors left out wherever pickle finds them.

    place_of() gives what stands for a tensor; None for one that is pickled as usual.
    """
    pickler = _Pickler(file := io.BytesIO(), place_of)
    pickler.dump(state)
    return file.getvalue()


def unpickle_with(rest: bytes, tensor_at: Callable[[Any], torch.Tensor]) -> Any:
    """The state again. tensor_at: gives the tensor for what stands for it."""
    return _Unpickler(io.BytesIO(rest), tensor_at).load()


def take_apart(state: object) -> tuple[bytes, list[torch.Tensor]]:
    """pickle_without() the tensors, which are returned, each once; numbers stand for them."""
    tensors: list[torch.Tensor] = []  # which keeps them alive, so no id is used again
    number_of: dict[int, int] = {}

    def place_of(tensor: torch.Tensor) -> int:
        number = number_of.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        return number

    return pickle_without(state, place_of), tensors


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, place_of: Callable[[torch.Tensor], object]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._place_of = place_of

    def persistent_id(self, obj: object) -> object:
        return self._place_of(obj) if isinstance(obj, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensor_at: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(file)
        self.persistent_load = tensor_at  # type: ignore[method-assign]
