"""Searches for hyper-parameters with Optuna: TPE, Gaussian process, and random choice.

Each trial trains one model from the start with fixed hyper-parameters. The subgroups of ranks train
trials at the same time. The study is on rank 0, which asks for trials and tells their losses.

The study goes on after a kill as if there had been none: what a sampler chooses depends on the
trials in the study and a seed alone, since every trial gets a new sampler, and trials that were
being trained are trained again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import optuna
import torch.distributed as dist
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from population_training import (
    RANGES,
    HyperParameters,
    Outcome,
    Score,
    Task,
    Team,
    Worker,
    as_score,
    best,
    fit,
    rng_of,
    spent,
)

METHODS = ("tpe", "gp", "random")


def make_sampler(method: str, seed: int, num_startup: int) -> BaseSampler:
    """The sampler of one trial. The first num_startup trials of all methods are the same."""
    if method == "tpe":
        return TPESampler(seed=seed, n_startup_trials=num_startup)
    if method == "gp":
        return GPSampler(seed=seed, n_startup_trials=num_startup)
    return RandomSampler(seed=seed)


class Desk:
    """Rank 0's study, kept in SQLite: a kill leaves each transaction either whole or undone.

    (Optuna's journal in a file would keep its lock, and maybe half a line.)
    """

    def __init__(self, method: str, task: Task, folder: Path) -> None:
        self._method, self._task = method, task
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name=method,
            load_if_exists=True,
            direction="minimize",
        )
        for trial in self._open_trials():
            if trial.params.keys() != RANGES.keys():  # killed while it was asked for
                self._study.tell(trial.number, state=TrialState.FAIL)

    def ask(self) -> dict[int, HyperParameters]:
        """The trials to train next, by their position in the study; empty at the end.

        After a kill some trials of the last batch may be open or even complete. The batch still
        ends where it did, so the samplers know as many trials as they would have known.
        """
        num_complete = len(self.scores())
        at_once = self._task.trials_at_once
        end = min(self._task.trials, (num_complete // at_once + 1) * at_once)
        for position in range(num_complete + len(self._open_trials()), end):
            seed = rng_of(self._task.seed, "sampler", position).getrandbits(32)
            num_startup = max(at_once, self._task.trials // 2)
            self._study.sampler = make_sampler(self._method, seed, num_startup)
            trial = self._study.ask()
            trial.suggest_float("lr", *RANGES["lr"], log=True)
            trial.suggest_int("batch", *RANGES["batch"], log=True)
            trial.suggest_float("weight_decay", *RANGES["weight_decay"], log=True)
        return {
            num_complete + i: HyperParameters(**trial.params)
            for i, trial in enumerate(self._open_trials())
        }

    def tell(self, scores: Sequence[Score]) -> None:
        """Takes the scores of the open trials, in their order."""
        for trial, score in zip(self._open_trials(), scores, strict=True):
            self._study.set_user_attr(f"score of trial {trial.number}", asdict(score))
            self._study.tell(trial.number, score.validation_bits)

    def scores(self) -> list[Score]:
        """The scores of all complete trials."""
        trials = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        attributes = self._study.user_attrs
        return [as_score(attributes[f"score of trial {trial.number}"]) for trial in trials]

    def _open_trials(self) -> list[FrozenTrial]:
        trials: list[FrozenTrial] = self._study.get_trials(
            deepcopy=False, states=[TrialState.RUNNING]
        )
        return trials


def search(method: str, team: Team, store: dist.Store, task: Task, folder: Path) -> Outcome | None:
    """Trains all trials of the study, or those that the folder does not have.

    Ranks wait for trials at the store, since a rank that is idle for a trial is no news: in a
    collective rota would report each wait of more than a second.

    Returns:
        On rank 0 the outcome.
    """
    desk = Desk(method, task, folder) if dist.get_rank() == 0 else None
    num_sequences = task.rounds * task.round_sequences * team.num_members // task.trials
    batch_number = 0
    while True:
        if desk is not None:
            asked = {position: asdict(hyper) for position, hyper in desk.ask().items()}
            store.set(f"batch {batch_number}", json.dumps(asked))
        batch = json.loads(store.get(f"batch {batch_number}"))
        if not batch:
            return outcome_of(method, task.seed, desk.scores()) if desk is not None else None
        if team.member < len(batch):
            position = list(batch)[team.member]
            hyper = fit(HyperParameters(**batch[position]), team.ranks_per_member)
            worker = Worker(team, task, hyper, int(position), num_sequences)
            worker.train(num_sequences)
            score = worker.score()
            if team.is_lead:
                store.set(f"score {position}", json.dumps(asdict(score)))
        if desk is not None:
            desk.tell([as_score(json.loads(store.get(f"score {position}"))) for position in batch])
        batch_number += 1


def outcome_of(method: str, seed: int, scores: Sequence[Score]) -> Outcome:
    curve = [
        (spent(scores[:num_trials]), best(scores[:num_trials]).test_bits)
        for num_trials in range(1, len(scores) + 1)
    ]
    num_steps = sum(score.num_steps for score in scores)
    return Outcome(method, seed, best(scores), curve, spent(scores), num_steps)
