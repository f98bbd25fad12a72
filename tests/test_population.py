"""examples/population.py: equal budgets, exact copies, and the same result after a kill."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import population
import pytest
import torch

from ranks import Rank, Ranks, run_ranks

pytestmark = pytest.mark.same_in_every_build

LIMIT_S = 240
TEXT = torch.arange(20000).square().remainder(251).to(torch.uint8)
METHODS = ["pbt", "tpe"]
HYPER = {"lr": 1e-3, "batch": 4, "weight_decay": 0.1}


def options(folder: Path = Path(), **changes: object) -> argparse.Namespace:
    """Two members, 8 rounds of 16 sequences, or 8 trials of 32."""
    usual: dict[str, object] = {"ranks_per_member": 1, "rounds": 8, "round_sequences": 16}
    usual |= {"trials": 8, "methods": METHODS, "seeds": [0], "folder": folder}
    return argparse.Namespace(**(usual | changes))


def run(rank: Rank, folder: str) -> dict[str, Any]:
    rank.init()
    population.NUM_WINDOWS = {"validation": 8, "test": 8}
    return population.run(options(Path(folder)), (TEXT, TEXT, TEXT))


def kill_when(folder: Path, name: str, num_done: int, count: Callable[[Any], int]) -> None:
    """Goes on with the run in the folder, and kills all ranks once so many steps are saved."""
    path = folder / name
    deadline = time.monotonic() + LIMIT_S
    with Ranks(2, run, str(folder), timeout_s=LIMIT_S):
        while not path.exists() or count(torch.load(path)) < num_done:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert count(torch.load(path)) < 8


def test_killed_runs_end_as_one_that_was_not(tmp_path: Path) -> None:
    uninterrupted, _ = run_ranks(2, run, str(tmp_path / "whole"), timeout_s=LIMIT_S)
    folder = tmp_path / "killed"
    kill_when(folder, "pbt-seed0/population.pt", 3, lambda saved: int(saved[0]))
    kill_when(folder, "tpe-seed0/scores.pt", 2, len)
    assert run_ranks(2, run, str(folder), timeout_s=LIMIT_S)[0] == uninterrupted
    # Each member counts what it is trained on.
    for method in METHODS:
        assert sum(score["sequences"] for score in uninterrupted[method][0]) == 2 * 8 * 16


def exploit_twice(rank: Rank) -> list[str]:
    """This rank's weights and optimizer state as text: before, and after each exploit."""
    rank.init()
    group, _ = torch.distributed.new_subgroups(2)
    job = options(ranks_per_member=2, seed=0, texts=(TEXT, TEXT, TEXT), group=group)
    member = population.Member(job, rank.rank // 2, 8, HYPER)
    member.train(8)
    states = [repr(member.state()[:2])]
    for sources in ([0, 0, 2], [2, 2, 2]):
        population.exploit(member, sources, 2)
        states.append(repr(member.state()[:2]))
    return states


def test_exploit_copies_weights_and_optimizer_state_exactly() -> None:
    states = run_ranks(6, exploit_twice)
    assert states[0::2] == states[1::2]  # the ranks of a member
    before, once, twice = zip(*states[::2], strict=True)
    assert len(set(before)) == 3
    assert once == (before[0], before[0], before[2])
    assert twice == (before[2],) * 3


def test_the_worst_quarter_copies_the_best() -> None:
    losses = [3.0, 1.0, torch.inf, 2.0, 6.0, 4.0, 5.0, 0.5]
    scores = [{"validation": loss} for loss in losses]
    chosen = {tuple(population.choose_sources(scores, random.Random(i))) for i in range(50)}
    assert chosen == {
        tuple(a if i == 2 else b if i == 4 else i for i in range(8)) for a in (1, 7) for b in (1, 7)
    }


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_explored_values_stay_in_their_ranges(num_ranks: int, factor: float) -> None:
    scaled = population.scale(HYPER, num_ranks, [factor] * 3)
    assert scaled["batch"] % num_ranks == 0
    for name, space in population.SPACE.items():
        slack = num_ranks - 1 if name == "batch" else 0
        assert space.low - slack <= scaled[name] <= space.high + slack
