"""The DDP communication hooks: their averages, and the groups that they average over.

test_random_ddp.py compares them with torch's hooks of the same names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients
from oracle import assert_same, contract, random_inputs
from ranks import Rank, on_ranks

# Each hook, its state over a group, and what it rounds to.
HOOKS: dict[str, tuple[Any, Any, torch.dtype]] = {
    "allreduce": (rota.allreduce_hook, lambda group: group, torch.float32),
    "fp16_compress": (rota.fp16_compress_hook, lambda group: group, torch.float16),
    "bf16_compress": (rota.bf16_compress_hook, lambda group: group, torch.bfloat16),
    "fused": (rota.fused_hook, rota.HookState, torch.float16),
}


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(batch).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("world_size", [1, 3], ids="ws{}".format)
@pytest.mark.parametrize("name", [name for name in HOOKS if name != "fused"])
@on_ranks()
def test_hook_average_of_random_gradients_follows_contract(rank: Rank, name: str) -> None:
    rank.init()
    hook, _, wire_dtype = HOOKS[name]
    model = DistributedDataParallel(ExactGradients(torch.float32), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(None, hook)
    batches = random_inputs(rank.world_size, 2050, torch.float32)
    batches[0][:4] = torch.tensor([1e5, 1e-9, torch.inf, torch.nan])  # beyond float16's range
    got = gradients(model, batches[rank.rank])
    average = contract(batches, "avg", wire_dtype)
    assert_same(got, torch.cat([average[: p.numel()] for p in model.parameters()]), name)


@on_ranks(2)
def test_hook_after_destroy_and_init_uses_the_new_group(rank: Rank) -> None:
    averages = []
    for backend in ("gloo", "rota"):
        rank.init(backend)
        model = DistributedDataParallel(ExactGradients(torch.float32))
        model.register_comm_hook(None, rota.allreduce_hook)
        averages.append(gradients(model, torch.full((2050,), float(rank.rank))).unique().tolist())
        dist.destroy_process_group()
    assert averages == [[0.5], [0.5]]


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(3)
def test_hook_averages_over_the_group_of_its_state_and_can_be_chained(
    rank: Rank, name: str
) -> None:
    """A user's hook around ours, like torch's hook wrappers."""
    rank.init("gloo")
    group = dist.new_group([0, 2])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    if rank.rank == 1:
        return
    hook, state_over, _ = HOOKS[name]

    def double_average(state, bucket):  # DDP refuses text
        return hook(state, bucket).then(lambda done: done.value() * 2)

    model = DistributedDataParallel(ExactGradients(), process_group=group)
    model.register_comm_hook(state_over(group), double_average)
    assert gradients(model, torch.full((2050,), float(rank.rank))).unique().tolist() == [2.0]
