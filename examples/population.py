"""Population-based training (Jaderberg et al. 2017) beside Optuna's searches, at the same budget.

    torchrun --standalone --nproc-per-node 8 examples/population.py

A member is a subgroup of ranks that trains one small GPT data-parallel. After each round the worst
members receive weights and optimizer state of a good one in a broadcast (exploit) and go on with
perturbed hyper-parameters (explore). A trial of a search is one training from the start; subgroups
train trials at the same time. A validation text steers all methods, and a test text is reported.
The same command goes on with what is in --folder, to the result of a run that was not killed:
random choices have generators that are seeded by what they are for.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.distributed as dist
from optuna.distributions import FloatDistribution, IntDistribution
from rich.console import Console
from rich.table import Table
from train_gpt import GPT, GPTConfig, held_out_bits, positive, read_corpus, sample_batch

import rota

CONFIG = GPTConfig(context=32, num_layers=2, num_heads=2, width=32)  # 41 thousand parameters
SPACE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "batch": IntDistribution(4, 64, log=True),  # sequences of a step, over all ranks of the member
    "weight_decay": FloatDistribution(1e-3, 1.0, log=True),
}
SAMPLERS: dict[str, Any] = {
    "tpe": optuna.samplers.TPESampler,
    "gp": optuna.samplers.GPSampler,
    "random": lambda seed, n_startup_trials: optuna.samplers.RandomSampler(seed),
}
TRIALS_AT_ONCE = 2  # with fewer a search learns more between trials
QUANTILE = 0.25  # of the members exploit, and as many are copied
MAX_FACTOR = 2.0  # by which explore multiplies or divides
WARMUP, DECAY, MIN_LR = 0.05, 0.6, 0.05  # shares of the training, and of the learning rate
NUM_WINDOWS = {"validation": 128, "test": 512}

Hyper = dict[str, float]  # by the names in SPACE
Score = dict[str, Any]  # the progress of a member and its losses, in bits per byte
# The command line, and of one method and seed: seed; texts for training, validation and test, 1-D
# uint8; group of this rank's member, and its number; folder.
Job = argparse.Namespace


def gather(value: Any, job: Job, group: Any = None) -> list[Any]:
    """The values of all members, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values[:: job.ranks_per_member]


def scale(hyper: Hyper, num_ranks: int, factors: Sequence[float] = (1, 1, 1)) -> Hyper:
    """`hyper` times the factors, within SPACE, with a batch that the member's ranks can share."""
    scaled = {
        name: min(max(hyper[name] * factor, space.low), space.high)
        for (name, space), factor in zip(SPACE.items(), factors, strict=True)
    }
    return scaled | {"batch": max(1, round(scaled["batch"] / num_ranks)) * num_ranks}


def save(path: Path, value: object) -> None:
    """The file is at any time either the old one or the new one."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


class Member:
    """This rank's part of one training of `length` sequences, on random batches of their own
    `stream`; all trainings of one seed start from the same weights."""

    def __init__(self, job: Job, stream: int, length: int, hyper: Hyper) -> None:
        torch.manual_seed(job.seed)
        self._job, self._length, self._num_ranks = job, length, job.ranks_per_member
        self.model = GPT(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        self.progress: Score = {"hyper": scale(hyper, self._num_ranks), "sequences": 0}
        self._stream = stream * self._num_ranks + dist.get_rank(job.group)
        self._state = rota.HookState(job.group, torch.float32)

    def train(self, num_sequences: int) -> None:
        """Goes on for exactly num_sequences, so the last step may have a smaller batch."""
        hyper, end = self.progress["hyper"], self.progress["sequences"] + num_sequences
        while (sequences := self.progress["sequences"]) < end:
            done = sequences / self._length
            factor = max(MIN_LR, min(1.0, done / WARMUP, (1 - done) / DECAY))
            values = {"lr": hyper["lr"] * factor, "weight_decay": hyper["weight_decay"]}
            self.optimizer.param_groups[0].update(values)
            batch = min(int(hyper["batch"]), end - sequences)
            size, key = batch // self._num_ranks, (self._job.seed, self._stream, sequences)
            self.optimizer.zero_grad()
            self.model(*sample_batch(self._job.texts[0], size, CONFIG.context, key)).backward()
            if self._num_ranks > 1:
                rota.reduce_gradients(self.model.parameters(), self._state)
            self.optimizer.step()
            self.progress["sequences"] += batch

    def score(self) -> Score:
        """A collective call of the member's ranks; losses are inf if training has diverged."""
        score = dict(self.progress)
        for text, (name, num) in zip(self._job.texts[1:], NUM_WINDOWS.items(), strict=True):
            bits = held_out_bits(self.model, text, CONFIG.context, num, self._job.group)
            score[name] = bits if math.isfinite(bits) else math.inf
        return score

    def state(self) -> list[dict[str, Any]]:
        return [self.model.state_dict(), self.optimizer.state_dict(), self.progress]

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def choose_sources(scores: Sequence[Score], rng: random.Random) -> list[int]:
    """Whom each member copies: each of the worst one of the best, the others themselves."""
    ranked = sorted(range(len(scores)), key=lambda member: float(scores[member]["validation"]))
    num_chosen = max(1, int(len(scores) * QUANTILE))
    sources = list(range(len(scores)))
    for loser in ranked[-num_chosen:]:
        sources[loser] = rng.choice(ranked[:num_chosen])
    return sources


def exploit(member: Member, sources: Sequence[int], num_ranks: int) -> None:
    """Each member takes over the weights and the optimizer state of its source; collective."""
    for source in sorted(set(sources)):
        members = sorted({source, *(m for m, its in enumerate(sources) if its == source)})
        ranks = [one * num_ranks + i for one in members for i in range(num_ranks)]
        if members != [source]:
            group = dist.new_group(ranks)  # lives for one broadcast
            if dist.get_rank() in ranks:
                state = member.state()[:2]
                dist.broadcast_object_list(state, source * num_ranks, group)
                member.load(*state)
                dist.destroy_process_group(group)


def train_population(job: Job) -> list[Score]:
    """Trains the population, or goes on with the one in the folder."""
    rng = random.Random(f"draw {job.seed} {job.member}")
    drawn = {n: math.exp(rng.uniform(math.log(s.low), math.log(s.high))) for n, s in SPACE.items()}
    member = Member(job, job.member, job.rounds * job.round_sequences, drawn)
    saved, num_done = job.folder / "population.pt", 0
    if saved.exists():
        num_done, states = torch.load(saved)
        *state, member.progress = states[job.member]
        member.load(*state)
    for round_ in range(num_done + 1, job.rounds + 1):
        member.train(job.round_sequences)
        scores = gather(member.score(), job)
        if round_ < job.rounds:
            sources = choose_sources(scores, random.Random(f"sources {job.seed} {round_}"))
            exploit(member, sources, job.ranks_per_member)
            if (source := sources[job.member]) != job.member:
                rng = random.Random(f"explore {job.seed} {round_} {job.member}")
                factors = [MAX_FACTOR ** rng.uniform(-1, 1) for _ in SPACE]
                hyper = scores[source]["hyper"]
                member.progress["hyper"] = scale(hyper, job.ranks_per_member, factors)
        states = gather(member.state(), job)
        if dist.get_rank() == 0:
            save(saved, (round_, states))
    return gather(member.score(), job)


def ask(job: Job, method: str, scores: Sequence[Score], num: int) -> list[Hyper]:
    """The next trials, by the scores and seeds alone; the first half of all trials is random."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, trial = optuna.create_study(), optuna.trial.create_trial
    for score in scores:
        value = score["validation"]
        study.add_trial(trial(params=score["asked"], distributions=SPACE, value=value))
    for position in range(len(scores), len(scores) + num):
        seed = random.Random(f"sampler {job.seed} {position}").getrandbits(32)
        num_random = max(TRIALS_AT_ONCE, job.trials // 2)
        study.sampler = SAMPLERS[method](seed=seed, n_startup_trials=num_random)
        study.ask(SPACE)
    return [trial.params for trial in study.trials[len(scores) :]]


def search(job: Job, method: str) -> list[Score]:
    """Trains all trials, or those of which the folder has no score."""
    num_members = dist.get_world_size() // job.ranks_per_member
    length = num_members * job.rounds * job.round_sequences // job.trials
    # Gloo's, since rota would report each wait of a rank that is idle for a trial.
    waiting = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
    saved = job.folder / "scores.pt"
    scores: list[Score] = torch.load(saved) if saved.exists() else []
    while len(scores) < job.trials:
        num = min(TRIALS_AT_ONCE, num_members, job.trials - len(scores))
        asked: list[Any] = [ask(job, method, scores, num) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(asked, 0, waiting)
        score = None
        if job.member < num:
            hyper = asked[0][job.member]
            member = Member(job, len(scores) + job.member, length, hyper)
            member.train(length)
            score = member.score() | {"asked": hyper}
        scores += gather(score, job, waiting)[:num]
        if dist.get_rank() == 0:
            save(saved, scores)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = {"ranks-per-member": 1, "rounds": 20, "round-sequences": 384, "trials": 8}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=positive(int), default=default)
    parser.add_argument("--methods", nargs="+", default=["pbt", *SAMPLERS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("build/population"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("rota", timeout=timedelta(minutes=30))
    train, held_out = read_corpus()
    table = Table("method", *map(str, args.seeds), "mean", title="bits per byte, by seed")
    for method, outcomes in run(args, (train, *held_out.chunk(2))).items():
        bits = [min(scores, key=lambda s: float(s["validation"]))["test"] for scores in outcomes]
        table.add_row(method, *(f"{value:.3f}" for value in (*bits, sum(bits) / len(bits))))
    Console(quiet=dist.get_rank() != 0).print(table)
    dist.destroy_process_group()


def run(args: argparse.Namespace, texts: Sequence[Any]) -> dict[str, list[list[Score]]]:
    """By method and seed the scores of all models."""
    group, _ = dist.new_subgroups(args.ranks_per_member)
    outcomes: dict[str, list[list[Score]]] = {method: [] for method in args.methods}
    for seed, method in itertools.product(args.seeds, args.methods):
        job = Job(**{**vars(args), "seed": seed, "texts": texts, "group": group})
        job.member = dist.get_rank() // args.ranks_per_member
        job.folder = args.folder / f"{method}-seed{seed}"
        job.folder.mkdir(parents=True, exist_ok=True)
        outcomes[method].append(train_population(job) if method == "pbt" else search(job, method))
    return outcomes


if __name__ == "__main__":
    main()
