"""Timeouts that are longer than a clock can count, and ends that wait in vain."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from ranks import Rank, check_error, error_of, on_ranks
from rota.parameter_server import ParameterServer
from rota.weights import WeightStore


@pytest.mark.parametrize("timeout", [timedelta.max, timedelta(days=365 * 1000)], ids=["max", "ky"])
@on_ranks(2)
def test_timeouts_longer_than_clocks_count_do_not_end_at_once(
    rank: Rank, timeout: timedelta
) -> None:
    """Rank 1 waits for rank 0 in each call."""
    store = rank.make_store()
    dist.init_process_group(
        "rota", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout
    )
    one = torch.ones(1)

    def come_late() -> None:
        if rank.rank == 0:
            time.sleep(0.02)

    for group in (None, dist.new_group(timeout=timeout)):
        dist.barrier(group)
        come_late()
        dist.all_reduce(one, group=group)
        come_late()
        assert dist.all_reduce(one, group=group, async_op=True).wait(timeout)
        come_late()
        if rank.rank == 0:
            dist.send(one, 1, group)
        else:
            dist.irecv(one, 0, group).wait(timeout)
    for given in (timeout, None):
        come_late()
        communicator = rota.Communicator(timeout=given)
        come_late()
        communicator.barrier()
        come_late()
        window = rota.Window(4, timeout=given)
        come_late()
        if rank.rank == 0:
            window.signal(1)
        else:
            window.wait_signal(0, timeout=given)
            window.signal(1)
            window.wait_any_signal([1], timeout=given)
        come_late()
        server = ParameterServer(
            [nn.Parameter(torch.ones(3))], lambda p: torch.optim.SGD(p, 1.0), timeout=given
        )
        come_late()
        server.push([one.new_ones(3)])
        server.pull()
        server.close()
        weights = WeightStore(store, f"{given}", group=dist.group.WORLD, timeout=given)
        come_late()
        weights.publish(1, {f"{rank.rank}": one})
        assert WeightStore(store, f"{given}", timeout=given).pull(timeout=given)[0] == 1
        dist.barrier()


@on_ranks(2)
def test_end_that_waits_in_vain_raises_timeout(rank: Rank) -> None:
    rank.init(timeout_s=1.0)
    communicator = rota.Communicator()
    dist.barrier()
    communicator.barrier()
    if rank.rank == 1:
        rank.await_word()
        return
    tensor = torch.ones(1 << 22)
    works = [communicator.isend(tensor, 1), dist.isend(tensor, 1)]
    errors = [error_of(communicator.close), error_of(dist.destroy_process_group)]
    del works
    rank.say()
    for error in errors:
        check_error(error, "Timeout", "rank 1")
