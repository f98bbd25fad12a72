"""Members of a rota.elastic.Membership whose tensors are on the GPU come, die, and copy a state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_workers import all_hear, first_order, serve, store_of
from on_gpu import DEVICE, LIMIT_S, on_ranks
from ranks import Rank, Ranks, check_error, error_of
from rota.elastic import Membership, State

PARAMETER, MOMENTUM = 0.5, 2.0  # of a model that has trained
NUM_FEATURES = 300


@pytest.mark.parametrize("place", [0, 2])
def test_cuda_sums_after_each_change_of_members(store: dist.TCPStore, place: int) -> None:
    arguments = (store.port, 2, None, str(DEVICE))
    with Ranks(3, serve, *arguments, timeout_s=LIMIT_S) as ranks:
        order = first_order(ranks, 2)
        ranks.tell(2)
        order.append(2)
        all_hear(ranks, order)
        dead = order.pop(place)
        ranks.kill(dead)
        all_hear(ranks, order)
        store.set("stop", "")
        ranks.results(killed=[dead])


@on_ranks(2)
def test_cuda_state_is_copied_from_a_rank_that_has_trained(rank: Rank, port: int) -> None:
    """Rank 0 has trained; torch computes nothing here, so that a simulated GPU will do."""
    torch.cuda.set_device(DEVICE)
    membership = Membership(store_of(port), rank=rank.rank)
    model = nn.Linear(NUM_FEATURES, NUM_FEATURES).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, optimizer=optimizer)
    if rank.rank == 0:
        for parameter in model.parameters():
            parameter.data.copy_(torch.full(parameter.shape, PARAMETER))
            momentum = torch.full(parameter.shape, MOMENTUM).to(DEVICE)
            optimizer.state[parameter]["momentum_buffer"] = momentum
        state.commit()
    has_copied = state.synchronize(membership.next(min_members=2), check_equal=True)
    state.commit()
    assert state.num_steps == 2
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    assert all(tensor.device == DEVICE for tensor in (*model.parameters(), *momenta))
    assert has_copied == (rank.rank == 1)
    assert values_of(model.parameters()) == {PARAMETER} and values_of(momenta) == {MOMENTUM}


def step_with_the_dead(rank: Rank, port: int) -> tuple[list[tuple[str, str]], set[float]]:
    torch.cuda.set_device(DEVICE)
    membership = Membership(store_of(port), rank=rank.rank)
    model = nn.Linear(NUM_FEATURES, 1, bias=False).to(DEVICE)
    model.weight.data.copy_(torch.full((1, NUM_FEATURES), PARAMETER))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = State(model=model, optimizer=optimizer)
    state.synchronize(membership.next(min_members=2))
    gradient = model.weight.grad = torch.zeros(1, NUM_FEATURES).to(DEVICE)
    dist.all_reduce(gradient)
    state.commit()
    if rank.rank == 0:
        dist.all_reduce(gradient, async_op=True)
    rank.tell()
    rank.hear()  # rank 1 is dead
    errors = [error_of(optimizer.step), error_of(state.commit)]
    return errors, values_of(model.parameters())


@pytest.mark.order
def test_cuda_step_without_gradients_of_all_is_neither_taken_nor_committed(
    store: dist.TCPStore,
) -> None:
    with Ranks(2, step_with_the_dead, store.port, timeout_s=LIMIT_S) as ranks:
        ranks.hear_all()
        ranks.kill(1)
        ranks.tell(0)
        errors, parameters = ranks.results(killed=[1])[0]
    for error in errors:
        check_error(error, "PeerFailed")
    assert parameters == {PARAMETER}


def values_of(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> set[float]:
    return {value for tensor in tensors for value in tensor.detach().cpu().unique().tolist()}
