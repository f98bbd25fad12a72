"""A server of ParameterServer that is killed: another goes on, and no push is lost or doubled.

A server kills itself at a chosen point of an update, so that every point is tested.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from models import make_model
from parameter_servers import (
    OPTIMIZERS,
    backward,
    count_gradient,
    counted,
    counters,
    dawdle,
    flat,
    init,
)
from ranks import Rank, Ranks, check_error, error_of
from rota.parameter_server import ParameterServer
from rota.parameter_server.replica import Replica
from rota.parameter_server.shard import ServerShard

pytestmark = pytest.mark.same_in_every_build

NUM_STEPS = 12
SERVERS, WORKERS = [0, 2], [1, 3]
KILLED_AT = 5  # the update
SERVED = "served"


def kill_at(point: str) -> None:
    """Has this server die in its update number KILLED_AT."""
    save, finish, step = Replica.save, Replica.finish, ServerShard._step

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def finish_or_die(self: Replica, number: int) -> None:
        if number == KILLED_AT + 1 and point == "half-saved":
            die()
        finish(self, number)

    def save_or_die(self: Replica, version: int, *args: Any) -> None:
        is_it = version == KILLED_AT + 1
        if is_it and point == "published":
            die()
        save(self, version, *args)
        if is_it and point == "saved":
            die()

    def step_or_die(self: ServerShard) -> None:
        step(self)
        if self.version == KILLED_AT and point == "stepped":
            die()

    Replica.save = save_or_die  # type: ignore[method-assign]
    Replica.finish = finish_or_die  # type: ignore[method-assign]
    ServerShard._step = step_or_die  # type: ignore[method-assign]


POINTS = ["stepped", "published", "half-saved", "saved"]


def train_beside_all_reduce(rank: Rank, point: str, optimizer: str) -> str:
    init(rank)
    if rank.rank == SERVERS[0]:
        kill_at(point)
    model = make_model()
    server = ParameterServer(
        model, OPTIMIZERS[optimizer], servers=SERVERS, lr_lambda=lambda i: 1 / (1 + i)
    )
    group = dist.new_group(WORKERS)
    if not server.is_worker:
        server.serve()
        return SERVED
    expected = make_model()
    expected_optimizer = OPTIMIZERS[optimizer](expected.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(expected_optimizer, lambda i: 1 / (1 + i))
    communicator = rota.Communicator(group)
    for step in range(NUM_STEPS):
        backward(expected, rank.rank, step)
        for parameter in expected.parameters():
            assert parameter.grad is not None
            communicator.all_reduce(parameter.grad, "avg")
        expected_optimizer.step()
        scheduler.step()
        backward(model, rank.rank, step)
        server.step()
        assert torch.equal(flat(model.parameters()), flat(expected.parameters())), f"step {step}"
    server.close()
    return "trained"


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("point", POINTS)
def test_sync_keeps_its_bits_when_a_server_is_killed(point: str, optimizer: str) -> None:
    with Ranks(4, train_beside_all_reduce, point, optimizer) as ranks:
        assert ranks.results(killed=[SERVERS[0]]) == [None, "trained", SERVED, "trained"]


def count_pushes(rank: Rank, mode: str, point: str) -> Any:
    init(rank)
    if rank.rank == SERVERS[0]:
        kill_at(point)
    parameters = counters(rank.world_size, 1000)
    server = ParameterServer(
        parameters,
        OPTIMIZERS["sum"],
        servers=SERVERS,
        mode=mode,
        staleness=1 if mode == "stale" else None,
    )
    group = dist.new_group(WORKERS)
    if not server.is_worker:
        server.serve()
        return SERVED
    generator = random.Random(rank.rank)
    for _ in range(NUM_STEPS):
        dawdle(generator)
        count_gradient(parameters, rank.rank)
        server.step()
    server.flush()
    dist.barrier(group)
    server.pull()
    counts = counted(parameters)
    server.close()
    return counts


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("mode", ["async", "stale"])
def test_every_push_is_applied_once_when_a_server_is_killed(mode: str, point: str) -> None:
    with Ranks(4, count_pushes, mode, point) as ranks:
        results = ranks.results(killed=[SERVERS[0]])
    assert [results[server] for server in SERVERS] == [None, SERVED]  # the first did die
    for worker in WORKERS:
        assert results[worker] == [[0, NUM_STEPS, 0, NUM_STEPS]] * 2


def average_weights(rank: Rank) -> str:
    init(rank)
    if rank.rank == SERVERS[0]:
        kill_at("published")
    parameters = [nn.Parameter(torch.zeros(50)) for _ in range(2)]
    server = ParameterServer(parameters, None, servers=SERVERS, average_weights=True)
    if not server.is_worker:
        server.serve()
        return SERVED
    for step in range(NUM_STEPS):
        server.step([torch.full((50,), step + rank.rank / 2.0)] * 2)
        assert torch.equal(flat(parameters), torch.full((100,), step + 1.0))
    server.close()
    return "trained"


def test_weight_averaging_goes_on_when_a_server_is_killed() -> None:
    with Ranks(4, average_weights) as ranks:
        assert ranks.results(killed=[SERVERS[0]]) == [None, "trained", SERVED, "trained"]


def work_and_serve(rank: Rank, victim: int) -> Any:
    """Every rank is a worker and a server; all gradients are 6, as is their mean."""
    init(rank)
    parameters = [nn.Parameter(torch.zeros(500)) for _ in range(rank.world_size)]
    server = ParameterServer(parameters, OPTIMIZERS["sum"])
    gradients = [torch.full((500,), 6.0)] * rank.world_size
    for step in range(10**9 if rank.rank == victim else 60):
        if step == 20:
            rank.tell()
        server.step(gradients)
    server.close()
    return sorted({-float(value) for value in flat(parameters)})


@pytest.mark.parametrize("victim", [0, 2])
def test_sync_goes_on_when_a_rank_that_works_and_serves_is_killed(victim: int) -> None:
    with Ranks(3, work_and_serve, victim) as ranks:
        ranks.hear(victim)
        ranks.kill(victim)
        results = ranks.results(killed=[victim])
    survivors = [rank for rank in range(3) if rank != victim]
    assert [results[rank] for rank in survivors] == [[6.0 * 60]] * 2


class Growing(torch.optim.SGD):
    """Its state has another tensor after the second step."""

    def step(self, closure: object = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["more" if state else "some"] = torch.zeros(3)


def use_growing(rank: Rank) -> tuple[str, str]:
    init(rank)
    server = ParameterServer(
        [nn.Parameter(torch.zeros(3))], lambda p: Growing(p, lr=1.0), servers=[0, 2], mode="async"
    )
    if not server.is_worker:
        return error_of(server.serve)

    def push() -> None:
        for _ in range(20):
            server.step([torch.ones(3)])

    error = error_of(push)
    server.close()
    return error


def test_optimizer_state_that_grows_is_refused_with_the_remedy() -> None:
    with Ranks(3, use_growing) as ranks:
        first, worker, _ = ranks.results()
    check_error(first, "RuntimeError", "pass replicas=0")
    assert worker[0] in ("PeerFailed", "nothing")
