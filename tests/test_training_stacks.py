"""What people train with, on rota and on Gloo: equal losses and parameters, bit for bit.

Two ranks, since the sum of two floats does not depend on their order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from models import batch_of, make_model
from ranks import Rank, run_ranks

WIDTH = 32  # of batches
STEPS = 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(batch_of(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(model: nn.Module) -> list[float]:
    values = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        values += whole.detach().flatten().tolist()
    return values


Result = list[float]


def ddp(rank: Rank) -> Result:
    """With its three ways to find what a step has not used, and gradients that are views."""
    results = []
    for options in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ):
        model = DistributedDataParallel(make_model(), **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results += train(model, optimizer, rank.rank)
        if "static_graph" not in options:  # which torch does not allow with no_sync
            with model.no_sync():
                model(batch_of(rank.rank, 9)).sum().backward()
        results += train(model, optimizer, rank.rank) + values_of(model)
    return results


def join(rank: Rank) -> Result:
    """Uneven inputs."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for step in range(2 + rank.rank):
            model(batch_of(rank.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model)


def zero(rank: Rank) -> Result:
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    results = train(model, optimizer, rank.rank) + values_of(model)
    optimizer.consolidate_state_dict(to=0)
    return results


def fsdp(rank: Rank) -> Result:
    results = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = make_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mp_policy=policy, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        results += train(model, optimizer, rank.rank)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results += [norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()]
        results += values_of(model)
    return results


def hybrid_fsdp(rank: Rank) -> Result:
    """Replicated over one dimension of the mesh, sharded over the other."""
    results = []
    for sizes in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(make_model(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results += train(model, optimizer, rank.rank) + values_of(model)
    return results


def tensor_parallel(rank: Rank) -> Result:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train(model, optimizer, 0) + values_of(model)  # all ranks have the same batch


def pipeline(rank: Rank) -> Result:
    """GPipe, 1F1B, interleaved 1F1B with two stages on each rank, and a forward pass alone."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    device = torch.device("cpu")
    results: Result = []
    schedules = ((ScheduleGPipe, 2), (Schedule1F1B, 2), (ScheduleInterleaved1F1B, 4))
    for schedule_of, num_stages in schedules:
        stages = []
        for index in range(rank.rank, num_stages, 2):
            own = layers[index * 4 // num_stages : (index + 1) * 4 // num_stages]
            module = nn.Sequential(*copy.deepcopy(own))
            stages.append(PipelineStage(module, index, num_stages, device))
        schedule = schedule_of(
            stages if num_stages == 4 else stages[0],
            n_microbatches=4,
            loss_fn=nn.functional.mse_loss,
        )
        losses: list[torch.Tensor] = []
        for step in range(2):
            if rank.rank == 0:
                schedule.step(batch_of(0, step))
            else:
                schedule.step(target=batch_of(1, step), losses=losses)
        results += [loss.item() for loss in losses]
        for stage in stages:
            gradients = [parameter.grad for parameter in stage.submod.parameters()]
            results += [gradient.sum().item() for gradient in gradients if gradient is not None]
    with torch.no_grad():
        stage = PipelineStage(layers[rank.rank], rank.rank, 2, device)
        forward = ScheduleGPipe(stage, n_microbatches=2)
        output = forward.step(batch_of(0, 0)) if rank.rank == 0 else forward.step()
    return results + ([] if rank.rank == 0 else output.flatten().tolist())


def checkpoint(rank: Rank) -> Result:
    mesh = init_device_mesh("cpu", (2,))
    saved = fully_shard(make_model(), mesh=mesh)
    train(saved, torch.optim.SGD(saved.parameters(), 0.1), rank.rank)
    folder = f"{rank._directory}/checkpoint"
    dcp.save({"model": saved.state_dict()}, checkpoint_id=folder)
    loaded = fully_shard(make_model(), mesh=mesh)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state["model"])
    assert values_of(loaded) == values_of(saved)
    return values_of(loaded)


STACKS = [ddp, join, zero, fsdp, hybrid_fsdp, tensor_parallel, pipeline, checkpoint]


def run_on(rank: Rank, backend: str, stack: Callable[[Rank], Result]) -> Result:
    torch.set_num_threads(1)
    rank.init(backend)
    try:
        return stack(rank)
    finally:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("stack", STACKS)
def test_training_stack_on_rota_equals_gloo(stack: Callable[[Rank], Result]) -> None:
    on_rota, on_gloo = (run_ranks(2, run_on, backend, stack) for backend in ("rota", "gloo"))
    assert on_rota == on_gloo
    assert all(len(result) > 0 for result in on_rota)
