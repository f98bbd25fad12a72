"""The DDP hooks on CUDA gradients: the same bits as on the CPU, and the same training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from bucket_oracle import Format, reduce_bucket
from models import SMALL_BUCKETS_MB, ExactGradients, exact_batch
from on_gpu import DEVICE, init, on_ranks
from oracle import assert_same, contract, random_inputs
from ranks import Rank

# Here DDP and the models compute on the GPU.
pytestmark = pytest.mark.torch_kernels

HOOKS = {
    "allreduce": (rota.allreduce_hook, torch.float32),
    "fp16_compress": (rota.fp16_compress_hook, torch.float16),
    "bf16_compress": (rota.bf16_compress_hook, torch.bfloat16),
}
FUSED_WIRES = (
    Format(torch.float16, True),
    Format(torch.bfloat16, False),
    Format(torch.float8_e5m2, True),
)


def make_ddp(device: torch.device | str, **options: Any) -> DistributedDataParallel:
    model = ExactGradients().to(device)
    return DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def gradients(ddp: torch.nn.Module) -> torch.Tensor:
    """All existing gradients, concatenated, on the CPU."""
    return torch.cat([p.grad.flatten().cpu() for p in ddp.parameters() if p.grad is not None])


@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_cuda_hook_averages_follow_contract(rank: Rank) -> None:
    init(rank)
    for (name, (hook, wire_dtype)), as_view in itertools.product(HOOKS.items(), (False, True)):
        ddp = make_ddp(DEVICE, gradient_as_bucket_view=as_view)
        ddp.register_comm_hook(None, hook)
        for step in range(3):
            batches = random_inputs(rank.world_size, 2050 + step, torch.float32)
            batches[0][:4] = torch.tensor([1e5, 1e-9, torch.inf, torch.nan])
            ddp.zero_grad()
            ddp(batches[rank.rank].to(DEVICE)).backward()
            expected = contract(batches, "avg", wire_dtype)
            wanted = torch.cat([expected[: p.numel()] for p in ddp.parameters()])
            assert_same(gradients(ddp), wanted, f"{name}, view {as_view}, step {step}")


def average_fused_with(rank: Rank, wire: Format, options: dict[str, Any]) -> None:
    state = rota.HookState(wire_dtype=wire.dtype, block_scaling=wire.block_scaling, **options)
    buckets: list[list[torch.Tensor]] = []

    def note_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses text
        buckets.append(bucket.parameters())
        return rota.fused_hook(state, bucket)

    ddp = make_ddp(DEVICE)
    ddp.register_comm_hook(state, note_bucket)
    for step in range(3):
        batches = random_inputs(rank.world_size, 2050 + step, torch.float32)
        if step == 2:
            batches[0][1] = torch.inf
        ddp.zero_grad()
        buckets.clear()
        ddp(batches[rank.rank].to(DEVICE)).backward()
        sum_of_squares = 0.0
        for i, parameters in enumerate(buckets):
            expected = reduce_bucket(
                [torch.cat([batch[: p.numel()] for p in parameters]) for batch in batches],
                wire,
                divisor=float(rank.world_size),
                result_factor=1 / options.get("loss_scale", 1.0),
            )
            got = torch.cat([p.grad.cpu() for p in parameters if p.grad is not None])
            assert_same(got, expected, f"{wire}, step {step}, bucket {i}")
            sum_of_squares += float(expected.double().square().sum())
        assert state.found_inf == (step == 2)
        if step < 2:
            assert float(state.grad_norm()) == pytest.approx(sum_of_squares**0.5, rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_fused_hook_follows_oracle(rank: Rank) -> None:
    init(rank)
    for wire in FUSED_WIRES:
        for options in ({}, {"loss_scale": 1024.0}):
            average_fused_with(rank, wire, options)


def train(rank: Rank, device: str) -> list[Any]:
    """Trains with GradScaler, clipping, and an Inf on one rank; returns each step's results."""
    state = rota.HookState(wire_dtype=torch.float16)
    ddp = make_ddp(device)
    ddp.register_comm_hook(state, rota.fused_hook)
    scaler = rota.amp.GradScaler(state, init_scale=2.0**10, growth_interval=3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-4)
    seen: list[Any] = []
    for step in range(6):
        batch = exact_batch(rank.rank, step)
        if step == 3 and rank.rank == rank.world_size - 1:
            batch[7] = torch.inf
        optimizer.zero_grad()
        scaler.scale(ddp(batch.to(device))).backward()
        scaler.unscale_(optimizer)
        norm = rota.clip_grad_norm_(ddp.parameters(), max_norm=2.0**20)
        seen.append(gradients(ddp))
        scaler.step(optimizer)
        scaler.update()
        seen += [float(norm), scaler.get_scale()]
    seen.append(torch.cat([p.detach().flatten().cpu() for p in ddp.parameters()]))
    return seen


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_training_with_scaler_and_clipping_is_that_of_the_cpu(rank: Rank) -> None:
    init(rank)
    on_cpu, on_gpu = train(rank, "cpu"), train(rank, "cuda:0")
    for i, (theirs, ours) in enumerate(zip(on_cpu, on_gpu, strict=True)):
        if isinstance(theirs, torch.Tensor):
            assert_same(ours, theirs, f"entry {i}")
        else:
            assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True), f"entry {i}"
    scales = on_gpu[2::3]
    assert scales[2:4] == [2.0**11, 2.0**10], "grows after three steps, halves at the Inf"
    dist.all_gather_object(of_ranks := [None] * rank.world_size, on_gpu[-1].tolist())
    assert of_ranks == of_ranks[:1] * rank.world_size, "parameters differ between ranks"


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_clipping_uses_the_norm_of_the_hook(rank: Rank) -> None:
    """Gradients above max_norm, clipped in place and in the optimizer."""
    init(rank)
    for in_optimizer in (False, True):
        state = rota.HookState(wire_dtype=torch.float32)
        ddp = make_ddp(DEVICE)
        ddp.register_comm_hook(state, rota.fused_hook)
        optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
        ddp(exact_batch(rank.rank, 0).to(DEVICE)).backward()
        batches = [exact_batch(r, 0) for r in range(rank.world_size)]
        total = torch.stack(batches).sum(0) / rank.world_size
        norm = torch.cat([total[: p.numel()] for p in ddp.parameters()]).double().norm()
        options = {"optimizer": optimizer} if in_optimizer else {}
        got = rota.clip_grad_norm_(ddp.parameters(), max_norm=0.5, **options)
        assert float(got) == pytest.approx(float(norm), rel=1e-6)
        if not in_optimizer:
            assert float(gradients(ddp).double().norm()) == pytest.approx(0.5, rel=1e-4)
        optimizer.step()
