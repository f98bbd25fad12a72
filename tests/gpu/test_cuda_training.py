"""Two ranks that share a GPU train the parameters that they train on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

import rota
from on_gpu import DEVICE, LIMIT_S, init, on_ranks
from ranks import Rank

pytestmark = pytest.mark.torch_kernels

WIDTH = 16
STEPS = 3
# In float64 the devices' matrix products differ in the order of their sums, by some 2⁻⁵³ of the
# largest term: far too little to round to another neighbour in a wire of 16 bits.
BOUND = 2.0**-40


def make_layers(rank: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return layers.double().to(device)


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=generator).to(device)


def clip_and_step(
    model: nn.Module, state: rota.HookState, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """Reduces, clips by one norm and steps; returns the norm."""
    rota.reduce_gradients(model.parameters(), state)
    norm: torch.Tensor = rota.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def pipeline(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """1F1B with a stage on each rank, which clip by the norm of the whole model."""
    own = [dist.new_group([i]) for i in range(2)][rank.rank]
    state = rota.HookState(own, torch.float16, model_group=dist.group.WORLD)
    layers = make_layers(rank.rank, device)
    stage = PipelineStage(layers, rank.rank, 2, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    norms = []
    for step in range(STEPS):
        if rank.rank == 0:
            schedule.step(batch(step, 0, device))
        else:
            schedule.step(target=batch(step, 1, device))
        norms.append(clip_and_step(layers, state, optimizer))
    return [*layers.parameters(), *norms]


def data_parallel(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """A list of gradients, averaged over the ranks."""
    layers = make_layers(0, device)
    state = rota.HookState(wire_dtype=torch.float16, model=layers)
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    norms = []
    for step in range(STEPS):
        layers(batch(step, rank.rank, device)).square().mean().backward()
        norms.append(clip_and_step(layers, state, optimizer))
    return [*layers.parameters(), *norms]


def sharded(rank: Rank, device: torch.device) -> list[torch.Tensor]:
    """FSDP2."""
    layers = make_layers(0, device)
    fully_shard(layers, mesh=init_device_mesh(device.type, (2,)))
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for step in range(STEPS):
        layers(batch(step, rank.rank, device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() for p in layers.parameters() if isinstance(p, DTensor)]
    assert len(whole) == 4
    return whole


@pytest.mark.parametrize("way", [pipeline, data_parallel, sharded])
@on_ranks(2, timeout_s=2 * LIMIT_S)
def test_training_on_a_shared_gpu_gives_the_parameters_of_the_cpu(
    rank: Rank, way: Callable[[Rank, torch.device], list[torch.Tensor]]
) -> None:
    init(rank)
    on_cpu, on_gpu = (way(rank, device) for device in (torch.device("cpu"), DEVICE))
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(gpu.detach().cpu(), cpu.detach().cpu(), rtol=0, atol=BOUND)
