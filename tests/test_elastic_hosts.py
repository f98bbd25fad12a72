"""Members on several hosts, which ROTA_HOST_ID makes of one."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_workers import change_members, pids_of, serve, store_of
from hosts import Hosts
from ranks import Rank, check_error, error_of, on_ranks
from rota.elastic import Membership, State
from rota.shared.liveness import OwnProcess, Processes

pytestmark = pytest.mark.same_in_every_build


def serve_on_hosts(rank: Rank, port: int, num_members: int) -> None:
    """Ranks 0 and 2 are on one host, 1 and 3 on another."""
    os.environ["ROTA_HOST_ID"] = "left" if rank.rank % 2 == 0 else "right"
    serve(rank, port, num_members, {"rank": rank.rank})


@pytest.mark.parametrize("dying", [[1], [1, 3]], ids=["member", "whole-host"])
def test_members_are_killed_on_one_of_two_hosts(store: dist.TCPStore, dying: list[int]) -> None:
    change_members(store, 4, [(dying, 0)], serve_on_hosts)


def train_until_a_host_vanishes(rank: Rank) -> None:
    del os.environ["ROTA_HOST_SILENCE_MS"]
    membership = Membership(rank.make_store(), rank=rank.rank)
    generation = membership.next(min_members=3)
    rank.tell()
    error = error_of(lambda: [generation.is_over() for _ in range(10**9)])
    check_error(error, "PeerFailed", "rank 2")
    assert pids_of(membership.next()) == [rank.pid_of(0), rank.pid_of(1)]


@pytest.mark.parametrize("how", ["drop_traffic", "take_link_down"])
def test_host_that_vanishes_is_left_out(how: str) -> None:
    # No process has ended, so only unanswered probes can tell.
    with Hosts((2, 1)) as hosts, hosts.start(train_until_a_host_vanishes) as ranks:
        ranks.hear_all()
        began = time.monotonic()
        getattr(hosts, how)(1)
        for rank in (0, 1):
            ranks.hear_result(rank)
        assert time.monotonic() - began < 15  # a hang; it takes 5 s
        ranks.kill(2)
        ranks.results(killed=[2])


@on_ranks(3)
def test_state_is_copied_within_and_between_hosts(rank: Rank, port: int) -> None:
    """Rank 0 has the state; of the others, which come later, one is on its host."""
    os.environ["ROTA_HOST_ID"] = "left" if rank.rank % 2 == 0 else "right"
    membership = Membership(store_of(port), rank=rank.rank)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    state = State(model=model, optimizer=optimizer)
    if rank.rank == 0:
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
    has_copied = state.synchronize(membership.next(min_members=3), check_equal=True)
    assert has_copied == (rank.rank > 0)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert model.weight.eq(0.25).all() and momentum.eq(2.0).all()


def test_processes_of_other_hosts_are_watched_by_connections() -> None:
    own = OwnProcess("job", "127.0.0.1")
    others = [OwnProcess("job", "127.0.0.1") for _ in range(3)]
    handles = [dataclasses.replace(other.handle, host="another") for other in others]
    processes = Processes(own.handle)
    assert processes.gone(handles) == []
    others[0].tidy()  # accepts the connection
    assert processes.gone(handles) == []
    others[0].close()
    assert processes.gone(handles) == handles[:1]
    others[1].close()
    assert processes.gone(handles) == handles[:2]
    processes.keep_only([])
    others[2].tidy()
    assert others[2]._observers == []
    assert processes.is_alive(handles[2]) and not processes.is_alive(handles[0])
