"""Population-based training (Jaderberg et al. 2017) of the demo's GPT, with subgroups as members.

A member is a subgroup of ranks that trains one model data-parallel. After each round all ranks
compare the members. The worst ones then exploit: they receive the weights and the optimizer state
of a good member in a broadcast. And they explore: they go on with perturbed hyper-parameters.

Every random choice is drawn from a generator that is seeded by what it is for, so a run that goes
on from saved states takes the same choices as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from train_gpt import GPT, GPTConfig, held_out_bits, sample_batch

import rota

Value = TypeVar("Value")

CONFIG = GPTConfig(context=32, num_layers=2, num_heads=2, width=32)  # 41 thousand parameters
QUANTILE = 0.25  # of the members: so many exploit, and so many are copied
MAX_FACTOR = 2.0  # by which explore multiplies or divides
WARMUP, DECAY, MIN_LR = 0.05, 0.6, 0.05  # shares of the training, and of the learning rate
VALIDATION_WINDOWS, TEST_WINDOWS = 128, 512


@dataclass(frozen=True)
class HyperParameters:
    lr: float
    batch: int  # sequences of a step, over all ranks of the member
    weight_decay: float


# Lowest and highest values, for all methods. All are searched on a logarithmic scale.
RANGES = {"lr": (1e-4, 1e-1), "batch": (4, 64), "weight_decay": (1e-3, 1.0)}


@dataclass(frozen=True)
class Score:
    """What a model has come to. Losses are in bits per byte; inf if training has diverged."""

    hyper: HyperParameters
    validation_bits: float  # steers the method
    test_bits: float  # is reported, and steers nothing
    num_sequences: int  # trained on
    num_steps: int
    weights_hash: str  # of the optimizer state, too


def as_score(record: dict[str, Any]) -> Score:
    """The score that asdict() has made a record of."""
    return Score(**record | {"hyper": HyperParameters(**record["hyper"])})


@dataclass(frozen=True)
class Outcome:
    """What a method has found with its budget."""

    method: str
    seed: int
    best: Score  # by validation loss
    curve: list[tuple[int, float]]  # sequences spent, and the test loss of the best model by then
    num_sequences: int  # spent by all models together
    num_steps: int


@dataclass(frozen=True)
class Task:
    """What a method has to do: the texts (1-D uint8), the budget and the seed."""

    train: Tensor
    validation: Tensor
    test: Tensor
    seed: int
    rounds: int
    round_sequences: int  # of each member
    trials: int
    trials_at_once: int
    decays: bool  # whether the learning rate falls towards the end of a member or trial


class Team:
    """The members that the ranks of the default group form, and which of them this rank is in."""

    def __init__(self, ranks_per_member: int) -> None:
        self.ranks_per_member = ranks_per_member
        self.num_members = dist.get_world_size() // ranks_per_member
        self.member, self.rank_in_member = divmod(dist.get_rank(), ranks_per_member)
        self.group, _ = dist.new_subgroups(ranks_per_member)

    @property
    def is_lead(self) -> bool:
        return self.rank_in_member == 0

    def first_rank(self, member: int) -> int:
        return member * self.ranks_per_member

    def ranks(self, members: Sequence[int]) -> list[int]:
        """All ranks of these members."""
        firsts = [self.first_rank(member) for member in members]
        return [first + i for first in firsts for i in range(self.ranks_per_member)]

    def gather(self, value: Value) -> list[Value]:
        """The values of all members, on every rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values[:: self.ranks_per_member]


def rng_of(*purpose: object) -> random.Random:
    return random.Random(str(purpose))


def fit(hyper: HyperParameters, ranks_per_member: int) -> HyperParameters:
    """`hyper` clipped to RANGES, with a batch that the member's ranks can share."""
    clipped = {
        name: min(max(getattr(hyper, name), low), high) for name, (low, high) in RANGES.items()
    }
    share = max(1, round(clipped["batch"] / ranks_per_member))
    return HyperParameters(
        clipped["lr"], int(share * ranks_per_member), weight_decay=clipped["weight_decay"]
    )


def draw(rng: random.Random, ranks_per_member: int) -> HyperParameters:
    """Hyper-parameters drawn log-uniformly from RANGES."""
    lr, batch, weight_decay = (
        math.exp(rng.uniform(math.log(low), math.log(high))) for low, high in RANGES.values()
    )
    return fit(HyperParameters(lr, round(batch), weight_decay), ranks_per_member)


def explore(hyper: HyperParameters, rng: random.Random, ranks_per_member: int) -> HyperParameters:
    """Multiplies each hyper-parameter by its own log-uniform factor."""
    lr, batch, weight_decay = (MAX_FACTOR ** rng.uniform(-1, 1) for _ in RANGES)
    perturbed = HyperParameters(
        hyper.lr * lr, round(hyper.batch * batch), hyper.weight_decay * weight_decay
    )
    return fit(perturbed, ranks_per_member)


class Worker:
    """This rank's replica of the model that its subgroup trains, data-parallel.

    Args:
        stream: which random batches to train on; all models of one run have their own.
        num_sequences: the length of the whole training, which the schedule depends on.
    """

    def __init__(
        self, team: Team, task: Task, hyper: HyperParameters, stream: int, num_sequences: int
    ) -> None:
        torch.manual_seed(task.seed)  # all models of one seed start from the same weights
        self.model = GPT(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        self.hyper = hyper
        self.num_sequences = self.num_steps = 0
        self._team, self._task = team, task
        self._stream = stream * team.ranks_per_member + team.rank_in_member
        self._full_sequences = num_sequences
        self._state = rota.HookState(team.group, torch.float32)

    def train(self, num_sequences: int) -> None:
        """Goes on for exactly num_sequences, so the last step may have a smaller batch."""
        end = self.num_sequences + num_sequences
        while self.num_sequences < end:
            batch = min(self.hyper.batch, end - self.num_sequences)
            self._step(batch // self._team.ranks_per_member)
            self.num_sequences += batch
            self.num_steps += 1

    def _step(self, num_sequences: int) -> None:
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.hyper.lr * self._schedule()
            param_group["weight_decay"] = self.hyper.weight_decay
        key = (self._task.seed, self._stream, self.num_sequences)
        self.optimizer.zero_grad()
        self.model(*sample_batch(self._task.train, num_sequences, CONFIG.context, key)).backward()
        if self._team.ranks_per_member > 1:
            rota.reduce_gradients(self.model.parameters(), self._state)
        self.optimizer.step()

    def _schedule(self) -> float:
        """The factor of the learning rate: linear warm-up, constant, then a decay if wanted."""
        done = self.num_sequences / self._full_sequences
        decay = (1 - done) / DECAY if self._task.decays else 1.0
        return max(MIN_LR, min(1.0, done / WARMUP, decay))

    def score(self) -> Score:
        """Evaluates the model; a collective call of the member's ranks."""
        bits = [
            held_out_bits(self.model, text, CONFIG.context, num_windows, self._team.group)
            for text, num_windows in (
                (self._task.validation, VALIDATION_WINDOWS),
                (self._task.test, TEST_WINDOWS),
            )
        ]
        validation, test = (value if math.isfinite(value) else math.inf for value in bits)
        digest = hashlib.sha256(self.flatten().numpy().tobytes()).hexdigest()[:12]
        return Score(self.hyper, validation, test, self.num_sequences, self.num_steps, digest)

    def flatten(self) -> Tensor:
        """A copy of the weights and the optimizer state as one 1-D tensor; all are float32."""
        return torch.cat([tensor.detach().flatten() for tensor in self._tensors()])

    def unflatten(self, flat: Tensor) -> None:
        """Takes over what another worker's `flatten` returned."""
        tensors = self._tensors()
        with torch.no_grad():
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[parameter] for parameter in parameters]
        return parameters + [state[name] for state in states for name in sorted(state)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hyper": asdict(self.hyper),
            "num_sequences": self.num_sequences,
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.hyper = HyperParameters(**state["hyper"])
        self.num_sequences, self.num_steps = state["num_sequences"], state["num_steps"]


def choose_sources(scores: Sequence[Score], rng: random.Random) -> list[int]:
    """Whom each member copies, by truncation selection: most go on with themselves.

    Each member of the worst QUANTILE copies one of the best QUANTILE.
    """
    ranked = sorted(range(len(scores)), key=lambda member: scores[member].validation_bits)
    num_chosen = max(1, int(len(scores) * QUANTILE))
    sources = list(range(len(scores)))
    for member in ranked[-num_chosen:]:
        sources[member] = rng.choice(ranked[:num_chosen])
    return sources


def exploit(team: Team, worker: Worker, sources: Sequence[int]) -> None:
    """Each member takes over the weights and the optimizer state of its source; collective.

    A source and those that copy it form a group, which lives for one broadcast. Groups are
    disjoint, so their broadcasts may run at the same time.
    """
    for source in sorted(set(sources)):
        members = [member for member, its in enumerate(sources) if its == source]
        if members == [source]:
            continue
        group = dist.new_group(team.ranks(sorted({source, *members})))
        if team.member in {source, *members}:
            flat = worker.flatten()
            dist.broadcast(flat, team.first_rank(source), group)
            worker.unflatten(flat)
            dist.destroy_process_group(group)


class Checkpoint:
    """The last complete round of all members in a folder, whenever the ranks are killed.

    Rounds take turns between two files of each member. The file "round" names the last round that
    all members have saved, so it never names one whose files are incomplete. A member overwrites
    the round before only after it has heard from rank 0 again, which has written "round" by then.
    """

    def __init__(self, folder: Path, team: Team) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._team = folder, team
        self._round = folder / "round"

    def save(self, num_rounds: int, state: dict[str, Any]) -> None:
        if self._team.is_lead:
            replace(self._state(num_rounds), lambda path: torch.save(state, path))
        dist.barrier()
        if dist.get_rank() == 0:
            replace(self._round, lambda path: path.write_text(json.dumps(num_rounds)))

    def load(self) -> dict[str, Any] | None:
        """The saved state of this rank's member, if there is one."""
        if not self._round.exists():
            return None
        state: dict[str, Any] = torch.load(self._state(json.loads(self._round.read_text())))
        return state

    def _state(self, num_rounds: int) -> Path:
        return (
            self._folder
            / f"member{self._team.member}-{'even' if num_rounds % 2 == 0 else 'odd'}.pt"
        )


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that is at any time either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def train_population(team: Team, task: Task, folder: Path) -> Outcome:
    """Trains the population, or goes on with the one that was saved in the folder."""
    hyper = draw(rng_of(task.seed, "draw", team.member), team.ranks_per_member)
    worker = Worker(team, task, hyper, team.member, task.rounds * task.round_sequences)
    checkpoint = Checkpoint(folder, team)
    curve: list[tuple[int, float]] = []
    scores: list[Score] = []
    if (state := checkpoint.load()) is not None:
        worker.load_state_dict(state["worker"])
        curve = state["curve"]
    for round_ in range(len(curve), task.rounds):
        worker.train(task.round_sequences)
        scores = team.gather(worker.score())
        curve.append((spent(scores), best(scores).test_bits))
        if round_ + 1 < task.rounds:
            sources = choose_sources(scores, rng_of(task.seed, "sources", round_))
            exploit(team, worker, sources)
            if (source := sources[team.member]) != team.member:
                rng = rng_of(task.seed, "explore", round_, team.member)
                worker.hyper = explore(scores[source].hyper, rng, team.ranks_per_member)
        checkpoint.save(round_ + 1, {"worker": worker.state_dict(), "curve": curve})
    scores = scores or team.gather(worker.score())  # killed after its last round
    num_steps = sum(score.num_steps for score in scores)
    return Outcome("pbt", task.seed, best(scores), curve, spent(scores), num_steps)


def best(scores: Sequence[Score]) -> Score:
    return min(scores, key=lambda score: score.validation_bits)


def spent(scores: Sequence[Score]) -> int:
    """The sequences that these models were trained on."""
    return sum(score.num_sequences for score in scores)
