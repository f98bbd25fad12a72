"""ParameterServer when a rank is killed, stops or fails: the others go on, or know why not."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parameter_servers import OPTIMIZERS, init
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks
from rota.parameter_server import ParameterServer

pytestmark = pytest.mark.same_in_every_build

FOREVER = 10**9
NUM_SURE = 20  # pushes of every worker before one is killed
NUM_STEPS = 50
# Two servers, which must agree on what the victim has pushed.
SERVERS, VICTIM, SURVIVORS = [0, 3], 2, [1, 4]


def push_and_see_one_killed(rank: Rank, mode: str, is_idle: bool) -> Any:
    """All gradients are 6, and so is the mean of any of them."""
    init(rank)
    parameters = [nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(7))]
    server = ParameterServer(
        parameters,
        OPTIMIZERS["sum"],
        mode=mode,
        staleness=1 if mode == "stale" else None,
        servers=SERVERS,
    )
    group = dist.new_group(SURVIVORS)
    if not server.is_worker:
        server.serve()
        return None
    gradients = [torch.full_like(parameter, 6.0) for parameter in parameters]
    for step in range(FOREVER if rank.rank == VICTIM else NUM_STEPS):
        if step == NUM_SURE:
            rank.tell()
            if rank.rank == VICTIM and is_idle:
                rank.hear()
        server.step(gradients)
    server.flush()
    dist.barrier(group)
    server.pull()
    server.close()
    for parameter in parameters:
        assert (parameter == parameter[0]).all(), "half a push, or half a version"
    return [-float(parameter[0]) / 6 for parameter in parameters]


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "pushing"])
@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
def test_clock_of_a_killed_worker_is_released(mode: str, is_idle: bool) -> None:
    with Ranks(5, push_and_see_one_killed, mode, is_idle) as ranks:
        ranks.hear(VICTIM)
        ranks.kill(VICTIM)
        results = ranks.results(killed=[VICTIM])
    (first, second), other = (results[rank] for rank in SURVIVORS)
    assert [first, second] == other
    assert first == second, "the servers disagree on the victim's pushes"
    if mode == "sync":
        assert first == NUM_STEPS
    else:
        of_victim = first - len(SURVIVORS) * NUM_STEPS
        assert of_victim == NUM_SURE if is_idle else of_victim >= NUM_SURE


def see_a_server_killed(rank: Rank) -> Any:
    init(rank)
    parameters = [nn.Parameter(torch.zeros(5)) for _ in range(3)]
    server = ParameterServer(parameters, OPTIMIZERS["sum"], servers=[2])
    if not server.is_worker:
        rank.tell()
        return server.serve()

    def step_forever() -> None:
        for step in range(FOREVER):
            if step == NUM_SURE:
                rank.tell()
            server.step([torch.ones(5)] * 3)

    errors = [error_of(step_forever), error_of(server.pull)]
    server.close()
    return errors


def test_killed_server_without_a_replica_is_named() -> None:
    with Ranks(3, see_a_server_killed) as ranks:
        for rank in (0, 1):
            ranks.hear(rank)
        ranks.kill(2)
        results = ranks.results(killed=[2])
        pid = ranks.pid(2)
    for (error, text), (later_error, _) in results[:2]:
        assert error == later_error == "PeerFailed", text
        assert f"server rank 2 (pid {pid})" in text and text.startswith("rota.ParameterServer.")


def wait_for_a_slow_worker(rank: Rank) -> Any:
    init(rank)
    server = ParameterServer([nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"])
    errors = []
    if rank.rank == 0:
        patience, server._timeout = server._timeout, timedelta(seconds=0.3)
        server.push([torch.ones(5)])
        errors = [error_of(server.pull), error_of(server.close)]
        server._timeout = patience
    dist.barrier()
    if rank.rank == 1:
        server.push([torch.ones(5)])
    server.close()
    return errors


def test_timeout_names_the_workers_that_are_behind() -> None:
    (pull, close), _ = run_ranks(2, wait_for_a_slow_worker)
    check_error(pull, "Timeout", "workers [1] have pushed less often")
    check_error(close, "Timeout", "for workers [1] to close")


class BadOptimizer(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        raise ArithmeticError("the optimizer fails")


def use_bad_optimizer(rank: Rank, servers: list[int] | None) -> Any:
    init(rank)
    parameters = [nn.Parameter(torch.zeros(5))]  # on the first server only
    server = ParameterServer(
        parameters, lambda p: BadOptimizer(p, lr=1.0), servers=servers, mode="async", replicas=0
    )
    if not server.is_worker:
        return error_of(server.serve)
    server.push([torch.ones(5)])
    error = error_of(server.flush)
    error_of(server.close)
    return error


@pytest.mark.parametrize("servers", [None, [0]], ids=["every", "dedicated"])
def test_error_of_an_optimizer_is_raised_on_its_server(servers: list[int] | None) -> None:
    own, other = run_ranks(2, use_bad_optimizer, servers)
    assert own == ("ArithmeticError", "the optimizer fails")
    check_error(other, "PeerFailed", "server rank 0")


def be_interrupted(rank: Rank, where: str) -> None:
    init(rank)
    server = ParameterServer(
        [nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"], servers=[1] if where == "serve" else None
    )
    if rank.rank == (1 if where == "serve" else 0):
        rank.tell()
        calls = {
            "serve": server.serve,
            "pull": lambda: server.step([torch.ones(5)]),
            "close": server.close,
        }
        rank.tell(error_of(calls[where])[0])
    rank.hear()


@pytest.mark.parametrize("where", ["pull", "close", "serve"])
def test_ctrl_c_in_a_wait_raises_keyboard_interrupt(where: str) -> None:
    """And the process ends, though it still serves."""
    waiting = 1 if where == "serve" else 0
    with Ranks(2, be_interrupted, where) as ranks:
        ranks.hear(waiting)
        time.sleep(0.3)  # nothing shows from outside whether a rank waits
        ranks.kill(waiting, signal.SIGINT)
        assert ranks.hear(waiting) == "KeyboardInterrupt"
        for rank in range(2):
            ranks.tell(rank)
        ranks.results()


def raise_within(rank: Rank, replicas: int) -> Any:
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

    return error_of(use)


@pytest.mark.parametrize("replicas", [0, 1])
def test_exception_within_leaves_at_once(replicas: int) -> None:
    first, second = run_ranks(2, raise_within, replicas)
    assert second == ("LookupError", "no data")
    if replicas == 0:
        check_error(first, "PeerFailed", "server rank 1")
    else:
        assert first[0] == "nothing", first[1]


@on_ranks(2)
def test_process_ends_without_close(rank: Rank) -> None:
    init(rank)
    server = ParameterServer([nn.Parameter(torch.zeros(5))], OPTIMIZERS["sum"])
    server.step([torch.ones(5)])
    globals()["kept"] = server  # until Python ends
