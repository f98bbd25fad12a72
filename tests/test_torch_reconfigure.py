"""torch's reconfigure (torch 2.15 and newer) of the backend's default group."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from ranks import Rank, Ranks, check_error, error_of, on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_reconfigure"), reason="torch reconfigures from 2.15 on"
)


def start(rank: Rank) -> tuple[Any, str]:
    """The job's store, and this process's handle, which the others find there."""
    store = rank.make_store()
    dist.init_process_group("rota", store=store, rank=0, world_size=1, enable_reconfigure=True)
    assert dist.distributed_c10d._supports_reconfigure()
    handle = dist.distributed_c10d._get_reconfigure_handle()
    store.set(f"handle/{rank.rank}", handle)
    return store, handle


def handles_of(store: dist.Store, ranks: list[int]) -> list[str]:
    return [store.get(f"handle/{rank}").decode() for rank in ranks]


def reconfigure(uuid: int, handles: Any) -> None:
    dist.distributed_c10d._reconfigure(uuid=uuid, handles=handles).wait()


def total(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


@on_ranks(3)
def test_group_grows_and_shrinks(rank: Rank) -> None:
    store, _ = start(rank)
    check_error(error_of(total, 1.0), "RotaError", "call reconfigure")
    me = rank.rank
    if me < 2:
        reconfigure(1, handles_of(store, [1, 0]))
        assert (dist.get_rank(), dist.get_world_size()) == (1 - me, 2)
        assert total(me + 1.0) == 3
        comm = rota.Communicator()
        store.set(f"two/{me}", "")
    store.wait(["two/0", "two/1"])
    reconfigure(2, set(handles_of(store, [0, 1, 2])))
    assert dist.get_world_size() == 3
    assert total(me + 1.0) == 6
    if me < 2:
        with contextlib.suppress(RuntimeError):
            comm.close()
    # What is made from now on meets under new names, although ranks have counted differently.
    assert rota.Communicator().world_size == 3
    window = rota.Window(4)
    window.put(torch.ones(1), dist.get_rank(), 0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(half)
    dist.barrier()
    if me != 2:
        reconfigure(3, handles_of(store, [0, 1]))
        assert total(me + 1.0) == 3


def survive(rank: Rank) -> tuple[str, str] | None:
    store, _ = start(rank)
    reconfigure(1, handles_of(store, [0, 1, 2]))
    rank.tell()
    failed = error_of(total, 1.0)
    # The dead one is still among the members: fails on all, and another attempt is needed.
    again = error_of(reconfigure, 2, handles_of(store, [0, 1, 2]))
    assert again[0] == "PeerFailed", again
    reconfigure(3, handles_of(store, [0, 2]))
    assert total(1.0) == 2
    assert "was used before" in error_of(reconfigure, 3, handles_of(store, [0, 2]))[1]
    return failed


def wait_to_be_killed(rank: Rank) -> Any:
    if rank.rank != 1:
        return survive(rank)
    store, _ = start(rank)
    reconfigure(1, handles_of(store, [0, 1, 2]))
    rank.tell()
    rank.hear()
    return None


def test_survivors_go_on() -> None:
    with Ranks(3, wait_to_be_killed) as ranks:
        results = ranks.results_without(1)
    for rank in (0, 2):
        assert results[rank][0] == "PeerFailed"


@on_ranks(2)
def test_members_that_disagree_all_raise(rank: Rank) -> None:
    store, _ = start(rank)
    order = [0, 1] if rank.rank == 0 else [1, 0]
    error = error_of(reconfigure, 1, handles_of(store, order))
    reconfigure(2, handles_of(store, [0, 1]))
    assert total(1.0) == 2
    kind, text = error
    assert kind == "Mismatch" and text.count("says that the members are") == 2, text


@on_ranks(1)
def test_group_without_it_has_fixed_members(rank: Rank) -> None:
    rank.init()
    assert not dist.distributed_c10d._supports_reconfigure()
    error = error_of(dist.distributed_c10d._get_reconfigure_handle)
    check_error(error, "NotImplementedError", "enable_reconfigure=True")
