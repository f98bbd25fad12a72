"""examples/population.py: equal budgets, exact copies, and the same result after a kill."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from ranks import Rank, Ranks, run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))

import population  # noqa: E402
import population_search  # noqa: E402
import population_training as training  # noqa: E402
from population_training import HyperParameters, Score, Task  # noqa: E402

pytestmark = pytest.mark.same_in_every_build

LIMIT_S = 240
TEXT = torch.arange(20000).square().remainder(251).to(torch.uint8)
RUNS = [("pbt", 0), ("tpe", 0)]
BUDGET = 2 * 8 * 16  # sequences, by the usual options


def options(**changes: object) -> argparse.Namespace:
    """Two members, 8 rounds of 16 sequences, or 8 trials of 32."""
    usual: dict[str, object] = {"ranks": 2, "ranks_per_member": 1, "schedule": "decay"}
    usual |= {"rounds": 8, "round_sequences": 16, "trials": 8, "trials_at_once": 2}
    return argparse.Namespace(**(usual | changes))


def make_task(**changes: Any) -> Task:
    options: dict[str, Any] = {"rounds": 3, "round_sequences": 16, "trials": 9, "trials_at_once": 3}
    texts = {"train": TEXT, "validation": TEXT, "test": TEXT}
    return Task(**(texts | options | {"seed": 0, "decays": True} | changes))


def make_score(hyper: HyperParameters, loss: float) -> Score:
    return Score(hyper, loss, loss, num_sequences=32, num_steps=4, weights_hash="")


def run(rank: Rank, folder: str, scratch: str) -> None:
    training.VALIDATION_WINDOWS = training.TEST_WINDOWS = 8
    population.run(rank.rank, RUNS, Path(scratch), options(folder=Path(folder)))


def start(folder: Path) -> Ranks:
    """Goes on with the runs in the folder."""
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    torch.save((TEXT, TEXT, TEXT), scratch / "text.pt")
    return Ranks(2, run, str(folder), str(scratch), timeout_s=LIMIT_S)


def finish(folder: Path) -> dict[str, Any]:
    """Goes on to the end, and returns the outcomes by method."""
    with start(folder) as ranks:
        ranks.results()
    files = {method: population.outcome_file(folder, method, seed) for method, seed in RUNS}
    return {method: json.loads(path.read_text()) for method, path in files.items()}


def kill_when(ranks: Ranks, condition: Callable[[], bool]) -> None:
    """Kills all ranks as soon as a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    with ranks:
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        for rank in range(2):
            ranks.kill(rank)


def num_rounds(folder: Path) -> int:
    path = folder / "pbt-seed0" / "round"
    return int(path.read_text()) if path.exists() else 0


def num_trials(folder: Path) -> int:
    """The complete trials of the study."""
    path = folder / "tpe-seed0" / "study.db"
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            query = "SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'"
            return int(database.execute(query).fetchone()[0])
    except sqlite3.OperationalError:  # not yet made, or locked
        return 0


def test_killed_runs_end_as_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "uninterrupted").mkdir()
    uninterrupted = finish(tmp_path / "uninterrupted")
    folder = tmp_path / "killed"
    folder.mkdir()
    kill_when(start(folder), lambda: num_rounds(folder) >= 3)
    assert num_rounds(folder) < 8
    kill_when(start(folder), lambda: num_trials(folder) >= 3)
    assert num_trials(folder) < 8
    assert finish(folder) == uninterrupted

    # Each worker counts what it is trained on.
    spent = {method: outcome["num_sequences"] for method, outcome in uninterrupted.items()}
    assert spent == dict.fromkeys(("pbt", "tpe"), BUDGET)


def hash_of(worker: training.Worker) -> str:
    moments = worker.optimizer.state_dict()["state"].values()
    tensors = [*worker.model.parameters(), *(t for state in moments for t in state.values())]
    return str([hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in tensors])


def exploit_twice(rank: Rank) -> list[str]:
    """The hashes of this rank's weights and optimizer state: before, and after each exploit."""
    rank.init()
    team = training.Team(ranks_per_member=2)
    hyper = HyperParameters(lr=1e-3, batch=4, weight_decay=0.1)
    worker = training.Worker(team, make_task(), hyper, stream=team.member, num_sequences=8)
    worker.train(8)
    hashes = [hash_of(worker)]
    for sources in ([0, 0, 2], [2, 2, 2]):
        training.exploit(team, worker, sources)
        hashes.append(hash_of(worker))
    return hashes


def test_exploit_copies_weights_and_optimizer_state_exactly() -> None:
    hashes = run_ranks(6, exploit_twice)
    assert hashes[0::2] == hashes[1::2]  # the ranks of a member
    before, once, twice = zip(*hashes[::2], strict=True)
    assert len(set(before)) == 3
    assert once == (before[0], before[0], before[2])
    assert twice == (before[2],) * 3


def test_the_worst_quarter_copies_the_best() -> None:
    hyper = HyperParameters(lr=1e-3, batch=4, weight_decay=0.1)
    losses = [3.0, 1.0, torch.inf, 2.0, 6.0, 4.0, 5.0, 0.5]
    scores = [make_score(hyper, loss) for loss in losses]
    chosen = {tuple(training.choose_sources(scores, training.rng_of(i))) for i in range(50)}
    assert chosen == {
        tuple(a if i == 2 else b if i == 4 else i for i in range(8)) for a in (1, 7) for b in (1, 7)
    }


@pytest.mark.parametrize("ranks_per_member", [1, 3])
def test_explored_values_stay_in_their_ranges(ranks_per_member: int) -> None:
    hyper = training.draw(training.rng_of("first"), ranks_per_member)
    for i in range(200):
        explored = training.explore(hyper, training.rng_of(i), ranks_per_member)
        assert explored.batch % ranks_per_member == 0
        for name, (low, high) in training.RANGES.items():
            slack = ranks_per_member - 1 if name == "batch" else 0
            assert low - slack <= getattr(explored, name) <= high + slack
        assert explored != hyper
        hyper = explored


def loss_of(hyper: HyperParameters) -> float:
    return abs(hyper.lr - 0.01) + hyper.weight_decay / hyper.batch


def tell(desk: population_search.Desk, batch: dict[int, HyperParameters]) -> None:
    desk.tell([make_score(hyper, loss_of(hyper)) for hyper in batch.values()])


def one_score(batch: dict[int, HyperParameters]) -> Iterator[Score]:
    first = next(iter(batch.values()))
    yield make_score(first, loss_of(first))
    raise InterruptedError


def second_interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but its second call raises."""
    num_calls = itertools.count(1)

    def call(*args: Any, **options: Any) -> Any:
        if next(num_calls) == 2:
            raise InterruptedError
        return function(*args, **options)

    return call


@pytest.mark.parametrize("method", population_search.METHODS)
def test_study_interrupted_anywhere_asks_for_the_same_trials(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task()
    desk = population_search.Desk(method, task, tmp_path / "uninterrupted")
    asked = []
    while batch := desk.ask():
        asked.append(batch)
        tell(desk, batch)
    assert [list(batch) for batch in asked] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    folder = tmp_path / "interrupted"

    def reopened() -> population_search.Desk:
        return population_search.Desk(method, task, folder)

    for batch in asked:
        # While the second trial is asked for.
        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(optuna.Trial, "suggest_int", second_interrupted(optuna.Trial.suggest_int))
            reopened().ask()
        assert reopened().ask() == batch
        # When the first of the scores has been told.
        with pytest.raises(InterruptedError):
            reopened().tell(one_score(batch))
        rest = reopened().ask()
        assert rest == dict(list(batch.items())[1:])
        tell(reopened(), rest)
    assert reopened().ask() == {}
    assert reopened().scores() == desk.scores()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"ranks_per_member": 5}, "--ranks-per-member is 5, expected at most 4"),
        ({"ranks": 5, "ranks_per_member": 2}, "--ranks is 5, expected a multiple"),
        ({"ranks": 2, "ranks_per_member": 2}, "--ranks is 2, expected"),
        (
            {"ranks": 4, "ranks_per_member": 2, "round_sequences": 15},
            "--round-sequences is 15, expected a multiple",
        ),
        ({"trials": 7}, "--trials is 7, expected a divisor of the budget of 256 sequences"),
    ],
    ids=["none", "ranks-per-member", "ranks", "one-member", "round-sequences", "trials"],
)
def test_unusable_options_are_refused(changes: dict[str, object], problem: str | None) -> None:
    found = population.problem_of(options(**changes))
    assert found is None if problem is None else problem in str(found)


def test_folder_is_kept_from_other_runs(tmp_path: Path) -> None:
    population.open_folder(options(folder=tmp_path, resume=False))
    population.open_folder(options(folder=tmp_path, resume=True))
    with pytest.raises(SystemExit, match="holds a run; go on with it by --resume"):
        population.open_folder(options(folder=tmp_path, resume=False))
    with pytest.raises(SystemExit, match=r"holds a run with other options: .*--rounds 8"):
        population.open_folder(options(folder=tmp_path, resume=True, rounds=4))
