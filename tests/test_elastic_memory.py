"""The memory of a training state: reservations, arenas, and storages that move there."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

import rota
from elastic_workers import first_generation, store_of
from ranks import Rank, on_ranks
from rota import _C
from rota.elastic import Membership, Reservation, State
from rota.elastic.arena import Arena

pytestmark = pytest.mark.same_in_every_build


@on_ranks(2)
def test_parameters_that_cannot_move_are_copied(rank: Rank, port: int) -> None:
    _, generation = first_generation(rank, port)
    model = nn.Linear(100, 100)
    model.weight = nn.Parameter(rota.empty(100, 100).fill_(float(rank.rank + 1)))
    address = model.weight.data_ptr()
    state = State(model=model)
    if rank.rank == 0:
        state.commit()
        model.weight.data.fill_(7.0)
    state.synchronize(generation, check_equal=True)
    assert model.weight.data_ptr() == address and model.weight.eq(7).all()


@on_ranks(1)
def test_reservation_without_a_job_or_for_another_layout(rank: Rank, port: int) -> None:
    membership = Membership(store_of(port))
    state = State(model=nn.Linear(3, 3))
    assert not state.take(Reservation(membership))
    state.synchronize(membership.next())
    state.commit()
    other = State(model=nn.Linear(9, 9))
    reservation = Reservation(membership)
    assert other.take(reservation)
    assert other._arena_of([7]).lengths == [7]
    assert not other.take(reservation)  # it had it


def test_arena_is_copied_from_what_it_has_mapped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, second = [100, 5000], timedelta(seconds=1)
    source, other, target = Arena(lengths), Arena(lengths), Arena(lengths)
    source.bytes.fill_(3)
    other.bytes.fill_(4)
    target.prepare(source.address, "rank 0", second)
    monkeypatch.setattr(_C, "OpenedTensor", None)  # it needs no further one
    assert target.fetch(source.address, "rank 0", second) == source.checksum()
    assert target.bytes.equal(source.bytes)
    target.unmap_source()
    monkeypatch.undo()
    target.prepare(source.address, "rank 0", second)
    assert target.fetch(other.address, "rank 1", second) == other.checksum()
    assert target.bytes.equal(other.bytes)


def test_move_storage_without_copying_takes_what_is_there_and_moves_again() -> None:
    tensor = torch.zeros(3)
    for value in (1.0, 2.0):
        place = torch.full((3,), value).view(torch.uint8)
        assert _C.move_storage(tensor, place, copies=False)
        del place  # the storage keeps it
        assert tensor.tolist() == [value] * 3


def test_move_storage_refuses_what_it_cannot_move() -> None:
    assert not _C.move_storage(rota.empty(4), rota.empty(16, dtype=torch.uint8), copies=True)
    assert not _C.move_storage(
        torch.from_numpy(torch.zeros(4).numpy().copy()),
        torch.empty(16).view(torch.uint8)[:16],
        copies=True,
    )
    for place in (torch.empty(5, dtype=torch.uint8), torch.empty(32, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="a place of"):
            _C.move_storage(torch.zeros(4), place, copies=True)
