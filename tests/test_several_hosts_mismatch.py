"""Ranks on several hosts that disagree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of
from several_hosts import ONE_BY_ONE, ONE_HOST, PAIR, TWO_BY_TWO, Layout, of_layouts, on_layout

# ---- disagreements


class Called(NamedTuple):
    """A collective of ranks 0 to 3, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, list[torch.Tensor]], object]
    sizes: tuple[int, ...] = (8,)  # of its tensors


def _sum(text: str, **options: Any) -> Called:
    return Called(f"all_reduce({text}", lambda c, t: c.all_reduce(t[0], **options))


def _bucket(**options: Any) -> Called:
    choices = {"wire_dtype": torch.float16, "block_scaling": False, **options}
    stats = torch.zeros(2, dtype=torch.float64)
    return Called("reduce_bucket(", lambda c, t: c.reduce_bucket(t[0], stats, **choices))


SUM = _sum("sum, float32[8]")
# test_random_mismatches.py has calls of other collectives, ops, dtypes, lengths and roots.
MISMATCHES = {
    "op": (SUM, _sum("max, float32[8]", op="max")),
    "wire": (SUM, _sum("sum, float32[8]", wire_dtype=torch.float16)),
    "order": (SUM, _sum("sum, float32[8]", order="tree")),
    "bucket": (SUM, _bucket()),
    "bucket-divisor": (_bucket(), _bucket(divisor=3.0)),
    "bucket-scaling": (_bucket(), _bucket(block_scaling=True)),
    "barrier": (SUM, Called("barrier()", lambda c, t: c.barrier(), ())),
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
            tensors = [torch.full((size,), rank.rank + 1.0) for size in call.sizes]
            error = error_of(functools.partial(call.run, communicator, tensors))
            check_error(error, "Mismatch", "rota.", "disagree", usual.text, other.text, *facts)
            assert error[1].count("nothing was written") == 1
            assert all(bool((tensor == rank.rank + 1).all()) for tensor in tensors)
            communicator.all_reduce(total := torch.full((9000,), float(rank.rank)))
            assert total[-1].item() == 6.0


@of_layouts(PAIR, TWO_BY_TWO)
@on_layout()
def test_backend_mismatch_raises_from_call_wait_and_future(rank: Rank) -> None:
    rank.init()
    is_odd = rank.rank >= rank.world_size // 2
    tensor = torch.ones(9 if is_odd else 8)
    errors = [error_of(lambda: dist.all_reduce(tensor))]
    work = dist.all_reduce(tensor, async_op=True)
    errors.append(error_of(work.wait))
    errors.append(error_of(work.get_future().wait))
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


def disagree_on_messages(rank: Rank) -> list[tuple[str, str]]:
    communicator = rank.communicator()
    n = rank.world_size
    errors = []
    if rank.rank == 0:
        for _ in range(4):
            communicator.send(torch.ones(10), n - 1, tag=4)
        communicator.send(torch.ones(0), n - 1, tag=4)
        communicator.send(torch.ones(300_000), n - 1, tag=4)
        communicator.send(torch.full((2,), 5.0), n - 1, tag=4)
    elif rank.rank == n - 1:
        for output in (
            torch.full((11,), 7.0),
            torch.full((10,), 7.0, dtype=torch.float64),
            torch.full((10,), 7, dtype=torch.int32),
            torch.full((0,), 7.0),
            torch.full((3,), 7.0),
            torch.full((300_001,), 7.0),
        ):
            errors.append(error_of(lambda output=output: communicator.recv(output, 0, tag=4)))
            assert (output == 7).all()
        communicator.recv(output := torch.zeros(2), 0, tag=4)
        assert output.tolist() == [5.0, 5.0]
    communicator.all_reduce(ones := torch.ones(5))
    assert ones[0].item() == n
    return errors


@of_layouts(ONE_HOST, TWO_BY_TWO, ONE_BY_ONE)
def test_recv_of_another_length_or_dtype_names_both_sides(layout: Layout) -> None:
    errors = layout.run(disagree_on_messages)[-1]
    sent = ["float32[10]"] * 4 + ["float32[0]", "float32[300000]"]
    expected = ["float32[11]", "float64[10]", "int32[10]", "float32[0]", "float32[3]"]
    expected.append("float32[300001]")
    assert len(errors) == len(sent)
    last = layout.world_size - 1
    for (error, text), theirs, own in zip(errors, sent, expected, strict=True):
        assert error == "Mismatch", text
        assert theirs in text and own in text and "rank 0" in text and f"rank {last}" in text


def split_differently(
    rank: Rank, sender: int, receiver: int
) -> tuple[str, str, bool, tuple[str, str], float]:
    """`receiver` expects one element more of `sender` than are sent."""
    communicator = rank.communicator(timeout_s=5)
    sent, received = [20_000] * rank.world_size, [20_000] * rank.world_size
    if rank.rank == receiver:
        received[sender] += 1
    output = torch.full((sum(received),), 7.0)
    error = error_of(
        lambda: communicator.all_to_all(
            output, torch.ones(sum(sent)), output_splits=received, input_splits=sent
        )
    )
    total = torch.ones(5)
    later = error_of(lambda: communicator.all_reduce(total))
    return *error, bool((output == 7).all()), later, total[0].item()


@pytest.mark.parametrize(("sender", "receiver"), [(0, 3), (3, 0), (1, 2), (0, 1), (3, 2)])
def test_all_to_all_of_unequal_splits_is_a_mismatch_on_every_rank(
    sender: int, receiver: int
) -> None:
    results = TWO_BY_TWO.run(split_differently, sender, receiver)
    for error, text, untouched, _, _ in results:
        assert error == "Mismatch", text
        assert f"rank {sender}" in text and f"rank {receiver}" in text
        assert untouched
    for _, _, _, later, total in results:
        assert (later[0], total) == ("nothing", 4.0), later[1]
