"""ParameterServer: the three modes, with every rank a server and with dedicated ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rota
from models import make_model
from parameter_servers import (
    OPTIMIZERS,
    backward,
    count_gradient,
    counted,
    counters,
    dawdle,
    flat,
    init,
    settle,
)
from ranks import Rank, on_ranks, run_ranks
from rota.parameter_server import ParameterServer
from rota.parameter_server.setup import PushLayout, assign
from rota.shared.wire import Wire

pytestmark = pytest.mark.same_in_every_build

NUM_STEPS = 10


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("world_size", "servers"),
    [(2, None), (3, None), (3, [1]), (5, [0, 3])],
    ids=["every-2", "every-3", "1-of-3", "2-of-5"],
)
@on_ranks()
def test_sync_has_the_bits_of_all_reduce(
    rank: Rank, optimizer: str, servers: list[int] | None
) -> None:
    init(rank)
    model = nn.Sequential(make_model(), nn.Linear(8, 3))
    torch.manual_seed(rank.rank)  # rank 0's parameters count
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for tensor in start:
        dist.broadcast(tensor, 0)
    server = ParameterServer(model, OPTIMIZERS[optimizer], servers=servers)
    workers = [r for r in range(rank.world_size) if servers is None or r not in servers]
    group = dist.new_group(workers)
    if not server.is_worker:
        return server.serve()
    assert torch.equal(flat(model.parameters()), flat(start))

    expected = nn.Sequential(make_model(), nn.Linear(8, 3))
    expected.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(expected, process_group=group)
    ddp.register_comm_hook(group, rota.allreduce_hook)
    expected_optimizer = OPTIMIZERS[optimizer](expected.parameters())
    for step in range(NUM_STEPS):
        backward(ddp, rank.rank, step)
        expected_optimizer.step()
        backward(model, rank.rank, step)
        server.step()
        assert torch.equal(flat(model.parameters()), flat(expected.parameters())), f"step {step}"
    assert server.staleness == {r: {0: NUM_STEPS} for r in servers or range(rank.world_size)}
    server.close()
    return None


@on_ranks(2)
def test_sync_of_bfloat16_parameters_keeps_float32_copies(rank: Rank) -> None:
    init(rank)
    model = make_model(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = OPTIMIZERS["momentum"](masters)
    communicator = rota.Communicator()
    server = ParameterServer(model, OPTIMIZERS["momentum"])
    for step in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(rank.rank + 10 * step)
        model(torch.randn(4, 32, generator=generator).bfloat16()).float().square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            communicator.all_reduce(master.grad, "avg")
        optimizer.step()
        server.step()
        assert torch.equal(flat(model.parameters()), flat(m.bfloat16() for m in masters))
    server.close()


def push_odd_gradients(rank: Rank) -> list[float]:
    """A gradient that is missing, one that is transposed, an empty and a scalar parameter."""
    init(rank)
    shapes = [(3, 2), (0, 4), (), (5,)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    server = ParameterServer(parameters, OPTIMIZERS["sum"])
    transposed = torch.arange(6.0).view(2, 3).t()
    server.step([transposed, torch.zeros(0, 4), torch.tensor(2.0), None])
    assert torch.equal(parameters[0], -transposed)
    parameters[3].grad = torch.full((5,), rank.rank * 2.0)
    server.step()
    server.close()
    return [float(parameters[2]), float(parameters[3][4])]


def test_gradients_may_be_missing_strided_or_empty_and_servers_idle() -> None:
    """At least one of 5 servers has no parameter."""
    assert run_ranks(5, push_odd_gradients) == [[-2.0, -4.0]] * 5


class Replacing(torch.optim.Optimizer):
    """Subtracts gradients; gives its parameters other memory, and drops the gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - parameter.grad
        self.zero_grad()


@on_ranks(2)
def test_parameters_may_get_other_memory_on_workers_and_servers(rank: Rank) -> None:
    init(rank)
    parameters = counters(rank.world_size)
    server = ParameterServer(parameters, Replacing)
    for step in range(3):
        for parameter in parameters:  # as model.to() does
            parameter.data = parameter.detach().to([torch.float64, torch.float32][step % 2])
            parameter.grad = torch.full_like(parameter, -1)
        server.step()
        assert counted(parameters) == [[step + 1] * rank.world_size] * 2
    server.close()


def count_pushes(
    rank: Rank, mode: str, staleness: int | None, servers: list[int] | None, num_elems: int
) -> Any:
    init(rank)
    parameters = counters(rank.world_size, num_elems)
    server = ParameterServer(
        parameters, OPTIMIZERS["sum"], mode=mode, staleness=staleness, servers=servers
    )
    group = dist.new_group([r for r in range(rank.world_size) if r in server.workers])
    if not server.is_worker:
        server.serve()
        return {r: sum(delays.values()) for r, delays in server.delays.items()}
    generator = random.Random(rank.rank)
    for step in range(40 + 10 * rank.rank if mode == "async" else 40):
        dawdle(generator)
        count_gradient(parameters, rank.rank)
        server.step()
        for counts in counted(parameters):
            slowest = min(counts[worker] for worker in server.workers)
            if staleness is not None:
                assert slowest >= step + 1 - staleness
                assert max(counts) <= slowest + staleness + 1
    if staleness is not None:
        assert all(max(counter) <= staleness for counter in server.staleness.values())
    server.flush()
    dist.barrier(group)
    server.pull()
    counts = counted(parameters)
    server.close()
    return counts


@pytest.mark.parametrize("num_elems", [1, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("servers", [None, [1]], ids=["every", "dedicated"])
def test_async_applies_every_push_exactly_once(servers: list[int] | None, num_elems: int) -> None:
    results = run_ranks(3, count_pushes, "async", None, servers, num_elems)
    if servers is None:
        assert results == [[[40, 50, 60]] * 2] * 3
    else:
        assert results == [[[40, 0, 60]] * 2, {0: 40, 2: 60}, [[40, 0, 60]] * 2]


@pytest.mark.parametrize("staleness", [0, 1, 3], ids="k{}".format)
@pytest.mark.parametrize("servers", [None, [2]], ids=["every", "dedicated"])
def test_no_worker_is_ahead_by_more_than_the_staleness(
    servers: list[int] | None, staleness: int
) -> None:
    results = run_ranks(3, count_pushes, "stale", staleness, servers, 64)
    workers = [0, 1] if servers else [0, 1, 2]
    expected = [40 if rank in workers else 0 for rank in range(3)]
    assert [results[worker] for worker in workers] == [[expected] * 2] * len(workers)


def run_ahead(rank: Rank) -> Any:
    """Worker 1 only starts when worker 0 has used up its staleness."""
    init(rank)
    parameters = counters(2)
    server = ParameterServer(parameters, OPTIMIZERS["sum"], mode="stale", staleness=2)
    if rank.rank == 0:
        for _ in range(2):
            count_gradient(parameters, 0)
            server.step()
        dist.barrier()
    else:
        dist.barrier()
        for _ in range(2):
            count_gradient(parameters, 1)
            server.step()
    staleness = server.staleness
    settle(server)
    server.close()
    return [dict(counter) for counter in staleness.values()]


def test_histogram_has_the_clocks_that_a_worker_was_ahead() -> None:
    ahead, _ = run_ranks(2, run_ahead)
    for counter in ahead:
        # The pulls after push 1 and 2, and that of settle().
        assert counter[1] == 1 and counter[2] == 1 and counter[0] == 1


def push_only(rank: Rank, mode: str) -> list[list[int]]:
    """Different pushes without pulls: two find a slot, the next wait until one is read."""
    init(rank)
    parameters = counters(2, 50_000)
    server = ParameterServer(parameters, OPTIMIZERS["sum"], mode=mode)
    for step in range(30):
        count_gradient(parameters, rank.rank)
        server.push([p.grad * 2 * step for p in parameters if p.grad is not None])
    settle(server)
    counts = counted(parameters)
    server.close()
    return counts


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pushes_without_pulls_are_applied_one_by_one(mode: str) -> None:
    total = sum(2 * step for step in range(30)) // (2 if mode == "sync" else 1)
    assert run_ranks(2, push_only, mode) == [[[total] * 2] * 2] * 2


def stop_early(rank: Rank) -> list[list[int]]:
    init(rank)
    parameters = counters(3)
    with ParameterServer(parameters, OPTIMIZERS["sum"]) as server:
        for _ in range(2 + rank.rank):
            count_gradient(parameters, rank.rank)
            assert parameters[0].grad is not None
            server.step([p.grad * 6 for p in parameters])
        assert server.clock == 2 + rank.rank
        return counted(parameters)


def test_sync_goes_on_without_a_worker_that_has_closed() -> None:
    """Updates are means of 3 workers, then of 2, then of 1."""
    results = run_ranks(3, stop_early)
    assert results[2] == [[4, 4 + 3, 4 + 3 + 6]] * 2
    assert results[0] == [[4, 4, 4]] * 2


def test_assignment_is_even_and_sections_do_not_overlap() -> None:
    sizes = [10, 700, 64, 1, 2050, 2050, 0, 333]
    shares = assign(sizes, 3)
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)
    for wire in (Wire(None, False), Wire(torch.float8_e4m3fn, True)):
        layout = PushLayout([torch.Size([n]) for n in sizes], 3, wire, keeps_base=True)
        end, begins = 8 * 3, layout.slot.begins
        for server, share in enumerate(layout.shares):
            values, base = begins["values", server], begins["base", server]
            assert values >= end and values % 64 == 0
            assert base >= values + wire.num_bytes(share.num_elems) and base % 64 == 0
            end = base + 4 * share.num_elems
        assert layout.slot.end >= end
