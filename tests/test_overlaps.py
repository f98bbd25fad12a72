"""Tensors of one call that share memory: the result of separate tensors, or an error before
anything moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks
from several_hosts import ONE_BY_ONE, ONE_HOST, PAIR, TWO_BY_TWO, Layout, of_layouts, on_layout

# A rank's part of the first length travels with the post, one of the second in several rounds.
LENGTHS = (500, 100_000)

Make = Callable[[int], torch.Tensor]


def of_numpy(num_elems: int) -> torch.Tensor:
    return torch.from_numpy(np.empty(num_elems, dtype=np.float32))


MAKERS: dict[str, Make] = {"torch": torch.empty, "heap": rota.empty, "numpy": of_numpy}


def part(memory: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    """A view with a storage of its own, which begins where the view does."""
    return torch.from_numpy(memory.numpy()[begin : begin + length])


def values(n: int, rank: int) -> torch.Tensor:
    return torch.arange(float(n)) + 1_000_000 * rank


def check(result: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    wrong = int((result != expected).sum())
    assert wrong == 0, f"{wrong} of {len(expected)} elements of {what} are wrong"


def check_everything(rank: Rank, make: Make, n: int, is_async: bool) -> None:
    """Every call with inputs and outputs that overlap in every way."""
    me, world = rank.rank, rank.world_size
    inputs = [values(n, peer) for peer in range(world)]

    def run(call: Callable[..., Any], *args: object, **options: object) -> None:
        work = call(*args, async_op=is_async, **options)
        if is_async:
            work.wait()

    # The own part, another one, and halves of two.
    begins = [me * n, (me + 1) % world * n, n // 2, (world - 1) * n - n // 3][
        : 4 if world > 1 else 1
    ]
    for begin in begins:
        output = make(world * n)
        own = part(output, begin, n)
        own.copy_(inputs[me])
        run(dist.all_gather_into_tensor, output, own)
        check(output, torch.cat(inputs), "all_gather", begin)

    for where in range(world):
        outputs = [make(n) for _ in range(world)]
        outputs[where].copy_(inputs[me])
        run(dist.all_gather, outputs, outputs[where])
        check(torch.cat(outputs), torch.cat(inputs), "all_gather of a list", where)

        outputs[where].copy_(inputs[me])
        run(dist.gather, outputs[where], outputs if me == 0 else None, dst=0)
        if me == 0:
            check(torch.cat(outputs), torch.cat(inputs), "gather", where)

        # The root's output is another rank's part.
        parts = [make(n) for _ in range(world)]
        for peer_part, content in zip(parts, inputs, strict=True):
            peer_part.copy_(content)
        run(dist.scatter, parts[where], parts if me == 0 else None, src=0)
        check(parts[where], inputs[me], "scatter", where)

    total = world * inputs[me] + sum(range(world))
    for begin in begins:
        whole = make(world * n)
        whole.copy_(torch.cat(inputs) + me)
        output = part(whole, begin, n)
        run(dist.reduce_scatter_tensor, output, whole)
        check(output, total, "reduce_scatter", begin)

    sent = torch.cat([inputs[me] + peer for peer in range(world)])
    received = torch.cat([inputs[peer] + me for peer in range(world)])
    for begin in (0, 1, n, world * n):
        memory = make(2 * world * n)
        whole, output = part(memory, 0, world * n), part(memory, begin, world * n)
        whole.copy_(sent)
        run(dist.all_to_all_single, output, whole)
        check(output, received, "all_to_all", begin)
    memory = make(world * n)
    memory.copy_(sent)
    lists = [[part(memory, i * n, n) for i in range(world)] for _ in range(2)]
    run(dist.all_to_all, lists[0], lists[1])
    check(memory, received, "all_to_all of lists")


@of_layouts(Layout((0,)), PAIR, ONE_HOST, TWO_BY_TWO, ONE_BY_ONE)
@on_layout()
def test_outputs_that_overlap_inputs_hold_what_separate_ones_would(rank: Rank) -> None:
    rank.init()
    for (name, make), n, is_async in itertools.product(MAKERS.items(), LENGTHS, (False, True)):
        try:
            check_everything(rank, make, n, is_async)
        except AssertionError as error:
            raise AssertionError(f"{error}, {name}, {n} elements, async {is_async}") from None


def strided_pairs() -> Iterator[tuple[str, torch.Tensor, torch.Tensor, bool]]:
    """Two tensors of one memory, and whether they have an element in common."""
    base = torch.zeros(6, 10)
    yield "columns", base[:, 2], base[:, 3], False
    yield "blocks of columns", base[:, :3], base[:, 3:], False
    yield "one column of both", base[:, :4], base[:, 3:], True
    yield "a column and its row", base[:, 4], base[2], True
    yield "a column's upper half and a lower row", base[:3, 4], base[4], False
    yield "odd and even", base.view(-1)[::2], base.view(-1)[1::2], False
    yield "a transpose", base.t(), base[3:4], True
    yield "steps of 7 and 10", base.view(-1)[0:42:7], base.view(-1)[1:61:10], True
    yield "steps of 6 and 10", base.view(-1)[0:42:6], base.view(-1)[1:61:10], False
    planes = torch.zeros(4, 5, 6)
    yield "inner blocks", planes[:, 1:3, 2:4], planes[:, 3:, 2:4], False
    yield "inner blocks of one row", planes[:, 1:3, 2:4], planes[1:2, 2:, 3:], True


@on_ranks(2)
def test_outputs_that_share_memory_are_refused_and_the_group_goes_on(rank: Rank) -> None:
    communicator = rank.communicator()
    ones = torch.ones(4)
    memory = torch.zeros(11)
    for call in (
        lambda: dist.all_gather([memory[:4], memory[3:7]], ones),
        lambda: dist.all_gather([memory[:4]] * 2, ones, async_op=True),
        lambda: dist.all_to_all([memory[:4], memory[2:6]], [ones, ones]),
        lambda: dist.all_reduce_coalesced([memory[:4], memory[3:7]]),
        lambda: communicator.reduce_bucket(
            memory[:4],
            memory[2:6].view(torch.float64),
            wire_dtype=torch.float32,
            block_scaling=False,
        ),
    ):
        check_error(error_of(call), "ValueError", "share", "give")
    assert memory.eq(0).all()

    for name, one, other, share in strided_pairs():
        kind, text = error_of(dist.all_reduce_coalesced, [one, other])
        assert (kind == "ValueError") == share, f"{name}: {kind}: {text}"
        other.zero_()
        one.fill_(1)
        dist.all_reduce(one)
        assert one.eq(2).all() and other.ne(0).any() == share, name
    dist.all_reduce(ones)
    assert ones.eq(2).all()
