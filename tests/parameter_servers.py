"""Small trainings through ParameterServer, for several tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import batch_of
from ranks import Rank, kill_self
from rota.parameter_server import ParameterServer
from rota.parameter_server.replica import Replica
from rota.parameter_server.shard import ServerShard

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    # lr=1 on gradients of integers: parameters are exact sums.
    "sum": lambda p: torch.optim.SGD(p, lr=1.0),
}

# Where kill_at() has a server die.
POINTS = ["stepped", "published", "half-saved", "saved"]
_KILLED_AT = 5  # the update


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def counters(world_size: int, num_elems: int = 1) -> list[nn.Parameter]:
    """Two parameters with a row per rank; count_gradient() counts pushes in them, see counted()."""
    return [nn.Parameter(torch.zeros(world_size, n)) for n in (num_elems, 5)]


def count_gradient(parameters: list[nn.Parameter], rank: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[rank] = -1


def counted(parameters: list[nn.Parameter]) -> list[list[int]]:
    """The pushes of each rank that each parameter has; no push may be there in part."""
    counts = []
    for parameter in parameters:
        assert (parameter == parameter[:, :1]).all(), "half a push, or half a version"
        counts.append([int(count) for count in parameter[:, 0]])
    return counts


def backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(batch_of(rank, step)).square().mean().backward()


def dawdle(generator: random.Random) -> None:
    time.sleep(generator.choice([0, 0, 0.001, 0.004]))


def settle(server: ParameterServer) -> None:
    """Gives all workers the same parameters, with all pushes. Collective over the default group."""
    server.flush()
    dist.barrier()
    server.pull()


def init(rank: Rank) -> None:
    torch.set_num_threads(1)
    rank.init("gloo")


def kill_at(point: str | None) -> None:
    """Has this server die at a point of an update, or at none."""
    save, finish, step = Replica.save, Replica.finish, ServerShard._step

    def finish_or_die(self: Replica, number: int) -> None:
        if number == _KILLED_AT + 1 and point == "half-saved":
            kill_self()
        finish(self, number)

    def save_or_die(self: Replica, version: int, *args: Any) -> None:
        is_it = version == _KILLED_AT + 1
        if is_it and point == "published":
            kill_self()
        save(self, version, *args)
        if is_it and point == "saved":
            kill_self()

    def step_or_die(self: ServerShard) -> None:
        step(self)
        if self.version == _KILLED_AT and point == "stepped":
            kill_self()

    Replica.save = save_or_die
    Replica.finish = finish_or_die
    ServerShard._step = step_or_die
