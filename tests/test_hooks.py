"""The DDP communication hooks compared with torch's hooks of the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import rota
from models import SMALL_BUCKETS_MB, ExactGradients, batch_of, make_model
from oracle import assert_same, contract, name_of, random_inputs
from ranks import Rank, on_ranks, run_ranks

Hook = Callable[..., torch.futures.Future[torch.Tensor]]

HOOKS: dict[str, tuple[Hook, Hook]] = {
    "allreduce": (rota.allreduce_hook, default_hooks.allreduce_hook),
    "fp16_compress": (rota.fp16_compress_hook, default_hooks.fp16_compress_hook),
    "bf16_compress": (rota.bf16_compress_hook, default_hooks.bf16_compress_hook),
}
WIRE_DTYPES = {
    "allreduce": torch.float32,
    "fp16_compress": torch.float16,
    "bf16_compress": torch.bfloat16,
}


def make_ddp(hook: Hook | None, state: Any = None, **options: Any) -> DistributedDataParallel:
    dtype = options.pop("dtype", torch.float32)
    options.setdefault("bucket_cap_mb", SMALL_BUCKETS_MB)
    model = DistributedDataParallel(make_model(dtype), **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(batch).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare_with_torch(
    rank: Rank, backend: str, name: str, as_view: bool
) -> tuple[float, float, list[float]]:
    """Largest difference from torch's hook and its bound, relative to the largest gradient."""
    rank.init(backend)
    ours, torchs = HOOKS[name]
    reference_group = dist.new_group(backend="gloo")
    mine = make_ddp(ours, gradient_as_bucket_view=as_view)
    reference = make_ddp(
        # Wrapped: DDP checks the name, and allows torch's bf16_compress_hook only with NCCL.
        lambda state, bucket: torchs(state, bucket),
        reference_group,
        process_group=reference_group,
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(4):
        got = gradients(mine, batch_of(rank.rank, step))
        reference.module.load_state_dict(mine.module.state_dict())
        expected = gradients(reference, batch_of(rank.rank, step))
        worst = max(worst, float(((got - expected).abs() / expected.abs().max()).max()))
        optimizer.step()
    # torch rounds after the division and after every addition; rota rounds once each way.
    eps = torch.finfo(WIRE_DTYPES[name]).eps
    parameters = torch.cat([p.detach().flatten() for p in mine.parameters()])
    return worst, eps * (rank.world_size + 1), parameters.tolist()


@pytest.mark.parametrize("as_view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("backend", ["gloo", "rota"])
@pytest.mark.parametrize("world_size", [2, 3], ids="ws{}".format)
def test_hook_gradients_equal_those_of_torchs_hook(
    world_size: int, backend: str, name: str, as_view: bool
) -> None:
    results = run_ranks(world_size, compare_with_torch, backend, name, as_view)
    for worst, bound, parameters in results:
        assert worst <= bound
        assert parameters == results[0][2], "parameters differ between ranks"


def average_exact(
    rank: Rank, backend: str, name: str, dtype: torch.dtype, hooks: str
) -> list[bool]:
    rank.init(backend)
    model = DistributedDataParallel(ExactGradients(dtype), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(None, HOOKS[name][0 if hooks == "rota" else 1])
    equal = []
    for step in range(3):
        batches = [
            ((torch.arange(2050) * 3 + r * 5 + step) % 17 - 8).to(dtype)
            for r in range(rank.world_size)
        ]
        got = gradients(model, batches[rank.rank])
        average = (torch.stack(batches).double().sum(0) / rank.world_size).to(dtype)
        expected = torch.cat([average[: p.numel()] for p in model.parameters()])
        equal.append(torch.equal(got, expected))
    return equal


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=name_of
)
@pytest.mark.parametrize("name", HOOKS)
def test_hook_average_of_exact_inputs_is_exact(name: str, dtype: torch.dtype) -> None:
    assert run_ranks(2, average_exact, "rota", name, dtype, "rota") == [[True] * 3] * 2


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(3)
def test_hook_average_of_random_gradients_follows_contract(rank: Rank, name: str) -> None:
    rank.init()
    model = DistributedDataParallel(ExactGradients(torch.float32), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(None, HOOKS[name][0])
    batches = random_inputs(rank.world_size, 2050, torch.float32)
    batches[0][:4] = torch.tensor([1e5, 1e-9, torch.inf, torch.nan])  # beyond float16's range
    got = gradients(model, batches[rank.rank])
    average = contract(batches, "avg", WIRE_DTYPES[name])
    assert_same(got, torch.cat([average[: p.numel()] for p in model.parameters()]), name)


@pytest.mark.parametrize("name", ["allreduce", "fp16_compress"])
def test_torch_hook_average_of_exact_inputs_is_exact(name: str) -> None:
    """Shows that the inputs above can reveal a difference between hooks."""
    results = run_ranks(2, average_exact, "gloo", name, torch.float32, "torch")
    assert results == [[True] * 3] * 2


@on_ranks(2)
def test_ddp_without_hook_on_backend_rota_equals_gloo(rank: Rank) -> None:
    """DDP's own all-reduce on backend rota, with a parameter that gets no gradient."""
    rank.init()
    gloo = dist.new_group(backend="gloo")
    grads = []
    for group in (None, gloo):
        model = make_model()
        model.add_module("unused", torch.nn.Linear(4, 4))
        model.forward = lambda x, m=model: m[4](m[3](m[2](m[1](m[0](x)))))  # type: ignore[misc]
        ddp = DistributedDataParallel(
            model,
            process_group=group,
            bucket_cap_mb=SMALL_BUCKETS_MB,
            find_unused_parameters=True,
        )
        grads.append(gradients(ddp, batch_of(rank.rank, 0)))
    assert torch.allclose(*grads, rtol=1e-6, atol=1e-6)


def hook_over_subgroup(rank: Rank) -> list[float] | None:
    rank.init("gloo")
    group = dist.new_group([0, 2])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    if rank.rank == 1:
        return None
    model = DistributedDataParallel(ExactGradients(torch.float32), process_group=group)
    model.register_comm_hook(group, rota.allreduce_hook)
    return gradients(model, torch.full((2050,), float(rank.rank))).unique().tolist()


def test_hook_state_is_the_group_that_averages() -> None:
    assert run_ranks(3, hook_over_subgroup) == [[1.0], None, [1.0]]


@on_ranks(1)
def test_hook_world_of_one_averages_its_own_gradients(rank: Rank) -> None:
    result = average_exact(rank, "rota", "fp16_compress", torch.float32, "rota")
    assert result == [True] * 3


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


def double_average(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    return rota.fp16_compress_hook(state, bucket).then(lambda done: done.value() * 2)


@on_ranks(2)
def test_hook_future_can_be_chained(rank: Rank) -> None:
    """A user's hook around ours, like torch's hook wrappers."""
    rank.init("gloo")

    model = DistributedDataParallel(ExactGradients(torch.float32), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(None, double_average)
    result = gradients(model, torch.full((2050,), float(rank.rank))).unique().tolist()
    assert result == [1.0]
