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
from several_hosts import ONE_BY_ONE, TWO_BY_TWO, Layout, on_layout

# ---- disagreements


class Called(NamedTuple):
    """A collective of ranks 0 to 3, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, list[torch.Tensor]], object]
    sizes: tuple[int, ...] = (8,)  # of its tensors
    dtype: torch.dtype = torch.float32


def _sum(text: str, size: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> Called:
    return Called(f"all_reduce({text}", lambda c, t: c.all_reduce(t[0], **options), (size,), dtype)


def _bucket(**options: Any) -> Called:
    choices = {"wire_dtype": torch.float16, "block_scaling": False, **options}
    stats = torch.zeros(2, dtype=torch.float64)
    return Called("reduce_bucket(", lambda c, t: c.reduce_bucket(t[0], stats, **choices))


SUM = _sum("sum, float32[8]")
MISMATCHES = {
    "op": (SUM, _sum("max, float32[8]", op="max")),
    "dtype": (SUM, _sum("sum, float64[8]", dtype=torch.float64)),
    "dtype-of-same-size": (SUM, _sum("sum, int32[8]", dtype=torch.int32)),
    "num_elems": (SUM, _sum("sum, float32[9]", 9)),
    "no-elems": (SUM, _sum("sum, float32[0]", 0)),
    "many-elems": (
        _sum("sum, float32[700000]", 700_000),
        _sum("sum, float32[700001]", 700_001),
    ),
    "wire": (SUM, _sum("sum, float32[8]", wire_dtype=torch.float16)),
    "order": (SUM, _sum("sum, float32[8]", order="tree")),
    "bucket": (SUM, _bucket()),
    "bucket-divisor": (_bucket(), _bucket(divisor=3.0)),
    "bucket-scaling": (_bucket(), _bucket(block_scaling=True)),
    "root": (
        Called("broadcast(float32[8], root 0)", lambda c, t: c.broadcast(t[0], 0)),
        Called("broadcast(float32[8], root 3)", lambda c, t: c.broadcast(t[0], 3)),
    ),
    "reduce-or-all_reduce": (SUM, Called("reduce(", lambda c, t: c.reduce(t[0], 1))),
    "barrier": (SUM, Called("barrier()", lambda c, t: c.barrier(), ())),
    "gather-length": (
        Called("all_gather(float32[8])", lambda c, t: c.all_gather(*t), (32, 8)),
        Called("all_gather(float32[9])", lambda c, t: c.all_gather(*t), (36, 9)),
    ),
    "scatter-length": (
        Called("reduce_scatter(", lambda c, t: c.reduce_scatter(*t), (8, 32)),
        Called("reduce_scatter(", lambda c, t: c.reduce_scatter(*t), (9, 36)),
    ),
    "exchange": (
        Called("all_to_all(", lambda c, t: c.all_to_all(*t), (16, 16)),
        Called("all_gather(float32[4])", lambda c, t: c.all_gather(*t), (16, 4)),
    ),
}
# Who calls the second of a pair: a whole host, one rank, one rank of each host.
ODD_RANKS = {"host": [2, 3], "rank": [3], "first": [0], "each-host": [1, 3]}


def call_differently(rank: Rank, layout: Layout, odd_ranks: list[int]) -> dict[str, Any]:
    communicator = rank.communicator()
    seen = {}
    for name, calls in MISMATCHES.items():
        call = calls[rank.rank in odd_ranks]
        for _ in range(2):
            tensors = [torch.full((size,), rank.rank + 1, dtype=call.dtype) for size in call.sizes]
            error = error_of(functools.partial(call.run, communicator, tensors))
            untouched = all(bool((tensor == rank.rank + 1).all()) for tensor in tensors)
            communicator.all_reduce(total := torch.full((9000,), float(rank.rank)))
            seen[name] = (*error, untouched, total[-1].item())
    return seen


@pytest.mark.parametrize("odd", ODD_RANKS)
def test_mismatch_raises_on_every_rank_and_the_group_goes_on(odd: str) -> None:
    results = TWO_BY_TWO.run(call_differently, ODD_RANKS[odd])
    wrong = []
    for name, (usual, other) in MISMATCHES.items():
        for rank, result in enumerate(results):
            error, text, untouched, total = result[name]
            is_told = error == "Mismatch" and usual.text in text and other.text in text
            if not (is_told and untouched and total == 6.0):
                wrong.append(f"{name}, rank {rank}: {error} {text} {untouched} {total}")
    assert not wrong, "\n".join(wrong)


def test_mismatch_names_hosts_and_ranks() -> None:
    for result in TWO_BY_TWO.run(call_differently, [2, 3]):
        text = result["op"][1]
        assert "rota." in text and "disagree" in text and "nothing was written" in text
        assert "host 0 (ranks 0 1)" in text and "host 1 (ranks 2 3)" in text
    for result in TWO_BY_TWO.run(call_differently, [3]):
        text = result["op"][1]
        assert "rank 2 called all_reduce(sum" in text and "rank 3 called all_reduce(max" in text
        assert text.count("nothing was written") == 1


@on_layout(TWO_BY_TWO)
def test_backend_mismatch_raises_from_call_wait_and_future(rank: Rank, layout: Layout) -> None:
    rank.init()
    is_odd = layout.host_of[rank.rank] == 1
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


def disagree_on_messages(rank: Rank, layout: Layout) -> list[tuple[str, str]]:
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


@pytest.mark.parametrize("layout", [TWO_BY_TWO, ONE_BY_ONE], ids=str)
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
    rank: Rank, layout: Layout, sender: int, receiver: int
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
