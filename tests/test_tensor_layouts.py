"""Tensors that are not plain memory: a right result or a clear error, never a wrong number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oracle import ALGORITHMS, assert_same
from ranks import Rank, on_ranks

SLOT_BYTES = 4096

# Views of some elements of a storage of 64 * 96.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda base: base.view(64, 96)[3:60],
    "columns": lambda base: base.view(64, 96)[:, 5:90],
    "one-column": lambda base: base.view(64, 96)[:, 7],
    "every-third": lambda base: base[1::3],
    "transpose": lambda base: base.view(64, 96).t(),
    "channels-last": lambda base: base.view(4, 16, 12, 8).permute(0, 3, 1, 2),
    "permuted-slice": lambda base: base.view(8, 24, 32).permute(2, 0, 1)[4:20, :, 3:9],
    "diagonal": lambda base: base.view(64, 96).diagonal(),
    "one-element": lambda base: base.view(64, 96)[9, 9:10].t(),
    "scalar": lambda base: base[17],
    "nothing": lambda base: base.view(64, 96)[:, 5:5],
}


@on_ranks(2)
def test_calls_of_view_write_it_and_leave_the_rest(rank: Rank) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    bases = [torch.arange(64.0 * 96) * (r + 1) for r in range(rank.world_size)]
    for name, view in VIEWS.items():
        total, sent = sum(view(base) for base in bases), view(bases[1])
        for call in (*ALGORITHMS, "broadcast"):
            base, expected = bases[rank.rank].clone(), bases[rank.rank].clone()
            view(expected).copy_(sent if call == "broadcast" else total)
            if call == "broadcast":
                communicator.broadcast(view(base), 1)
            else:
                communicator.all_reduce(view(base), "sum", call)
            assert_same(base, expected, f"{name} {call}, the whole storage")
        output = torch.empty(rank.world_size, sent.numel())
        communicator.all_gather(output, view(bases[rank.rank]))
        assert_same(output, torch.stack([view(b).flatten() for b in bases]), f"{name} all_gather")


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [-3.0, 3.0, -7.0]), ("product", [2.0, 2.0, 12.0]), ("min", [-2.0, 1.0, -4.0])],
)
@on_ranks(2)
def test_all_reduce_of_lazily_negated_tensor_reduces_its_values(
    rank: Rank, op: str, expected: list[float]
) -> None:
    """torch stores the negation as a flag on the tensor; the memory holds the unnegated values."""
    communicator = rank.communicator()
    tensor = torch._neg_view(torch.tensor([1.0, -2.0, 3.0]) + rank.rank)
    communicator.all_reduce(tensor, op)
    assert tensor.tolist() == expected


@on_ranks(2)
def test_copies_of_lazily_conjugated_tensor_move_its_values(rank: Rank) -> None:
    """Conjugated on one rank only."""
    communicator = rank.communicator()
    values = torch.tensor([1 + 2j, 3 - 4j])
    plain, conjugated = [1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j]
    sent = values.conj() if rank.rank == 0 else torch.zeros(2, dtype=values.dtype)
    communicator.broadcast(sent, 0)
    received = torch.zeros_like(values).conj() if rank.rank == 0 else values.clone()
    communicator.broadcast(received, 1)
    output = torch.zeros(2, 2, dtype=values.dtype)
    communicator.all_gather(output, values.conj() if rank.rank == 0 else values)
    results = [sent.tolist(), received.tolist(), *output.tolist()]
    assert results == [conjugated, plain, conjugated, plain]
