"""Ranks on several hosts that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from oracle import name_of
from ranks import Rank, check_error, error_of
from several_hosts import ONE_BY_ONE, ONE_HOST, PAIR, TWO_BY_TWO, of_layouts, on_layout


class Called(NamedTuple):
    """A collective of ranks 0 to 3, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, torch.Tensor], object]


def _sum(text: str, **options: Any) -> Called:
    return Called(f"all_reduce({text}", lambda c, t: c.all_reduce(t, **options))


def _bucket(**options: Any) -> Called:
    choices = {"wire_dtype": torch.float16, "block_scaling": False, **options}
    stats = torch.zeros(2, dtype=torch.float64)
    return Called("reduce_bucket(", lambda c, t: c.reduce_bucket(t, stats, **choices))


SUM = _sum("sum, float32[8]")
# test_random_mismatches.py has calls of other collectives, ops, dtypes, lengths and roots.
MISMATCHES = {
    "op": (SUM, _sum("max, float32[8]", op="max")),
    "wire": (SUM, _sum("sum, float32[8]", wire_dtype=torch.float16)),
    "order": (SUM, _sum("sum, float32[8]", order="tree")),
    "bucket": (SUM, _bucket()),
    "bucket-divisor": (_bucket(), _bucket(divisor=3.0)),
    "bucket-scaling": (_bucket(), _bucket(block_scaling=True)),
    "barrier": (SUM, Called("barrier()", lambda c, t: c.barrier())),
}
# Who calls the second of a pair (a whole host, one rank, one rank of each host), and what an error
# then says of them.
ODD_RANKS = [
    ([2, 3], ("host 0 (ranks 0 1)", "host 1 (ranks 2 3)")),
    ([3], ("rank 2 called ", "rank 3 called ")),
    ([0], ()),
    ([1, 3], ()),
]


@pytest.mark.parametrize(("odd_ranks", "facts"), ODD_RANKS, ids=str)
@on_layout(TWO_BY_TWO)
def test_mismatch_raises_on_every_rank_and_the_group_goes_on(
    rank: Rank, odd_ranks: list[int], facts: tuple[str, ...]
) -> None:
    communicator = rank.communicator()
    for usual, other in MISMATCHES.values():
        call = other if rank.rank in odd_ranks else usual
        for _ in range(2):
            tensor = torch.full((8,), rank.rank + 1.0)
            error = error_of(call.run, communicator, tensor)
            check_error(error, "Mismatch", "rota.", "disagree", usual.text, other.text, *facts)
            assert error[1].count("nothing was written") == 1
            assert tensor.eq(rank.rank + 1).all()
            communicator.all_reduce(total := torch.full((9000,), float(rank.rank)))
            assert total[-1].item() == 6.0


@of_layouts(PAIR, TWO_BY_TWO)
@on_layout()
def test_backend_mismatch_raises_from_wait_future_lists_and_sparse_calls(rank: Rank) -> None:
    rank.init()
    is_odd = rank.rank >= rank.world_size // 2
    tensor = torch.ones(9 if is_odd else 8)
    work = dist.all_reduce(tensor, async_op=True)
    errors = [error_of(work.wait), error_of(work.get_future().wait)]
    outputs = [torch.zeros(3 + (is_odd and i == 0)) for i in range(rank.world_size)]
    errors.append(error_of(lambda: dist.all_gather(outputs, outputs[rank.rank].clone())))
    tensors = [torch.ones(4), torch.ones(5 + is_odd), torch.ones(6)]
    errors.append(error_of(lambda: dist.all_reduce_coalesced(tensors)))
    sparse = torch.eye(3 + is_odd).to_sparse()
    errors.append(error_of(lambda: dist.all_reduce(sparse)))
    dist.all_reduce(good := torch.ones(3))
    assert good.tolist() == [float(rank.world_size)] * 3
    assert [float(t[0]) for t in tensors] == [float(rank.world_size), 1.0, 1.0]
    for error in errors:
        check_error(error, "Mismatch")


@of_layouts(ONE_HOST, TWO_BY_TWO, ONE_BY_ONE)
@on_layout()
def test_recv_of_another_length_or_dtype_names_both_sides(rank: Rank) -> None:
    communicator = rank.communicator()
    last = rank.world_size - 1
    for num_sent, num_elems, dtype in (
        (10, 11, torch.float32),
        (10, 10, torch.float64),
        (10, 10, torch.int32),
        (10, 0, torch.float32),
        (0, 3, torch.float32),
        (300_000, 300_001, torch.float32),
    ):
        if rank.rank == 0:
            communicator.send(torch.ones(num_sent), last, tag=4)
        elif rank.rank == last:
            output = torch.full((num_elems,), 7, dtype=dtype)
            error = error_of(communicator.recv, output, 0, tag=4)
            sides = (f"float32[{num_sent}]", f"{name_of(dtype)}[{num_elems}]")
            check_error(error, "Mismatch", *sides, "rank 0", f"rank {last}")
            assert (output == 7).all()
    if rank.rank == 0:
        communicator.send(torch.full((2,), 5.0), last, tag=4)
    elif rank.rank == last:
        communicator.recv(output := torch.zeros(2), 0, tag=4)
        assert output.tolist() == [5.0, 5.0]
    communicator.all_reduce(ones := torch.ones(5))
    assert ones[0].item() == rank.world_size


@pytest.mark.parametrize(("sender", "receiver"), [(0, 3), (3, 0), (1, 2), (0, 1), (3, 2)])
@on_layout(TWO_BY_TWO)
def test_all_to_all_of_unequal_splits_is_a_mismatch_on_every_rank(
    rank: Rank, sender: int, receiver: int
) -> None:
    """`receiver` expects one element more of `sender` than are sent."""
    communicator = rank.communicator(timeout_s=5)
    sent, received = [20_000] * rank.world_size, [20_000] * rank.world_size
    if rank.rank == receiver:
        received[sender] += 1
    output = torch.full((sum(received),), 7.0)
    splits = {"output_splits": received, "input_splits": sent}
    error = error_of(communicator.all_to_all, output, torch.ones(sum(sent)), **splits)
    communicator.all_reduce(total := torch.ones(5))
    check_error(error, "Mismatch", f"rank {sender}", f"rank {receiver}")
    assert (output == 7).all()
    assert total[0].item() == 4.0
