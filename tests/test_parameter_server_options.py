"""ParameterServer's options, each beside a plain computation of the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from bucket_oracle import Format
from models import make_model
from parameter_servers import OPTIMIZERS, backward, flat, init, settle
from ranks import Rank, on_ranks
from rota.parameter_server import ParameterServer
from several_hosts import rounded

pytestmark = pytest.mark.same_in_every_build


def parameters_of(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(size).float()) for size in sizes]


@pytest.mark.parametrize("compensation", [0.0, 0.5])
@on_ranks(2)
def test_delay_compensation_equals_the_formula(rank: Rank, compensation: float) -> None:
    """Worker 1 pulls, then worker 0 pushes, then worker 1 pushes; all numbers are exact."""
    init(rank)
    parameters = parameters_of(5, 64)
    start = flat(parameters)
    server = ParameterServer(
        parameters, OPTIMIZERS["sum"], mode="async", delay_compensation=compensation
    )
    gradients = [torch.arange(len(start)) % 5 - 2.0, torch.arange(len(start)) % 7 - 3.0]
    for turn in range(2):
        if rank.rank == turn:
            server.push(list(gradients[turn].split([5, 64])))
            server.flush()
        dist.barrier()
    server.pull()
    now = start - gradients[0]
    delayed = gradients[1]
    compensated = delayed + compensation * delayed * delayed * (now - start)
    assert torch.equal(flat(parameters), now - compensated)
    assert server.delays == {0: {0: 1}, 1: {1: 1}}
    server.close()


@pytest.mark.parametrize("error_feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize(
    ("wire_dtype", "block_scaling"),
    [(torch.float16, False), (torch.bfloat16, False), (torch.float8_e4m3fn, True)],
    ids=["float16", "bfloat16", "e4m3-scaled"],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
@on_ranks(2)
def test_narrow_wire_rounds_each_push_once(
    rank: Rank, wire_dtype: torch.dtype, block_scaling: bool, error_feedback: bool, mode: str
) -> None:
    init(rank)
    sizes = [64, 1000]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    server = ParameterServer(
        parameters,
        OPTIMIZERS["sum"],
        mode=mode,
        wire_dtype=wire_dtype,
        block_scaling=block_scaling,
        error_feedback=error_feedback,
    )
    num_workers = rank.world_size
    residuals = [[torch.zeros(size) for size in sizes] for _ in range(num_workers)]
    expected = [torch.zeros(size) for size in sizes]
    for step in range(4):
        sent = []
        for worker in range(num_workers):
            generator = torch.Generator().manual_seed(10 * step + worker)
            gradients = [torch.randn(size, generator=generator) for size in sizes]
            if worker == rank.rank:
                server.push(gradients)
                if mode == "async":
                    server.flush()
            dist.barrier()
            sent.append([torch.zeros(size) for size in sizes])
            for i, gradient in enumerate(gradients):
                value = gradient + residuals[worker][i] if error_feedback else gradient
                wire = Format(wire_dtype, block_scaling)
                sent[worker][i] = torch.from_numpy(rounded(value.numpy(), wire))
                residuals[worker][i] = value - sent[worker][i]
        for i in range(len(sizes)):
            if mode == "sync":
                expected[i] -= (sent[0][i] + sent[1][i]) / 2
            else:
                expected[i] -= sent[0][i]
                expected[i] -= sent[1][i]
        server.pull()
        assert torch.equal(flat(parameters), flat(expected)), f"step {step}"
        dist.barrier()  # nobody pushes before all have pulled
    server.close()


@on_ranks(2)
def test_inf_and_nan_are_pushed_but_leave_no_residual(rank: Rank) -> None:
    init(rank)
    parameters = [nn.Parameter(torch.zeros(3))]
    server = ParameterServer(
        parameters,
        OPTIMIZERS["sum"],
        wire_dtype=torch.float16,
        block_scaling=False,
        error_feedback=True,
    )
    server.step([torch.tensor([1.0, 1e6, torch.nan])])
    assert parameters[0].tolist()[:2] == [-1.0, -torch.inf] and parameters[0][2].isnan()
    gradient = torch.ones(3)
    server.push([gradient])
    views = server._connection.mailbox._residuals
    assert all(residual.isfinite().all() for residual in views)
    server.close()


@pytest.mark.parametrize("mode", ["sync", "async", "stale"])
@on_ranks(2)
def test_pushed_weights_are_averaged(rank: Rank, mode: str) -> None:
    """Workers take steps of their own, and push the weights."""
    init(rank)
    model = make_model()
    local = OPTIMIZERS["momentum"](model.parameters())
    server = ParameterServer(
        model, None, mode=mode, average_weights=True, staleness=1 if mode == "stale" else None
    )
    communicator = rota.Communicator()
    for step in range(3):
        before = flat(model.parameters())
        for local_step in range(2):
            backward(model, rank.rank, 2 * step + local_step)
            local.step()
        pushed = flat(model.parameters())
        if mode == "sync":
            expected = pushed.clone()
            communicator.all_reduce(expected, "avg")
            server.step()
        else:
            all_pushed = [torch.empty_like(pushed) for _ in range(rank.world_size)]
            dist.all_gather(all_pushed, pushed)
            expected = before
            for turn in range(rank.world_size):
                if turn == rank.rank:
                    server.push()
                    server.flush()
                dist.barrier()
                expected = expected.lerp(all_pushed[turn], 1 / rank.world_size)
            server.pull()
        assert torch.equal(flat(model.parameters()), expected)
        dist.barrier()
    server.close()


@on_ranks(2)
def test_lr_lambda_sees_the_number_of_the_update(rank: Rank) -> None:
    init(rank)
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(7))]
    server = ParameterServer(
        parameters,
        lambda p: torch.optim.SGD(p, lr=2.0),
        mode="stale",
        staleness=0,
        lr_lambda=lambda update: 1.0 / 2**update,
    )
    for _ in range(2):
        server.step([torch.ones(4), torch.ones(7)])
    settle(server)
    # Four updates, of two workers.
    assert flat(parameters).tolist() == [-2 * (1 + 0.5 + 0.25 + 0.125)] * 11
    server.close()


@on_ranks(3)
def test_several_parameter_servers_do_not_mix(rank: Rank) -> None:
    """Two servers over one group, and one over a subgroup."""
    init(rank)
    subgroup = dist.new_group([1, 2])
    parameters = [parameters_of(3) for _ in range(3)]
    servers = [ParameterServer(p, OPTIMIZERS["sum"]) for p in parameters[:2]]
    if rank.rank > 0:
        servers.append(ParameterServer(parameters[2], OPTIMIZERS["sum"], subgroup))
    for i, server in enumerate(servers):
        server.step([torch.full((3,), float(i + 1))])
    for server in reversed(servers):
        server.close()
    result = [float(p[0][0]) for p in parameters]
    assert result == [[-1, -2, 0], [-1, -2, -3], [-1, -2, -3]][rank.rank]
