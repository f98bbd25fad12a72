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
    POINTS,
    backward,
    count_gradient,
    counted,
    counters,
    dawdle,
    flat,
    init,
    kill_at,
    settle,
)
from ranks import Rank, on_ranks, run_ranks
from rota.parameter_server import ParameterServer
from rota.parameter_server.setup import PushLayout, assign
from rota.shared.wire import Wire

pytestmark = pytest.mark.same_in_every_build

NUM_STEPS = 12
# How many ranks, which of them serve, and the point of an update at which the first server dies.
LAYOUTS = [
    *((world_size, servers, None) for world_size, servers in ((2, None), (3, None), (3, [1]))),
    (5, [0, 3], None),
    *((4, [0, 2], point) for point in POINTS),
]


def train_beside_ddp(
    rank: Rank, optimizer: str, servers: list[int] | None, point: str | None
) -> None:
    init(rank)
    if point is not None and rank.rank == 0:
        kill_at(point)
    model = nn.Sequential(make_model(), nn.Linear(8, 3))
    torch.manual_seed(rank.rank)  # rank 0's parameters count
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for tensor in start:
        dist.broadcast(tensor, 0)
    lr_lambda = None if point is None else lambda update: 1 / (1 + update)
    server = ParameterServer(model, OPTIMIZERS[optimizer], servers=servers, lr_lambda=lr_lambda)
    group = dist.new_group(server.workers)
    if not server.is_worker:
        return server.serve()
    assert torch.equal(flat(model.parameters()), flat(start))

    expected = nn.Sequential(make_model(), nn.Linear(8, 3))
    expected.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(expected, process_group=group)
    ddp.register_comm_hook(group, rota.allreduce_hook)
    expected_optimizer = OPTIMIZERS[optimizer](expected.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(expected_optimizer, lr_lambda or (lambda _: 1))
    for step in range(NUM_STEPS):
        backward(ddp, rank.rank, step)
        expected_optimizer.step()
        scheduler.step()
        backward(model, rank.rank, step)
        server.step()
        assert torch.equal(flat(model.parameters()), flat(expected.parameters())), f"step {step}"
    if point is None:
        every_rank = range(rank.world_size)
        assert server.staleness == {r: {0: NUM_STEPS} for r in servers or every_rank}
    server.close()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(("world_size", "servers", "point"), LAYOUTS)
def test_sync_has_the_bits_of_all_reduce_even_if_a_server_is_killed(
    world_size: int, optimizer: str, servers: list[int] | None, point: str | None
) -> None:
    killed = [0] if point else []
    run_ranks(world_size, train_beside_ddp, optimizer, servers, point, killed=killed)


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
            master.grad = parameter.grad.float()
            communicator.all_reduce(master.grad, "avg")
        optimizer.step()
        server.step()
        assert torch.equal(flat(model.parameters()), flat(m.bfloat16() for m in masters))
    server.close()


@on_ranks(5)
def test_gradients_may_be_missing_strided_or_empty_and_servers_idle(rank: Rank) -> None:
    """An empty and a scalar parameter; at least one server has none."""
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
    assert float(parameters[2]) == -2 and parameters[3].tolist() == [-4] * 5


class Replacing(torch.optim.Optimizer):
    """Subtracts gradients; gives its parameters other memory, and drops the gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
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
    rank: Rank, num_steps: list[int], num_elems: int, point: str | None, options: dict[str, Any]
) -> Any:
    init(rank)
    if point is not None and rank.rank == 0:
        kill_at(point)
    parameters = counters(rank.world_size, num_elems)
    server = ParameterServer(parameters, OPTIMIZERS["sum"], **options)
    group = dist.new_group(server.workers)
    if not server.is_worker:
        server.serve()
        return {r: sum(delays.values()) for r, delays in server.delays.items()}
    staleness = options.get("staleness")
    generator = random.Random(rank.rank)
    for step in range(num_steps[rank.rank]):
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


STALE = {"mode": "stale", "staleness": 1}


@pytest.mark.parametrize(
    ("options", "num_elems", "point"),
    [
        *(
            ({"mode": "async", "servers": servers}, num_elems, None)
            for servers in (None, [1])
            for num_elems in (1, 100_000)
        ),
        *(
            (STALE | {"staleness": staleness, "servers": servers}, 64, None)
            for servers in (None, [2])
            for staleness in (0, 1, 3)
        ),
        *(
            (options | {"servers": [0, 2]}, 1000, point)
            for options in ({"mode": "async"}, STALE)
            for point in POINTS
        ),
    ],
    ids=str,
)
def test_every_push_is_applied_once_and_no_worker_is_too_far_ahead(
    options: dict[str, Any], num_elems: int, point: str | None
) -> None:
    """Also when a server is killed."""
    world_size, killed = (3, []) if point is None else (4, [0])
    step = 10 if options["mode"] == "async" else 0
    num_steps = [40 + step * rank for rank in range(world_size)]
    results = run_ranks(
        world_size, count_pushes, num_steps, num_elems, point, options, killed=killed
    )
    servers = options["servers"] or []
    pushes = [0 if rank in servers else number for rank, number in enumerate(num_steps)]
    of_workers = {rank: number for rank, number in enumerate(pushes) if rank not in servers}
    for rank, result in enumerate(results):
        if rank not in servers:
            assert result == [pushes] * 2
        elif point is None:
            assert result == of_workers


@on_ranks(2)
def test_histogram_has_the_clocks_that_a_worker_was_ahead(rank: Rank) -> None:
    """Worker 1 only starts when worker 0 has used up its staleness."""
    init(rank)
    parameters = counters(2)
    server = ParameterServer(parameters, OPTIMIZERS["sum"], mode="stale", staleness=2)
    for turn in range(2):
        if rank.rank == turn:
            for _ in range(2):
                count_gradient(parameters, turn)
                server.step()
        dist.barrier()
    staleness = server.staleness
    settle(server)
    server.close()
    for counter in staleness.values():
        # The pulls after push 1 and 2, and that of settle().
        assert rank.rank == 1 or counter == {1: 1, 2: 1, 0: 1}


@pytest.mark.parametrize("mode", ["sync", "async"])
@on_ranks(2)
def test_pushes_without_pulls_are_applied_one_by_one(rank: Rank, mode: str) -> None:
    """Different pushes: two find a slot, the next wait until one is read."""
    init(rank)
    parameters = counters(2, 50_000)
    server = ParameterServer(parameters, OPTIMIZERS["sum"], mode=mode)
    for step in range(30):
        count_gradient(parameters, rank.rank)
        server.push([p.grad * 2 * step for p in parameters])
    settle(server)
    total = sum(2 * step for step in range(30)) // (2 if mode == "sync" else 1)
    assert counted(parameters) == [[total] * 2] * 2
    server.close()


@on_ranks(3)
def test_sync_goes_on_without_a_worker_that_has_closed(rank: Rank) -> None:
    """Updates are means of 3 workers, then of 2, then of 1."""
    init(rank)
    parameters = counters(3)
    with ParameterServer(parameters, OPTIMIZERS["sum"]) as server:
        for _ in range(2 + rank.rank):
            count_gradient(parameters, rank.rank)
            server.step([p.grad * 6 for p in parameters])
        assert server.clock == 2 + rank.rank
        expected = [[4, 4, 4], [4, 4 + 3, 4 + 3], [4, 4 + 3, 4 + 3 + 6]]
        assert counted(parameters) == [expected[rank.rank]] * 2


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
