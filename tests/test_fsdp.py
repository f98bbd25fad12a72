"""rota.fsdp in training: FSDP2 with a narrow wire beside DDP, Gloo and a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rota
import rota.fsdp
from check_groups import CheckGroup, check_groups, in_group
from heap import heap_bytes, heap_range
from oracle import name_of
from ranks import Rank

STEPS = 3
WIDTH = 160
HOOKS = {
    torch.float32: rota.allreduce_hook,
    torch.bfloat16: rota.bf16_compress_hook,
    torch.float16: rota.fp16_compress_hook,
}


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, CheckGroup]]:
    with check_groups(2, 3, 4) as made:
        yield made


def make_model() -> nn.Sequential:
    """Dimensions that no world size divides, so that shards are padded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 321), nn.Tanh(), nn.Linear(321, WIDTH))


def batch(step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank)).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def shard(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> FSDPModule:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    for (name, own), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(own, DTensor)
        assert torch.equal(own.full_tensor(), expected), name


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.125, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wire", HOOKS, ids=name_of)
@in_group(3)
def test_training_has_the_bits_of_ddp_with_the_same_wire(
    rank: Rank, wire: torch.dtype, optimizer: str
) -> None:
    make_optimizer = OPTIMIZERS[optimizer]
    ddp = DistributedDataParallel(make_model())
    ddp.register_comm_hook(None, HOOKS[wire])
    expected = train(ddp, make_optimizer(ddp.parameters()), rank.rank)
    for is_async in (False, True):
        model = shard(make_model())
        rota.fsdp.use(model, wire)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module._set_unshard_async_op(is_async)
        losses = train(model, make_optimizer(model.parameters()), rank.rank)
        assert losses == expected
        assert_same_parameters(model, ddp)


def average_in_wire(gradients: list[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total += gradient.to(wire).float()
    return (total / len(gradients)).to(wire).float()


def train_reference(
    world_size: int,
    average: Callable[[list[torch.Tensor]], torch.Tensor],
    weights_of: Callable[[nn.Module], nn.Module],
) -> nn.Module:
    """Computes every rank's gradients here, with the weights that `weights_of` gives to them."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    for step in range(STEPS):
        gradients = []
        for rank in range(world_size):
            weights = weights_of(model)
            loss_of(weights, step, rank).backward()
            gradients.append([parameter.grad.float() for parameter in weights.parameters()])
        for parameter, of_ranks in zip(
            model.parameters(), zip(*gradients, strict=True), strict=True
        ):
            parameter.grad = average(list(of_ranks))
        optimizer.step()
    return model


@in_group(2)
def test_mixed_precision_policy_narrows_parameters_and_the_wire_gradients(rank: Rank) -> None:
    """bfloat16 parameters; gradients summed in float32, in a bfloat16 wire."""

    class InBfloat16(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = copy.deepcopy(model).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x.bfloat16())

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for wire in (torch.bfloat16, None):
        model = shard(make_model(), mp_policy=policy)
        rota.fsdp.use(model, wire)
        train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)
        expected = train_reference(
            rank.world_size,
            lambda gradients, wire=wire: average_in_wire(gradients, wire or torch.float32),
            InBfloat16,
        )
        assert_same_parameters(model, expected)


def rounded(model: nn.Module, wire: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(wire).float()
    return model


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=name_of)
@in_group(2)
def test_parameters_in_a_16_bit_wire_are_rounded_where_they_are_used(
    rank: Rank, wire: torch.dtype
) -> None:
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=wire)
    train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)
    expected = train_reference(
        rank.world_size,
        lambda gradients: average_in_wire(gradients, torch.bfloat16),
        lambda model: rounded(model, wire),
    )
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("wire", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
@in_group(3)
def test_parameters_in_fp8_blocks_are_equal_on_all_ranks_and_close(
    rank: Rank, wire: torch.dtype
) -> None:
    reference = make_model()
    expected = train(
        DistributedDataParallel(reference), OPTIMIZERS["sgd"](reference.parameters()), rank.rank
    )
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=wire)
    losses = train(model, OPTIMIZERS["sgd"](model.parameters()), rank.rank)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.05)
    masters = [parameter.full_tensor() for parameter in model.parameters()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for used, master in zip(model.parameters(), masters, strict=True):
        of_ranks = [torch.empty_like(used) for _ in range(rank.world_size)]
        dist.all_gather(of_ranks, used.detach())
        assert all(torch.equal(values, used) for values in of_ranks)
        assert not torch.equal(used, master)
        # Half a unit in the last place, of the number or of the smallest ones in its block.
        half_ulp = 2.0**-4 if wire == torch.float8_e4m3fn else 2.0**-3
        bound = master.abs() * half_ulp + master.abs().max() * 2.0**-16
        assert (used - master).abs().le(bound).all()


@in_group(2)
def test_training_uses_its_buffers_again(rank: Rank) -> None:
    """The second step finds the buffers of the first, and all of them are in the heap."""
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    train(model, optimizer, rank.rank)
    before = heap_bytes()
    assert before > 0
    train(model, optimizer, rank.rank)
    assert heap_bytes() == before
    loss_of(model, 0, rank.rank).backward()
    for parameter in model.parameters():
        assert parameter.grad.to_local().data_ptr() in heap_range()


@in_group(2)
def test_training_in_float32_equals_gloo(rank: Rank) -> None:
    results = []
    for backend in ("rota", "gloo"):
        group = dist.new_group(backend=backend)
        model = shard(make_model(), DeviceMesh.from_group(group, "cpu"))
        if backend == "rota":
            rota.fsdp.use(model)
        losses = train(model, OPTIMIZERS["adamw"](model.parameters()), rank.rank)
        results.append((losses, [p.full_tensor() for p in model.parameters()]))
    (losses, parameters), (expected_losses, expected) = results
    assert losses == expected_losses
    assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))


@in_group(4)
def test_hybrid_shard_rounds_once_in_each_dimension(rank: Rank) -> None:
    """Ranks 0 and 1 hold one replica and ranks 2 and 3 the other."""
    wire = torch.bfloat16
    options = rota.BackendOptions(wire_dtype=wire)
    shards = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    replicas = [dist.new_group(ranks, pg_options=options) for ranks in ((0, 2), (1, 3))]
    mesh = DeviceMesh.from_group(
        [replicas[rank.rank % 2], shards[rank.rank // 2]],
        "cpu",
        mesh=[[0, 1], [2, 3]],
        mesh_dim_names=("replicate", "shard"),
    )
    model = shard(make_model(), mesh)
    rota.fsdp.use(model, wire)
    train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)

    def average(gradients: list[torch.Tensor]) -> torch.Tensor:
        of_replicas = [average_in_wire(gradients[i : i + 2], wire) for i in (0, 2)]
        return average_in_wire(of_replicas, wire)

    expected = train_reference(rank.world_size, average, copy.deepcopy)
    assert_same_parameters(model, expected)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rota.fsdp.use(nn.Linear(2, 2)),
            r"rota\.fsdp\.use: model is of type Linear without an FSDPModule in it, expected one "
            r"that torch\.distributed\.fsdp\.fully_shard was called on",
        ),
        (
            lambda: rota.fsdp.use(nn.Linear(2, 2), torch.float8_e4m3fn),
            r"rota\.fsdp\.use: wire_dtype is torch\.float8_e4m3fn, expected None or one of "
            r"\(torch\.float32, torch\.bfloat16, torch\.float16\)",
        ),
        (
            lambda: rota.fsdp.use(nn.Linear(2, 2), parameter_wire_dtype=torch.int8),
            r"rota\.fsdp\.use: parameter_wire_dtype is torch\.int8, expected None or one of",
        ),
        (lambda: rota.fsdp.use(3), r"rota\.fsdp\.use: model is of type int"),
        (
            lambda: rota.fsdp.AllGather("bf16"),
            r"rota\.fsdp\.AllGather: wire_dtype is 'bf16', expected",
        ),
        (
            lambda: rota.fsdp.ReduceScatter(torch.float64),
            r"rota\.fsdp\.ReduceScatter: wire_dtype is torch\.float64, expected",
        ),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@in_group(2)
def test_calls_that_cannot_work_raise_before_anything_moves(rank: Rank) -> None:
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    model: Any = shard(make_model(), gloo)
    with pytest.raises(ValueError, match=r"use: group '\d+' is on the backend 'gloo' .* 'rota'; m"):
        rota.fsdp.use(model)
    model(batch(0, rank.rank))  # as before
    by_hand: Any = shard(make_model(), gloo)
    for module in filter(lambda module: isinstance(module, FSDPModule), by_hand.modules()):
        module.set_custom_all_gather(rota.fsdp.AllGather())
    with pytest.raises(ValueError, match=r"AllGather: group '\d+' is on the backend 'gloo'"):
        by_hand(batch(0, rank.rank))

    frozen = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    mixed = fully_shard(nn.Sequential(nn.Linear(2, 2), frozen))
    rota.fsdp.use(mixed, parameter_wire_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"input_tensor is torch\.uint8, expected floats"):
        mixed(torch.ones(1, 2))

    half = fully_shard(nn.Linear(2, 2).bfloat16())
    rota.fsdp.use(half, torch.float32)
    with pytest.raises(TypeError, match=r"wire_dtype is torch\.float32 for tensors of torch\.bf"):
        half(torch.ones(1, 2).bfloat16()).sum().backward()
    dist.barrier()  # the group is as good as before
