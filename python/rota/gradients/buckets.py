"""What is kept for each bucket of gradients from one reduction to the next."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from rota import options
from rota.gradients.residuals import BucketResidual
from rota.gradients.sharded import ShardedBucket


class Bucket(Protocol):
    """Flat gradients: a dist.GradBucket, or one that reduce_gradients packs."""

    def index(self) -> int: ...
    def parameters(self) -> list[torch.Tensor]: ...
    def buffer(self) -> torch.Tensor: ...


class Entry(NamedTuple):
    """What is kept for one bucket until its parameters change."""

    parameters: list[weakref.ref[torch.Tensor]]
    stats: torch.Tensor
    residual: BucketResidual | None
    shards: ShardedBucket | None  # if sums stay with the owners of their pieces

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            ref() is parameter for ref, parameter in zip(self.parameters, parameters, strict=True)
        )

    def shares(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it holds one of these, or one that no longer exists."""
        own = {id(ref()) for ref in self.parameters}
        return id(None) in own or any(id(parameter) in own for parameter in parameters)


class Entries:
    """The entries of a model's buckets."""

    def __init__(self) -> None:
        self._by_first: dict[int, Entry] = {}  # by id() of the first parameter

    def of(self, parameters: Sequence[torch.Tensor]) -> Entry | None:
        entry = self._by_first.get(id(parameters[0]))
        return entry if entry is not None and entry.holds(parameters) else None

    def add(
        self, bucket: Bucket, residual: BucketResidual | None, shards: ShardedBucket | None
    ) -> Entry:
        parameters = bucket.parameters()
        refs = [weakref.ref(parameter) for parameter in parameters]
        stats = torch.zeros(2, dtype=torch.float64, device=bucket.buffer().device)
        # Without those where its parameters were before, if DDP has made other buckets.
        self._by_first = {k: e for k, e in self._by_first.items() if not e.shares(parameters)}
        entry = self._by_first[id(parameters[0])] = Entry(refs, stats, residual, shards)
        return entry

    def clear(self) -> None:
        self._by_first = {}


def check_buffer(buffer: torch.Tensor, name: str) -> None:
    """Raises TypeError if a bucket's gradients, whose first is of this name, cannot be reduced."""
    if buffer.layout is not torch.strided:
        raise TypeError(
            f"rota.fused_hook: the gradient of {name} is {buffer.layout}, expected a dense "
            f"one; make its layer with sparse=False, or use another hook for this model"
        )
    if buffer.dtype not in options.BUCKET_DTYPES:
        raise TypeError(
            f"rota.fused_hook: the gradient of {name} is {buffer.dtype}, expected one of "
            f"{options.BUCKET_DTYPES}; use another hook for this model"
        )
