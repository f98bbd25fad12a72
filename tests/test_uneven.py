"""examples/uneven.py: ranks of different speed, and the parameters of one rank.

Splits and sums are those of examples/balance.py. No test asserts a time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterator
from fractions import Fraction

import balance
import pytest
import torch
import uneven
from hypothesis import given, settings
from hypothesis import strategies as st

from programs import run_python
from ranks import Rank, on_ranks
from test_sum_order import sum_in_tree

pytestmark = pytest.mark.same_in_every_build


# ---------------------------------------------------------------------------------------------
# The split


def splits_of(num_micro_batches: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """All splits that leave every rank at least one."""
    for cuts in itertools.combinations(range(1, num_micro_batches), num_ranks - 1):
        bounds = (0, *cuts, num_micro_batches)
        yield tuple(end - begin for begin, end in itertools.pairwise(bounds))


def slowest(split: tuple[int, ...], speeds: list[int]) -> Fraction:
    return max(Fraction(share, speed) for share, speed in zip(split, speeds, strict=True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_split_has_the_least_time_of_the_slowest_rank(speeds: list[int], extra: int) -> None:
    num_micro_batches = len(speeds) + extra
    split = tuple(balance.split_by_speed(speeds, num_micro_batches))
    every = list(splits_of(num_micro_batches, len(speeds)))
    assert split in every
    assert slowest(split, speeds) == min(slowest(other, speeds) for other in every)


@pytest.mark.parametrize(
    ("speeds", "problem"),
    [
        ([1.0] * 5, "a step has 4 micro-batches for 5 ranks"),
        ([1.0, 0.0], "the speed of rank 1 is 0.0"),
        ([-1.0, 1.0], "the speed of rank 0 is -1.0"),
        ([1.0, math.nan], "the speed of rank 1 is nan"),
        ([math.inf, 1.0], "the speed of rank 0 is inf"),
    ],
)
def test_split_refuses_what_it_cannot_split(speeds: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        balance.split_by_speed(speeds, 4)


@on_ranks(2)
def test_ranks_agree_on_a_split_by_smoothed_speeds(rank: Rank) -> None:
    comm = rank.communicator()
    speed = balance.Speed()
    splits = []
    # The speeds are 1/2 and 1/6. Then rank 0 takes 6 s, and is smoothed to 1/3.
    for num_micro_batches, of_ranks in ((8, ([1, 1, 4], [6])), (6, ([6], [6, 6]))):
        for seconds in of_ranks[rank.rank]:
            speed.add(1, seconds)
        splits.append(speed.agree_on_split(comm, num_micro_batches))
    assert splits == [[6, 2], [4, 2]]


# ---------------------------------------------------------------------------------------------
# The tree


def test_subtrees_cover_a_range_and_are_what_its_leaves_leave() -> None:
    for begin, end in itertools.combinations_with_replacement(range(17), 2):
        nodes = balance.subtrees(begin, end)
        leaves = [leaf for first, num in nodes for leaf in range(first, first + num)]
        assert leaves == list(range(begin, end))
        assert all(num & (num - 1) == 0 and first % num == 0 for first, num in nodes)
        assert len(nodes) <= 2 * math.log2(16)

        stack: list[tuple[balance.Subtree, torch.Tensor]] = []
        for leaf in range(begin, end):
            balance.push(stack, balance.Subtree(leaf, 1), torch.zeros(1))
        assert [node for node, _ in stack] == nodes


def gradient(micro_batch: int, num_elems: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randn(num_elems, generator=generator)


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches"), [(1, 1), (2, 2), (2, 16), (3, 8), (4, 4)]
)
@on_ranks()
def test_mean_has_the_bits_of_the_tree_for_every_split(rank: Rank, num_micro_batches: int) -> None:
    comm = rank.communicator()
    model = torch.nn.Linear(10, 10)  # 110 elements, which 3 ranks cannot share evenly
    terms = [gradient(micro_batch, 110) for micro_batch in range(num_micro_batches)]
    expected = sum_in_tree(terms) / num_micro_batches
    if num_micro_batches > 2:
        assert not torch.equal(expected, sum(terms) / num_micro_batches)
    mean = balance.TreeMean(model, num_micro_batches, comm)
    for split in splits_of(num_micro_batches, rank.world_size):
        for micro_batch in uneven.share_of(rank.rank, split):
            balance.set_gradients(list(model.parameters()), terms[micro_batch])
            mean.add(micro_batch)
            assert all(parameter.grad is None for parameter in model.parameters())
        mean.reduce(split)
        assert torch.equal(torch.cat(balance.gradients_of(list(model.parameters()))), expected)


# ---------------------------------------------------------------------------------------------
# The example


@pytest.mark.parametrize(("optimizer", "num_ranks"), [("adamw", 3), ("sgd", 2)])
def test_slow_rank_gets_less_and_parameters_are_those_of_one_rank(
    optimizer: str, num_ranks: int
) -> None:
    # So slow that no stall of a busy machine hides it.
    options = f"--context 8 --batch 1 --steps 5 --measure-every 2 --slow 20 --ranks {num_ranks}"
    options += f" --micro-batches 8 --optimizer {optimizer}"
    done = run_python("examples/uneven.py", *options.split())
    assert done.stdout.count("one rank's bits") == 2
    assert "within" in done.stdout
    (splits,) = re.findall(r"^measured split: (.*)$", done.stdout, re.MULTILINE)
    last = [int(share) for share in splits.split(", ")[-1].partition(" (")[0].split(" + ")]
    assert sum(last) == 8
    assert last[-1] == 1


def report(hashes: dict[str, str]) -> uneven.Report:
    by_way = {name: [1.0, 1.0] for name in uneven.WAYS}
    return uneven.Report([[2, 2]] * 2, by_way, by_way, [1.0, 1.0], hashes)


@pytest.mark.parametrize("way", [uneven.EVEN, uneven.MEASURED])
def test_other_parameters_of_one_rank_are_an_error(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(ranks=2, slow=3.0, measure_every=1)
    alone = uneven.Alone([2.0, 1.0], "bits", torch.zeros(1))
    same = dict.fromkeys((uneven.EVEN, uneven.MEASURED), "bits")
    uneven.print_results(args, alone, [report(same), report(same)], torch.zeros(1))
    assert "DIFFERENT" not in capsys.readouterr().out
    reports = [report(same), report(same | {way: "others"})]
    with pytest.raises(SystemExit, match="differ from those of one rank"):
        uneven.print_results(args, alone, reports, torch.zeros(1))
    assert capsys.readouterr().out.count("DIFFERENT") == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--ranks 17", "--ranks: expected 2 to 16, the number of micro-batches"),
        ("--micro-batches 12", "--micro-batches: expected a power of two, got 12"),
        ("--slow 0.5", "--slow: expected 1 or more, got 0.5"),
        ("--slow inf", "--slow: expected 1 or more, got inf"),
        ("--steps 5", "--steps: expected more than the 5 of --measure-every"),
    ],
)
def test_bad_options_are_refused(
    options: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["uneven.py", *options.split()])
    with pytest.raises(SystemExit):
        uneven.parse_args()
    assert problem in capsys.readouterr().err
