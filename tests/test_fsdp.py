"""rota.fsdp: FSDP2's collectives in a narrow wire, alone and in training.

The ranks of a size are shared by all tests: each runs its checks in the group that is already
there.
"""

from __future__ import annotations

import copy
import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
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
from bucket_oracle import Format, reduce_bucket, through_wire
from oracle import assert_same, name_of, random_patterns, round_to, to_numpy
from ranks import Rank, Ranks

STEPS = 3
WIDTH = 160
Check = Callable[[Rank], None]
HOOKS = {
    torch.float32: rota.allreduce_hook,
    torch.bfloat16: rota.bf16_compress_hook,
    torch.float16: rota.fp16_compress_hook,
}


# ---- the ranks -----------------------------------------------------------------------------------


def serve(rank: Rank) -> None:
    """Runs one check after the other, until the test says that there are no more."""
    torch.set_num_threads(1)
    rank.init()
    while (call := rank.hear()) is not None:
        check, args = call
        try:
            check(rank, *args)
            rank.tell()
        except Exception:
            rank.tell(traceback.format_exc())
    dist.destroy_process_group()


class Group:
    """Ranks that run checks; a failed one ends them, so that the next check gets new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: Ranks | None = None

    def run(self, check: Callable[..., None], *args: object) -> None:
        if self._ranks is None:
            self._ranks = Ranks(self.world_size, serve, timeout_s=120)
        for rank in range(self.world_size):
            self._ranks.tell(rank, (check, args))
        try:
            errors = [self._ranks.hear(rank) for rank in range(self.world_size)]
        except BaseException:
            self.end()
            raise
        if any(errors):
            self.end()
            pytest.fail("\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors)))

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.__exit__()
            self._ranks = None

    def finish(self) -> None:
        if self._ranks is not None:
            for rank in range(self.world_size):
                self._ranks.tell(rank)
            self._ranks.results()
            self.end()


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Group]]:
    made = {world_size: Group(world_size) for world_size in (2, 3, 4)}
    yield made
    for group in made.values():
        group.finish()


# ---- the collectives -----------------------------------------------------------------------------


def default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def in_memory(values: torch.Tensor, comm: Any, in_heap: bool) -> torch.Tensor:
    if not in_heap:
        return values.clone()
    return comm.allocate(values.shape, dtype=values.dtype, device=values.device).copy_(values)


# A mailbox is 64 KiB and a slot is 256 KiB: one message, several rounds, and an odd end.
PART_ELEMS = (0, 1, 63, 513, 150_001)


def check_reduce_scatter(rank: Rank, dtype: torch.dtype, wire: torch.dtype) -> None:
    comm = rota.fsdp.ReduceScatter(wire)
    for elems, in_heap in itertools.product(PART_ELEMS, (True, False)):
        inputs = random_patterns(rank.world_size, elems * rank.world_size, dtype)
        for op, divisor in ((dist.ReduceOp.AVG, rank.world_size), (dist.ReduceOp.SUM, 1)):
            expected = reduce_bucket(list(inputs), Format(wire, False), divisor=divisor)
            output = torch.zeros(elems, dtype=dtype)
            whole = in_memory(inputs[rank.rank], comm, in_heap)
            work = comm(output, whole, default_group(), op, async_op=in_heap)
            assert (work is not None) == in_heap
            if work is not None:
                work.wait()
            part = expected[rank.rank * elems : (rank.rank + 1) * elems]
            assert_same(output, part, f"{op} of {elems}, in_heap={in_heap}")
            assert_same(whole, inputs[rank.rank], "the input is left as it is")


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=name_of,
)
def test_reduce_scatter_rounds_contributions_and_sum_once(
    groups: dict[int, Group], dtype: torch.dtype, wire: torch.dtype
) -> None:
    groups[3].run(check_reduce_scatter, dtype, wire)


def check_no_rounding_per_hop(rank: Rank) -> None:
    """1 + 2^-8 + 2^-8 in bfloat16 is 1 if each addition is rounded, and 1 + 2^-7 if the sum is."""
    own = 1.0 if rank.rank == 0 else 2.0**-8
    comm = rota.fsdp.ReduceScatter(torch.bfloat16)
    output = torch.zeros(1)
    comm(output, torch.full((3,), own), default_group(), dist.ReduceOp.SUM)
    assert output.item() == 1 + 2**-7


def test_sums_in_a_16_bit_wire_are_not_rounded_at_each_rank(groups: dict[int, Group]) -> None:
    groups[3].run(check_no_rounding_per_hop)


def check_parts_that_peers_cannot_read(rank: Rank) -> None:
    """The output lies where peers would read: in place they would see it half written."""
    elems = 100_000
    comm = rota.fsdp.ReduceScatter()
    inputs = [torch.full((2 * elems,), float(i + 1)) for i in range(2)]
    whole = in_memory(inputs[rank.rank], comm, in_heap=True)
    comm(whole[:elems], whole, default_group(), dist.ReduceOp.SUM)
    assert torch.equal(whole[:elems], torch.full((elems,), 3.0))
    own = in_memory(inputs[rank.rank], comm, in_heap=True)
    part = own[rank.rank * elems :][:elems]
    comm(part, own, default_group(), dist.ReduceOp.SUM)
    assert torch.equal(part, torch.full((elems,), 3.0))
    # Lists of parts that are no one tensor, some of them in the heap.
    parts = [in_memory(inputs[rank.rank][:elems], comm, in_heap=i == 0) for i in range(2)]
    output = torch.zeros(elems)
    dist.reduce_scatter(output, parts)
    assert torch.equal(output, torch.full((elems,), 3.0))


def test_reduce_scatter_of_inputs_that_peers_cannot_read_in_place(
    groups: dict[int, Group],
) -> None:
    groups[2].run(check_parts_that_peers_cannot_read)


def check_all_gather(rank: Rank, dtype: torch.dtype, wire: torch.dtype) -> None:
    comm = rota.fsdp.AllGather(wire)
    form = Format(wire, wire.itemsize == 1)
    for elems, is_async in itertools.product(PART_ELEMS, (True, False)):
        inputs = random_patterns(rank.world_size, elems, dtype)
        parts = [
            round_to(through_wire(round_to(to_numpy(part), torch.float32), form), dtype)
            for part in inputs
        ]
        expected = torch.cat([torch.from_numpy(part).to(dtype) for part in parts])
        output = comm.allocate((rank.world_size * elems,), dtype=dtype, device=torch.device("cpu"))
        own = output.narrow(0, rank.rank * elems, elems)
        own.copy_(inputs[rank.rank])
        work = comm(output, own, default_group(), async_op=is_async)
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
        assert_same(output, expected, f"{elems}, async={is_async}")


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=name_of,
)
def test_all_gather_gives_all_ranks_the_values_of_the_wire(
    groups: dict[int, Group], dtype: torch.dtype, wire: torch.dtype
) -> None:
    groups[3].run(check_all_gather, dtype, wire)


def check_mismatch(rank: Rank) -> None:
    wires = (torch.bfloat16, torch.float16)
    tensor = torch.ones(20)
    with pytest.raises(rota.Mismatch, match=r"wire bfloat16.*wire float16"):
        rota.fsdp.AllGather(wires[rank.rank])(tensor, torch.zeros(10), default_group())
    with pytest.raises(rota.Mismatch, match=r"wire bfloat16.*wire float16"):
        rota.fsdp.ReduceScatter(wires[rank.rank])(
            torch.zeros(10), tensor, default_group(), dist.ReduceOp.SUM
        )
    assert torch.equal(tensor, torch.ones(20))


def test_ranks_with_different_wires_are_a_mismatch(groups: dict[int, Group]) -> None:
    groups[2].run(check_mismatch)


# ---- the buffers ---------------------------------------------------------------------------------


def heap_range() -> range:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:rota-heap" in line and " rw-s " in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            return range(begin, end)
    return range(0)


def heap_bytes() -> int:
    heaps = [
        fd for fd in Path("/proc/self/fd").iterdir() if "rota-heap" in str(os.path.realpath(fd))
    ]
    return sum(os.stat(fd).st_blocks * 512 for fd in heaps[:1])


def test_buffers_are_read_in_place_and_used_again() -> None:
    comm = rota.fsdp.AllGather()
    cpu = torch.device("cpu")
    first = comm.allocate((1000, 3), dtype=torch.float32, device=cpu)
    assert first.shape == (1000, 3) and first.is_contiguous()
    assert first.data_ptr() in heap_range()
    view = first.fill_(7)[10:]
    address = first.data_ptr()
    del first
    second = comm.allocate((3000,), dtype=torch.float32, device=cpu)
    assert second.data_ptr() != address  # the view still uses it
    del view
    third = comm.allocate((6000,), dtype=torch.bfloat16, device=cpu)
    assert third.data_ptr() == address and third.dtype == torch.bfloat16
    assert third.count_nonzero() > 0  # new memory would be zeroes
    assert comm.allocate((0,), dtype=torch.float32, device=cpu).shape == (0,)
    before = heap_bytes()
    del comm, second, third
    assert before - heap_bytes() >= 24000


# ---- training ------------------------------------------------------------------------------------


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
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)
    return model


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    for (name, own), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(own, DTensor)
        assert torch.equal(own.full_tensor(), expected), name


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.125, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def check_same_as_ddp(rank: Rank, wire: torch.dtype, optimizer: str) -> None:
    make_optimizer = OPTIMIZERS[optimizer]
    ddp = DistributedDataParallel(make_model())
    ddp.register_comm_hook(None, HOOKS[wire])
    expected = train(ddp, make_optimizer(ddp.parameters()), rank.rank)
    for is_async in (False, True):
        model = shard(make_model())
        rota.fsdp.use(model, wire)
        for module in model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module._set_unshard_async_op(is_async)
        losses = train(model, make_optimizer(model.parameters()), rank.rank)  # type: ignore
        assert losses == expected
        assert_same_parameters(model, ddp)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3], ids="ws{}".format)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wire", HOOKS, ids=name_of)
def test_training_has_the_bits_of_ddp_with_the_same_wire(
    groups: dict[int, Group], wire: torch.dtype, optimizer: str, world_size: int
) -> None:
    groups[world_size].run(check_same_as_ddp, wire, optimizer)


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


def check_mixed_precision(rank: Rank) -> None:
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
        rota.fsdp.use(model, wire)  # type: ignore[arg-type]
        train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)  # type: ignore
        expected = train_reference(
            rank.world_size,
            lambda gradients, wire=wire: average_in_wire(gradients, wire or torch.float32),
            InBfloat16,
        )
        assert_same_parameters(model, expected)  # type: ignore[arg-type]


def test_mixed_precision_policy_narrows_parameters_and_the_wire_gradients(
    groups: dict[int, Group],
) -> None:
    groups[2].run(check_mixed_precision)


def rounded(model: nn.Module, wire: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(wire).float()
    return model


def check_16_bit_parameters(rank: Rank, wire: torch.dtype) -> None:
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=wire)  # type: ignore[arg-type]
    train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)  # type: ignore
    expected = train_reference(
        rank.world_size,
        lambda gradients: average_in_wire(gradients, torch.bfloat16),
        lambda model: rounded(model, wire),
    )
    assert_same_parameters(model, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=name_of)
def test_parameters_in_a_16_bit_wire_are_rounded_where_they_are_used(
    groups: dict[int, Group], wire: torch.dtype
) -> None:
    groups[2].run(check_16_bit_parameters, wire)


def check_fp8_parameters(rank: Rank, wire: torch.dtype) -> None:
    reference = make_model()
    expected = train(
        DistributedDataParallel(reference), OPTIMIZERS["sgd"](reference.parameters()), rank.rank
    )
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=wire)  # type: ignore[arg-type]
    losses = train(model, OPTIMIZERS["sgd"](model.parameters()), rank.rank)  # type: ignore
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.05)
    masters = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore
    for module in model.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.unshard()
    for used, master in zip(model.parameters(), masters, strict=True):  # type: ignore
        of_ranks = [torch.empty_like(used) for _ in range(rank.world_size)]
        dist.all_gather(of_ranks, used.detach())
        assert all(torch.equal(values, used) for values in of_ranks)
        assert not torch.equal(used, master)
        # Half a unit in the last place, of the number or of the smallest ones in its block.
        half_ulp = 2.0**-4 if wire == torch.float8_e4m3fn else 2.0**-3
        bound = master.abs() * half_ulp + master.abs().max() * 2.0**-16
        assert (used - master).abs().le(bound).all()


@pytest.mark.parametrize("wire", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
def test_parameters_in_fp8_blocks_are_equal_on_all_ranks_and_close(
    groups: dict[int, Group], wire: torch.dtype
) -> None:
    groups[3].run(check_fp8_parameters, wire)


def check_memory_of_training(rank: Rank) -> None:
    """The second step finds the buffers of the first, and all of them are in the heap."""
    model = shard(make_model())
    rota.fsdp.use(model, torch.bfloat16)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.125)  # type: ignore[attr-defined]
    train(model, optimizer, rank.rank)  # type: ignore[arg-type]
    before = heap_bytes()
    assert before > 0
    train(model, optimizer, rank.rank)  # type: ignore[arg-type]
    assert heap_bytes() == before
    loss_of(model, 0, rank.rank).backward()  # type: ignore[arg-type]
    for parameter in model.parameters():  # type: ignore[attr-defined]
        assert parameter.grad.to_local().data_ptr() in heap_range()


def test_training_uses_its_buffers_again(groups: dict[int, Group]) -> None:
    groups[2].run(check_memory_of_training)


def check_same_as_gloo(rank: Rank) -> None:
    results = []
    for backend in ("rota", "gloo"):
        group = dist.new_group(backend=backend)
        model = shard(make_model(), DeviceMesh.from_group(group, "cpu"))
        if backend == "rota":
            rota.fsdp.use(model)  # type: ignore[arg-type]
        losses = train(model, OPTIMIZERS["adamw"](model.parameters()), rank.rank)  # type: ignore
        results.append((losses, [p.full_tensor() for p in model.parameters()]))  # type: ignore
    (losses, parameters), (expected_losses, expected) = results
    assert losses == expected_losses
    assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))


def test_training_in_float32_equals_gloo(groups: dict[int, Group]) -> None:
    groups[2].run(check_same_as_gloo)  # two ranks: their sum does not depend on the order


def check_hybrid(rank: Rank) -> None:
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
    rota.fsdp.use(model, wire)  # type: ignore[arg-type]
    train(model, torch.optim.SGD(model.parameters(), 0.125), rank.rank)  # type: ignore

    def average(gradients: list[torch.Tensor]) -> torch.Tensor:
        of_replicas = [average_in_wire(gradients[i : i + 2], wire) for i in (0, 2)]
        return average_in_wire(of_replicas, wire)

    expected = train_reference(rank.world_size, average, copy.deepcopy)
    assert_same_parameters(model, expected)  # type: ignore[arg-type]


def test_hybrid_shard_rounds_once_in_each_dimension(groups: dict[int, Group]) -> None:
    groups[4].run(check_hybrid)


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
        (lambda: rota.fsdp.use(3), r"rota\.fsdp\.use: model is of type int"),  # type: ignore
        (
            lambda: rota.fsdp.AllGather("bf16"),  # type: ignore[arg-type]
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


def check_errors_of_calls(rank: Rank) -> None:
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


def test_calls_that_cannot_work_raise_before_anything_moves(groups: dict[int, Group]) -> None:
    groups[2].run(check_errors_of_calls)
