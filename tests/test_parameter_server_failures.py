"""ParameterServer when a rank is killed, stops or fails: the others go on, or know why not."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parameter_servers import OPTIMIZERS, flat, init, kill_at
from ranks import Rank, Ranks, check_error, error_of, on_ranks
from rota.parameter_server import ParameterServer

pytestmark = pytest.mark.same_in_every_build

FOREVER = 10**9
NUM_SURE = 20  # pushes of every worker before one is killed
NUM_STEPS = 50


def push_and_see_one_killed(
    rank: Rank, mode: str, victim: int, is_idle: bool, servers: list[int] | None
) -> Any:
    """All gradients are 6, and so is the mean of any of them."""
    init(rank)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (20_000, 7, 500)]
    staleness = 1 if mode == "stale" else None
    server = ParameterServer(
        parameters, OPTIMIZERS["sum"], mode=mode, staleness=staleness, servers=servers
    )
    group = dist.new_group([worker for worker in server.workers if worker != victim])
    if not server.is_worker:
        return server.serve()
    gradients = [torch.full_like(parameter, 6.0) for parameter in parameters]
    for step in range(FOREVER if rank.rank == victim else NUM_STEPS):
        if step == NUM_SURE:
            rank.tell()
            if rank.rank == victim and is_idle:
                rank.hear()
        server.step(gradients)
    server.flush()
    dist.barrier(group)
    server.pull()
    server.close()
    for parameter in parameters:
        assert (parameter == parameter[0]).all(), "half a push, or half a version"
    return {-float(parameter[0]) / 6 for parameter in parameters}


@pytest.mark.parametrize(
    ("mode", "is_idle", "world_size", "victim", "servers"),
    [
        # Two servers, which must agree on what the victim has pushed.
        *(
            (mode, is_idle, 5, 2, [0, 3])
            for mode in ("sync", "async", "stale")
            for is_idle in (True, False)
        ),
        ("sync", False, 3, 0, None),
        ("sync", False, 3, 2, None),
    ],
)
def test_clock_of_a_killed_worker_is_released(
    mode: str, is_idle: bool, world_size: int, victim: int, servers: list[int] | None
) -> None:
    with Ranks(world_size, push_and_see_one_killed, mode, victim, is_idle, servers) as ranks:
        ranks.hear(victim)
        ranks.kill(victim)
        results = ranks.results(killed=[victim])
    of_survivors = [result for result in results if result is not None]
    assert len(of_survivors) == 2
    (num_pushes,) = set().union(*of_survivors)  # servers and workers agree
    if mode == "sync":
        assert num_pushes == NUM_STEPS
    else:
        of_victim = num_pushes - len(of_survivors) * NUM_STEPS
        assert of_victim == NUM_SURE if is_idle else of_victim >= NUM_SURE


@on_ranks(3, killed=[2])
def test_killed_server_without_a_replica_is_named(rank: Rank) -> None:
    init(rank)
    pids: list[Any] = [None] * rank.world_size
    dist.all_gather_object(pids, os.getpid())
    if rank.rank == 2:
        kill_at("stepped")
    parameters = [nn.Parameter(torch.zeros(5)) for _ in range(3)]
    server = ParameterServer(parameters, OPTIMIZERS["sum"], servers=[2])
    if not server.is_worker:
        return server.serve()

    def step_forever() -> None:
        while True:
            server.step([torch.ones(5)] * 3)

    error, later_error = error_of(step_forever), error_of(server.pull)
    check_error(error, "PeerFailed", f"server rank 2 (pid {pids[2]})")
    assert error[1].startswith("rota.ParameterServer.") and later_error[0] == "PeerFailed"
    server.close()


@on_ranks(4, killed=[0])
def test_weight_averaging_goes_on_when_a_server_is_killed(rank: Rank) -> None:
    init(rank)
    if rank.rank == 0:
        kill_at("published")
    parameters = [nn.Parameter(torch.zeros(50)) for _ in range(2)]
    server = ParameterServer(parameters, None, servers=[0, 2], average_weights=True)
    if not server.is_worker:
        return server.serve()
    for step in range(12):
        server.step([torch.full((50,), step + rank.rank / 2.0)] * 2)
        assert torch.equal(flat(parameters), torch.full((100,), step + 1.0))
    server.close()


@on_ranks(2)
def test_timeout_names_the_workers_that_are_behind(rank: Rank) -> None:
    init(rank)
    server = ParameterServer([nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"])
    if rank.rank == 0:
        patience, server._timeout = server._timeout, timedelta(seconds=0.3)
        server.push([torch.ones(5)])
        check_error(error_of(server.pull), "Timeout", "workers [1] have pushed less often")
        check_error(error_of(server.close), "Timeout", "for workers [1] to close")
        server._timeout = patience
    dist.barrier()
    if rank.rank == 1:
        server.push([torch.ones(5)])
    server.close()


class BadOptimizer(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        raise ArithmeticError("the optimizer fails")


@pytest.mark.parametrize("servers", [None, [0]], ids=["every", "dedicated"])
@on_ranks(2)
def test_error_of_an_optimizer_is_that_of_its_server(rank: Rank, servers: list[int] | None) -> None:
    init(rank)
    parameters = [nn.Parameter(torch.zeros(5))]  # on the first server only
    server = ParameterServer(
        parameters, lambda p: BadOptimizer(p, lr=1.0), servers=servers, mode="async", replicas=0
    )
    if server.is_worker:
        server.push([torch.ones(5)])
    error = error_of(server.flush if server.is_worker else server.serve)
    if rank.rank == 0:
        assert error == ("ArithmeticError", "the optimizer fails")
    else:
        check_error(error, "PeerFailed", "server rank 0")
        error_of(server.close)


class Growing(torch.optim.SGD):
    """Its state has another tensor after the second step."""

    def step(self, closure: object = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["more" if state else "some"] = torch.zeros(3)


@on_ranks(3)
def test_optimizer_state_that_grows_is_refused_with_the_remedy(rank: Rank) -> None:
    init(rank)
    server = ParameterServer(
        [nn.Parameter(torch.zeros(3))], lambda p: Growing(p, lr=1.0), servers=[0, 2], mode="async"
    )
    if not server.is_worker:
        error = error_of(server.serve)
        return rank.rank == 2 or check_error(error, "RuntimeError", "pass replicas=0")

    def push() -> None:
        for _ in range(20):
            server.step([torch.ones(3)])

    assert error_of(push)[0] in ("PeerFailed", "nothing")
    server.close()


@pytest.mark.parametrize("where", ["pull", "close", "serve"])
@on_ranks(2)
def test_ctrl_c_in_a_wait_raises_keyboard_interrupt(rank: Rank, where: str) -> None:
    """And the process ends, though it still serves."""
    init(rank)
    waiting = 1 if where == "serve" else 0
    servers = [1] if where == "serve" else None
    server = ParameterServer([nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"], servers=servers)
    if rank.rank == waiting:
        calls = {
            "serve": server.serve,
            "pull": lambda: server.step([torch.ones(5)]),
            "close": server.close,
        }
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert error_of(calls[where])[0] == "KeyboardInterrupt"
        rank.say()
    rank.await_word()


@pytest.mark.parametrize("replicas", [0, 1])
@on_ranks(2)
def test_exception_within_leaves_at_once(rank: Rank, replicas: int) -> None:
    """Rank 1 leaves by an exception, and does not wait for rank 0, which needs its server."""
    init(rank)
    parameters = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))]

    def use() -> None:
        with ParameterServer(parameters, OPTIMIZERS["sum"], replicas=replicas) as server:
            server.step([torch.ones(5)] * 2)
            if rank.rank == 1:
                raise LookupError("no data")
            server.step([torch.ones(5)] * 2)
            assert torch.equal(torch.cat(parameters), torch.full((10,), -2.0))

    error = error_of(use)
    if rank.rank == 1:
        assert error == ("LookupError", "no data")
    elif replicas == 0:
        check_error(error, "PeerFailed", "server rank 1")
    else:
        assert error[0] == "nothing", error[1]


@on_ranks(2)
def test_process_ends_without_close(rank: Rank) -> None:
    init(rank)
    server = ParameterServer([nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"])
    server.step([torch.ones(5)])
    globals()["kept"] = server  # until Python ends
