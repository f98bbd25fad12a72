"""What all ranks of a ParameterServer agree on: who serves what, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from rota.shared.aligned import AlignedLayout
from rota.shared.double_buffer import NUM_SLOTS
from rota.shared.wire import Wire

# The length of the note in a worker's save: JSON, then zeroes.
NOTE_BYTES = 4096

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Share(AlignedLayout[int]):
    """The part of the parameters that one server has: float32, by number of the parameter.

    The gaps between them are zeroes, which a push rounds with the rest.
    """

    def __init__(self, numbers: Sequence[int], shapes: Sequence[torch.Size]) -> None:
        super().__init__({number: (torch.float32, shapes[number]) for number in numbers})
        self.parameters = tuple(numbers)  # ascending
        self.num_elems = self.end // 4

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.num_elems, dtype=torch.float32, device="cpu")

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(self.views(flat.view(torch.uint8)).values())


def assign(num_elems: Sequence[int], num_servers: int) -> list[tuple[int, ...]]:
    """The numbers of each server's parameters: the largest first, to the server with the fewest
    elements, as ZeroRedundancyOptimizer does."""
    loads = [0] * num_servers
    shares: list[list[int]] = [[] for _ in range(num_servers)]
    for number in sorted(range(len(num_elems)), key=lambda number: -num_elems[number]):
        server = loads.index(min(loads))
        loads[server] += num_elems[number]
        shares[server].append(number)
    return [tuple(sorted(share)) for share in shares]


class PushLayout:
    """Where the parts of a push lie in a slot; the same on all ranks.

    They are "versions", of each shard as last pulled, and of each server "values" in the wire's
    format and, where kept, "base": the float32 parameters they were computed from.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], num_servers: int, wire: Wire, keeps_base: bool
    ) -> None:
        self.wire = wire
        self.keeps_base = keeps_base
        numbers = assign([shape.numel() for shape in shapes], num_servers)
        self.shares = [Share(share, shapes) for share in numbers]
        self.num_elems = sum(share.num_elems for share in self.shares)
        sections = {("versions", 0): (torch.int64, (num_servers,))}
        for server, share in enumerate(self.shares):
            num_bytes = wire.num_bytes(share.num_elems)
            sections["values", server] = (torch.uint8, (num_bytes,))
            if keeps_base:
                sections["base", server] = (torch.float32, (share.num_elems,))
        self.slot = AlignedLayout(sections)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat[: self.num_elems].split([share.num_elems for share in self.shares]))

    def by_number(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All parameters, in the flat shares (uint8 or float32) of all servers."""
        views: dict[int, torch.Tensor] = {}
        for share, flat in zip(self.shares, flats, strict=True):
            views |= share.views(flat.view(torch.uint8))
        return [views[number] for number in range(len(views))]


class Setup(NamedTuple):
    """What all ranks agree on, and this rank's functions."""

    world_size: int
    workers: Sequence[int]  # ranks, ascending
    servers: Sequence[int]  # by number of their shard
    layout: PushLayout
    # What an update is.
    mode: str  # "sync", "async" or "stale"
    average_weights: bool
    delay_compensation: float
    lr_lambda: Callable[[int], float] | None
    make_optimizer: MakeOptimizer | None  # None if weights are averaged
    error_feedback: bool
    num_replicas: int  # 0 or 1

    def standby_of(self, server: int) -> int:
        """The number of the server that goes on with a server's shard."""
        return (server + 1) % len(self.servers)

    def ward_of(self, server: int) -> int:
        """The number of the shard that a server would go on with."""
        return (server - 1) % len(self.servers)

    def shard_layout(self, server: int) -> AlignedLayout[str]:
        """The memory in which a shard is published: its two versions, and a note for each rank."""
        versions = NUM_SLOTS, self.layout.shares[server].num_elems
        notes = self.world_size, NOTE_BYTES
        return AlignedLayout({"versions": (torch.float32, versions), "notes": (torch.uint8, notes)})
