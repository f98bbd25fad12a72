"""Training over several hosts: DDP with a narrow wire between hosts, Local SGD, hybrid shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import rota
import rota.fsdp
import test_fsdp
import test_local_sgd
from models import SMALL_BUCKETS_MB, batch_of, make_model
from oracle import assert_same, name_of
from ranks import Rank
from several_hosts import TWO_BY_TWO, Layout, on_layout

# ---- HookState(inter_wire_dtype=...)


INTER_WIRES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def train(rank: Rank, register: Callable[[DistributedDataParallel], None]) -> torch.Tensor:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SMALL_BUCKETS_MB)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch_of(rank.rank, step)).square().mean().backward()
        optimizer.step()
    return parameters_to_vector(ddp.parameters()).detach()


# DDP compares the annotations of a hook with the types themselves, which strings are not.
def average_over(group, bucket):  # type: ignore[no-untyped-def]
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@on_layout(TWO_BY_TWO)
def test_inter_wire_dtype_of_a_hook_has_the_bits_of_the_backend_option(rank: Rank) -> None:
    rank.init()
    exactly = train(rank, lambda ddp: ddp.register_comm_hook(None, rota.allreduce_hook))
    for wire in INTER_WIRES:
        state = rota.HookState(inter_wire_dtype=wire)
        with_hook = train(rank, lambda ddp: ddp.register_comm_hook(state, rota.fused_hook))  # noqa: B023
        options = rota.BackendOptions(
            inter_wire_dtype=wire, inter_block_scaling=wire != torch.bfloat16
        )
        group = dist.new_group(backend="rota", pg_options=options)
        with_option = train(rank, lambda ddp: ddp.register_comm_hook(group, average_over))  # noqa: B023
        assert_same(with_hook, with_option, name_of(wire))
        assert not torch.equal(with_hook, exactly), f"{wire} rounds nothing"


@on_layout(TWO_BY_TWO)
def test_hook_feeds_back_what_a_host_lost(rank: Rank) -> None:
    """One parameter is one bucket, so its scaled blocks and residual are known."""
    communicator = rank.communicator()
    num_elems = 1000
    for wire in INTER_WIRES:
        results = {}
        for feedback in (False, True):
            ddp = DistributedDataParallel(nn.Linear(num_elems, 1, bias=False))
            state = rota.HookState(inter_wire_dtype=wire, error_feedback=feedback, model=ddp)
            ddp.register_comm_hook(state, rota.fused_hook)
            residual = torch.zeros(num_elems) if feedback else None
            for step in range(4):
                torch.manual_seed(10 * step + rank.rank)
                batch = torch.randn(1, num_elems)
                ddp.zero_grad()
                ddp(batch).sum().backward()  # whose gradient is the batch
                expected = batch.flatten()
                communicator.reduce_bucket(
                    expected,
                    torch.zeros(2, dtype=torch.float64),
                    wire_dtype=wire,
                    block_scaling=wire != torch.bfloat16,
                    divisor=rank.world_size,
                    residual=residual,
                )
                gradient = ddp.module.weight.grad.flatten()
                assert_same(gradient, expected, f"{wire}, feedback {feedback}, step {step}")
            results[feedback] = gradient
        assert not torch.equal(results[False], results[True]), f"{wire}: nothing is fed back"


# ---- Local SGD and DiLoCo


@pytest.mark.parametrize(
    "name",
    [
        "test_outer_reduction_has_the_bits_of_the_communicator",
        "test_every_step_with_exact_sums_has_the_bits_of_ddp",
    ],
)
@on_layout(TWO_BY_TWO)
def test_local_sgd_over_hosts(rank: Rank, name: str) -> None:
    """A test that knows of ranks only."""
    getattr(test_local_sgd, name).body(rank)
    assert rota.Communicator().hosts == rank.layout.hosts


# ---- FSDP2, sharded within a host and replicated between hosts


def train_hybrid(rank: Rank, num_hosts: int) -> list[bytes]:
    rank.init()
    assert len(rota.Communicator().hosts) == num_hosts
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for wire in (None, torch.bfloat16):
        model = test_fsdp.shard(test_fsdp.make_model(), mesh)
        if wire is not None:
            rota.fsdp.use(model, wire)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)  # type: ignore[attr-defined]
        test_fsdp.train(model, optimizer, rank.rank)  # type: ignore[arg-type]
        for parameter in model.parameters():  # type: ignore[attr-defined]
            results.append(parameter.full_tensor().detach().numpy().tobytes())
    return results


def test_hybrid_shard_over_hosts_has_the_bits_of_one_host() -> None:
    results = TWO_BY_TWO.run(train_hybrid, 2)
    assert results == Layout((0, 0, 0, 0)).run(train_hybrid, 1)
    assert all(result == results[0] for result in results)


@on_layout(TWO_BY_TWO)
def test_hybrid_shard_over_hosts_rounds_once_in_each_dimension(rank: Rank) -> None:
    rank.init()
    test_fsdp.test_hybrid_shard_rounds_once_in_each_dimension.body(rank)
