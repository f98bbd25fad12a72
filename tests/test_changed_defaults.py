"""Programs that change torch's defaults: a device, dtypes, modes of autograd, determinism.

rota's own tensors are where and what it says, whatever the defaults are.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

import rota
from checkpoints import LINGER
from elastic_workers import store_of
from ranks import Rank, on_ranks
from rota.local_sgd import DiLoCo, LocalSGD
from rota.parameter_server import ParameterServer
from rota.weights import WeightShard, WeightStore

pytestmark = pytest.mark.same_in_every_build

PACKAGE = Path(rota.__file__).parent
NUM_ELEMS = 1000


def numbers(first: int, *shape: int) -> torch.Tensor:
    """Small integers, float32, on the CPU."""
    num_elems = torch.Size(shape).numel()
    elems = torch.arange(first, first + num_elems, dtype=torch.int64, device="cpu") % 7
    return elems.to(torch.float32).view(shape)


def make_model() -> nn.Sequential:
    where: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    model = nn.Sequential(
        nn.Linear(8, 5, **where), nn.BatchNorm1d(5, **where), nn.Linear(5, 2, **where)
    )
    for parameter in model.parameters():
        parameter.data = numbers(3, *parameter.shape)
    return model


def backward(model: nn.Module, rank: Rank) -> None:
    model.zero_grad()
    model(numbers(rank.rank, 4, 8)).square().mean().backward()


def values_of(model: nn.Module) -> list[Any]:
    return [tensor.tolist() for tensor in model.state_dict().values()]


# What follows makes an object, and returns a step, which may be called in another mode.


def collectives(rank: Rank) -> Callable[[], Any]:
    def step() -> Any:
        strided = numbers(rank.rank, 3, NUM_ELEMS).T
        parts = [numbers(0, 3, 4).T for _ in range(2)]
        works = [
            dist.all_reduce(strided, async_op=True),
            dist.all_gather(parts, numbers(rank.rank, 3, 4).T, async_op=True),
        ]
        for work in works:
            work.wait()
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"tensor": numbers(rank.rank, 2)})
        received = numbers(0, 3, 4).T
        if rank.rank == 0:
            dist.send(parts[1], 1)
        else:
            dist.recv(received, 0)
        scattered = numbers(0, 4, 2)[:, 0]
        dist.reduce_scatter(scattered, [numbers(i, 4, 2)[:, 1] for i in range(2)])
        tensors = [strided, *parts, received, scattered, objects[1]["tensor"]]
        return [tensor.tolist() for tensor in tensors]

    return step


def communicator(rank: Rank) -> Callable[[], Any]:
    comm = rota.Communicator()
    memory = rota.empty(2, NUM_ELEMS, dtype=torch.float32)
    window = rota.Window((8,), dtype=torch.float32)

    def step() -> Any:
        memory.copy_(numbers(rank.rank, 2, NUM_ELEMS))
        comm.all_reduce(memory, wire_dtype=torch.float16)
        scalar = rota.ops.all_reduce(numbers(rank.rank, 1), comm)
        gathered = rota.ops.all_gather(numbers(rank.rank, 2), comm)
        window.put(numbers(1, 8), 1 - rank.rank)
        comm.barrier()
        seen = window.tensor.tolist()
        comm.barrier()
        return [memory.tolist(), scalar.tolist(), gathered.tolist(), seen]

    return step


def checkpoint(rank: Rank) -> Callable[[], Any]:
    place = {"rank": rank.rank, "world_size": 2}
    checkpoint = rota.checkpoint.Checkpoint(rank.make_store(), **place, linger=LINGER)
    steps = iter(range(9))

    def step() -> Any:
        number = next(steps)
        checkpoint.save(number, {"weight": numbers(number, 3, 4).T, "steps": number})
        _, state = checkpoint.load() or (None, {})
        _, again = checkpoint.load({"weight": numbers(0, 3, 4).T, "steps": 0}) or (None, {})
        if number == 2:
            checkpoint.close()
        return [state["weight"].tolist(), state["steps"], again["weight"].tolist()]

    return step


def weight_store(rank: Rank) -> Callable[[], Any]:
    part = WeightShard((8, 6), (4 * rank.rank, 0), (4, 6))
    shards = {"part": part}
    store, versions = rank.make_store(), iter(range(9))
    publisher = WeightStore(store, rank=rank.rank, num_publishers=2, shards=shards)
    wanted = {"part": WeightShard((8, 6), (0, 3), (8, 3))}
    readers = [WeightStore(store, shards=wanted) for _ in range(2)]

    def step() -> Any:
        version = next(versions)
        publisher.publish(version, {"part": numbers(rank.rank + version, 4, 6)})
        into = {"part": numbers(0, 8, 3)}
        readers[0].pull(version, into=into)
        _, pulled = readers[1].pull(version)
        return [pulled["part"].tolist(), into["part"].tolist()]

    return step


def gradients(rank: Rank) -> Callable[[], Any]:
    model = make_model()
    state = rota.HookState(
        model=model,
        wire_dtype=torch.float8_e4m3fn,
        stochastic_rounding=True,
        error_feedback=True,
    )

    def step() -> Any:
        for parameter in model.parameters():
            parameter.grad = numbers(rank.rank, *parameter.shape)
        rota.reduce_gradients(model.parameters(), state)
        norm = rota.clip_grad_norm_(model.parameters(), 1.0)
        residuals = state.state_dict()["residuals"]
        return [
            norm.item(),
            state.grad_norm().item(),
            *map(torch.Tensor.tolist, residuals.values()),
        ]

    return step


def local_sgd(rank: Rank) -> Callable[[], Any]:
    models = [make_model(), make_model()]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.5, momentum=0.5, nesterov=True)
    outers = [
        LocalSGD(models[0], 1),
        DiLoCo(
            models[1],
            optimizer,
            1,
            state=rota.HookState(wire_dtype=torch.float16, error_feedback=True),
        ),
    ]

    def step() -> Any:
        for model, outer in zip(models, outers, strict=True):
            for tensor in model.parameters():
                tensor.data.add_(rank.rank)
            outer.step()
            outer.load_state_dict(outer.state_dict())
        return [values_of(model) for model in models]

    return step


def parameter_server(rank: Rank) -> Callable[[], Any]:
    model = make_model()
    server = ParameterServer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.5),
        wire_dtype=torch.float16,
        error_feedback=True,
    )

    def step() -> Any:
        server.step([numbers(rank.rank, *parameter.shape) for parameter in model.parameters()])
        return values_of(model)

    return step


def hook(rank: Rank) -> Callable[[], Any]:
    model = DistributedDataParallel(make_model())
    state = rota.HookState(model=model, error_feedback=True)
    model.register_comm_hook(state, rota.fused_hook)
    scaler = rota.amp.GradScaler(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, fused=True)

    def step() -> Any:
        model.zero_grad()
        scaler.scale(model(numbers(rank.rank, 4, 8)).square().mean()).backward()
        rota.clip_grad_norm_(model.parameters(), 0.1, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        return values_of(model)

    return step


def shards(rank: Rank) -> Callable[[], Any]:
    model = nn.Sequential(make_model()[0], nn.Dropout())
    logical = rota.LogicalShards(model, 4)
    state = rota.HookState(model=model)

    def step() -> Any:
        for shard in logical:
            with logical.backward_of(shard):
                order = logical.samples(shard, 16, 2)
                model(numbers(0, 16, 8)[order]).sum().backward()
        logical.reduce()
        sums = [parameter.grad.tolist() for parameter in model.parameters()]
        model.zero_grad()
        with rota.overlap_gradients(model.parameters(), state):
            backward(model, rank)
        model.zero_grad()
        return sums

    return step


def fsdp(rank: Rank) -> Callable[[], Any]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(make_model()[0])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    rota.fsdp.use(model, torch.bfloat16, parameter_wire_dtype=torch.float8_e4m3fn)

    def step() -> Any:
        backward(model, rank)
        return [parameter.grad.to_local().tolist() for parameter in model.parameters()]

    return step


MOVING = [collectives, communicator, checkpoint, weight_store]
WITHOUT_BACKWARD = [*MOVING, gradients, local_sgd, parameter_server]
TRAINING = [hook, shards, fsdp]
ALL = WITHOUT_BACKWARD + TRAINING


DEVICE = torch.device("xpu")  # which no build for the CPU or CUDA has


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


MODES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "device": (lambda: DEVICE, ALL),
    "bfloat16": (lambda: default_dtype(torch.bfloat16), ALL),
    "float64": (lambda: default_dtype(torch.float64), ALL),
    "deterministic": (deterministic, ALL),
    "anomaly": (torch.autograd.detect_anomaly, TRAINING),
    "no_grad": (torch.no_grad, WITHOUT_BACKWARD),
    "inference": (torch.inference_mode, MOVING),
}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_results_are_those_under_torch_s_own_defaults(rank: Rank, mode: str) -> None:
    """Each program makes its object and takes a step in the mode, and two outside of it."""
    rank.init()
    enter, programs = MODES[mode]
    for program in programs:
        step = program(rank)
        expected = [step() for _ in range(3)]
        with enter():
            step = program(rank)
            found = [step()]
        found += [step(), step()]
        assert found == expected, program.__name__


@on_ranks(2)
def test_elastic_training_under_a_default_device(rank: Rank, port: int) -> None:
    """A rank that joins under a default device gets the other's state, and both roll back."""
    membership = rota.elastic.Membership(store_of(port), rank=rank.rank)
    with DEVICE:
        generation = membership.next(min_members=2)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        random = rota.elastic.RandomState()
        state = rota.elastic.State(model=model, optimizer=optimizer, random=random)
        if rank.rank == 0:
            backward(model, rank)
            optimizer.step()
            state.commit()
        assert state.synchronize(generation, check_equal=True) == (rank.rank == 1)
        backward(model, rank)
        assert not state.synchronize(membership.next(min_members=2), check_equal=True)
    membership.finish()


def _calls_of_factories(path: Path) -> Iterator[tuple[str, set[str | None]]]:
    factories = {function.__name__ for function in _device_constructors()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if node.func.attr in factories and isinstance(of, ast.Name) and of.id == "torch":
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield place, {keyword.arg for keyword in node.keywords}


def test_every_new_tensor_names_its_device_and_dtype() -> None:
    calls = [call for path in PACKAGE.rglob("*.py") for call in _calls_of_factories(path)]
    assert len(calls) > 30
    assert [place for place, given in calls if not {"device", "dtype"} <= given] == []
