"""Where torch asks for a backend's name, and what rota gets there (docs/trainers.md has the table):
the results of Gloo, by other calls."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as autograd
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from models import make_model
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from test_training_stacks import run_on, train


def autograd_collectives(rank: Rank) -> list[Any]:
    """all_gather's backward pass and all_to_all have a way of their own for NCCL, and for Gloo."""
    weights = torch.arange(12.0) * (rank.rank + 1)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: torch.cat(autograd.all_gather(x)) * weights,
        lambda x: torch.cat(autograd.all_to_all(list(torch.empty(2, 3)), list(x.chunk(2)))),
        lambda x: autograd.all_to_all_single(torch.empty(6), x) * weights[:6],
        lambda x: autograd.reduce_scatter(torch.empty(3), list(x.chunk(2))) * weights[:3],
        lambda x: autograd.all_reduce(x) * weights[:6],
        lambda x: autograd.broadcast(x, 1),
        lambda x: autograd.scatter([x, x * 2], 1),
    ]
    results: list[Any] = []
    for call in calls:
        source = (torch.arange(6.0) + rank.rank).requires_grad_()
        result = call(source)
        result.sum().backward()
        results += [result.tolist(), source.grad.tolist() if source.grad is not None else None]
    source = torch.ones(3, requires_grad=True)
    whole = autograd._all_gather_base(torch.empty(6), source)
    return [*results, error_of(lambda: whole.sum().backward())]  # is for NCCL only


def objects_and_groups(rank: Rank) -> list[Any]:
    """Objects travel on the CPU; new groups have the backend of the old one."""
    other: list[Any] = [{"rank": rank.rank}]
    dist.broadcast_object_list(other, 1)
    everyones: list[Any] = [None] * 2
    dist.all_gather_object(everyones, ("text", rank.rank))
    gathered: list[Any] | None = [None] * 2 if rank.rank == 0 else None
    dist.gather_object(rank.rank, gathered, 0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank.rank == 0 else None, 0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    groups = [
        dist.new_group([0, 1]),
        dist.new_subgroups(1)[0],
        dist.new_subgroups_by_enumeration([[0], [1]])[0],
        mesh.get_group("outer"),
        mesh.get_group("inner"),
    ]
    sums = []
    for group in groups:
        assert dist.get_backend(group) == dist.get_backend()
        dist.all_reduce(tensor := torch.ones(3), group=group)
        sums.append(tensor.tolist())
    rows = list(DataLoader(IterableWrapper(range(4)).shuffle(), batch_size=None))
    return [other, everyones, gathered, scattered, sums, sorted(rows)]


def fsdp_of_torch_1(rank: Rank) -> list[Any]:
    """HYBRID_SHARD makes groups by the name of the old one's backend."""
    warnings.simplefilter("ignore")  # torch advises against it
    losses: list[Any] = []
    for strategy in ShardingStrategy:
        if strategy == ShardingStrategy._HYBRID_SHARD_ZERO2:
            continue
        is_hybrid = strategy == ShardingStrategy.HYBRID_SHARD
        groups = (dist.new_subgroups(1)[0], dist.group.WORLD) if is_hybrid else None
        model = FullyShardedDataParallel(
            make_model(),
            process_group=groups,
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
        )
        losses += train(model, torch.optim.SGD(model.parameters(), 0.1), rank.rank)
        losses.append(model.clip_grad_norm_(1.0).item())
    return losses


@pytest.mark.parametrize("part", [autograd_collectives, objects_and_groups, fsdp_of_torch_1])
def test_what_asks_for_the_name_gloo_has_the_same_results_on_rota(
    part: Callable[[Rank], list[Any]],
) -> None:
    on_rota, on_gloo = (run_ranks(2, run_on, backend, part) for backend in ("rota", "gloo"))
    assert on_rota == on_gloo


@on_ranks(2)
def test_checkpoint_is_saved_by_a_process_on_gloo(rank: Rank, tmp_path: Path) -> None:
    multiprocessing.current_process()._config["daemon"] = False
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # the saving processes meet there
    torch.set_num_threads(1)
    rank.init()
    model = make_model()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 0)
    kind = AsyncCheckpointerType.PROCESS
    state = {"model": model.state_dict()}
    future: Any = dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=kind)
    future.result()
    loaded = {"model": make_model().state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded["model"][name], value)


@on_ranks(2)
def test_sharded_tensor_is_gathered_on_the_cpu_of_a_group_for_the_cpu(rank: Rank) -> None:
    """In a group with a backend for more than the CPU, it asks for a GPU."""
    rank.init("cpu:rota")
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    tensor = sharded_tensor.zeros(spec, 4, 3)
    tensor.local_shards()[0].tensor.fill_(rank.rank + 1)
    whole = torch.empty(4, 3) if rank.rank == 0 else None
    tensor.gather(0, whole)
    assert whole is None or whole.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2


@on_ranks(2)
def test_what_torch_refuses_to_other_backends_the_group_itself_does(rank: Rank) -> None:
    rank.init()
    refused = error_of(dist.monitored_barrier)
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    group.set_timeout(timedelta(seconds=8))
    check_error(refused, "ValueError", "GLOO")
    (warning,) = caught
    assert "nccl or gloo" in str(warning.message)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=8)
