"""Trains a GPT on ranks of different speed, each with as many micro-batches as it has time for.

    python examples/uneven.py                     # 2 ranks, the last one 3 times slower; a minute
    python examples/uneven.py --slow 2 --optimizer sgd --steps 20

A step is a fixed number of micro-batches, the leaves of one balanced binary tree. Three ways take
turns, step by step:

- even: every rank computes as many micro-batches, so a step takes the slowest rank's time.
- measured: the ranks time their micro-batches, and agree every few steps on a split by speed.
- Join: torch.distributed.algorithms.join over DistributedDataParallel, with the measured split.

The gradient of a step is the sum over all micro-batches divided by their number, whoever computed
them. The first two ways add in the tree (balance.TreeMean). Their parameters must have the bits of
rota.LogicalShards on one rank, or the run fails. Join adds in another order.

The last rank is slow because it sleeps, for as long as its micro-batch took times (factor - 1): on
two cores, more computing would slow down the other rank as well. Its communication and its
optimizer are not slowed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from balance import Speed, TreeMean, gradients_of, set_gradients, split_by_speed
from rich.console import Console
from rich.table import Table
from run_ranks import run_ranks
from same_bits import hash_of, make_optimizer
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from train_gpt import GPT, SCALES, positive, read_corpus, sample_batch

import rota

CONFIG = dataclasses.replace(SCALES["cpu"].config, num_layers=2, width=128)  # 0.46 M parameters
WAYS = EVEN, MEASURED, JOIN = "even", "measured", "Join"


# ---------------------------------------------------------------------------------------------
# Training


@dataclasses.dataclass
class Worker:
    """What all ways share on one rank: the data, and how slow the rank is."""

    text: Tensor
    args: argparse.Namespace
    slow: float = 1.0
    micro_batch_s: float = 0.0  # computing the last one, without sleep and communication

    def backward(self, model: nn.Module, step: int, micro_batch: int) -> float:
        """Returns the loss."""
        key = (self.args.seed, micro_batch, step)
        loss: Tensor = model(*sample_batch(self.text, self.args.batch, self.args.context, key))
        loss.backward()
        return float(loss.detach())

    def stall(self) -> None:
        time.sleep((self.slow - 1) * self.micro_batch_s)


class TreeTrainer:
    """Steps whose gradients are added in the tree, for any split."""

    def __init__(self, worker: Worker, model: GPT, comm: rota.Communicator) -> None:
        self.model = model
        self.compute_s = 0.0  # all micro-batches of the last step
        self.reduce_s = 0.0  # of the last step
        self._worker = worker
        self._rank = comm.rank
        self._optimizer = make_optimizer(worker.args.optimizer, model)
        self._mean = TreeMean(model, worker.args.micro_batches, comm)

    def step(self, step: int, split: Sequence[int]) -> None:
        step_begin = time.perf_counter()
        for micro_batch in share_of(self._rank, split):
            begin = time.perf_counter()
            self._worker.backward(self.model, step, micro_batch)
            self._mean.add(micro_batch)
            self._worker.micro_batch_s = time.perf_counter() - begin
            self._worker.stall()
        begin = time.perf_counter()
        self.compute_s = begin - step_begin
        self._mean.reduce(split)
        self.reduce_s = time.perf_counter() - begin
        self._optimizer.step()
        self._optimizer.zero_grad()


class JoinTrainer:
    """The same steps by DistributedDataParallel and Join.

    Join is made for one optimizer step per backward pass. To take one step per split, the mean is
    added up here, of what DDP averages in each pass. A rank that has joined does not see the passes
    of the others, so the rank with most passes broadcasts its sum. DDP waits for all ranks in every
    pass. To accumulate under no_sync() instead, all ranks would need equally many passes.
    """

    def __init__(self, worker: Worker, model: GPT, comm: rota.Communicator) -> None:
        self.model = model
        self._worker = worker
        self._comm = comm
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = make_optimizer(worker.args.optimizer, model)

    def step(self, step: int, split: Sequence[int]) -> None:
        parameters = list(self.model.parameters())
        total = torch.zeros(sum(parameter.numel() for parameter in parameters))
        with Join([self._ddp], divide_by_initial_world_size=True):
            for micro_batch in share_of(self._comm.rank, split):
                # First, since its backward pass waits for the others, and is no measure of this.
                self._worker.stall()
                self._worker.backward(self._ddp, step, micro_batch)
                total += torch.cat(gradients_of(parameters))
        self._comm.broadcast(total, root=max(range(len(split)), key=split.__getitem__))
        # DDP has divided by the number of ranks.
        set_gradients(parameters, total.mul_(len(split) / sum(split)))
        self._optimizer.step()
        self._optimizer.zero_grad()


def share_of(rank: int, split: Sequence[int]) -> range:
    """The micro-batches of a rank."""
    begin = sum(split[:rank])
    return range(begin, begin + split[rank])


@dataclasses.dataclass
class Report:
    """What one rank has to say about its run, by step."""

    splits: list[list[int]]  # the measured ones
    step_s: dict[str, list[float]]  # by way
    compute_s: dict[str, list[float]]  # all micro-batches of this rank, by way; not of Join
    reduce_s: list[float]  # with the measured splits
    hashes: dict[str, str]  # by way, at the end


class Alone(NamedTuple):
    """What one rank that computes everything ends with."""

    losses: list[float]  # nats per byte, by step
    hash: str
    parameters: Tensor  # flat


def make_model(args: argparse.Namespace) -> GPT:
    """What every rank starts from."""
    torch.manual_seed(args.seed)
    return GPT(dataclasses.replace(CONFIG, context=args.context))


def train_alone(rank: int, text: Tensor, args: argparse.Namespace) -> Alone:
    """The one rank that computes all micro-batches of all steps."""
    worker, model = Worker(text, args), make_model(args)
    optimizer = make_optimizer(args.optimizer, model)
    shards = rota.LogicalShards(model, args.micro_batches)
    losses = []
    for step in range(args.steps):
        loss = 0.0
        for shard in shards:
            with shards.backward_of(shard):
                loss += worker.backward(model, step, shard) / args.micro_batches
        shards.reduce()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    parameters = parameters_to_vector(model.parameters()).detach()
    return Alone(losses, hash_of(model), parameters)


def train(rank: int, text: Tensor, args: argparse.Namespace) -> tuple[Report, Tensor]:
    """One of the ranks that share the steps; also returns Join's parameters."""
    worker = Worker(text, args, args.slow if rank == args.ranks - 1 else 1.0)
    model = make_model(args)
    comm = rota.Communicator()
    even, measured = (TreeTrainer(worker, copy.deepcopy(model), comm) for _ in range(2))
    join = JoinTrainer(worker, model, comm)
    trainers: dict[str, TreeTrainer | JoinTrainer] = {EVEN: even, MEASURED: measured, JOIN: join}
    report = Report([], {name: [] for name in trainers}, {EVEN: [], MEASURED: []}, [], {})
    speed = Speed()
    equal = split_by_speed([1.0] * args.ranks, args.micro_batches)
    split = equal
    for step in range(args.steps):
        for name, trainer in trainers.items():
            comm.barrier()
            begin = time.perf_counter()
            if name == MEASURED and step > 0 and step % args.measure_every == 0:
                split = speed.agree_on_split(comm, args.micro_batches)
            trainer.step(step, equal if name == EVEN else split)
            report.step_s[name].append(time.perf_counter() - begin)
        speed.add(split[rank], measured.compute_s)
        report.splits.append(split)
        report.compute_s[EVEN].append(even.compute_s)
        report.compute_s[MEASURED].append(measured.compute_s)
        report.reduce_s.append(measured.reduce_s)
    report.hashes = {name: hash_of(trainer.model) for name, trainer in trainers.items()}
    return report, parameters_to_vector(join.model.parameters()).detach()


# ---------------------------------------------------------------------------------------------
# What comes out


class Times(NamedTuple):
    """Milliseconds of the steps that count, by step."""

    ideal: list[float]  # all micro-batches / the sum of the ranks' speeds
    steps: dict[str, list[float]]  # of the slowest rank, by way
    computing: dict[str, list[float]]  # of the slowest rank, by way; not of Join
    reduction: list[float]  # with the measured split, of the rank that waits least


def times_of(reports: Sequence[Report], first_step: int) -> Times:
    """The ideal is that of the speeds in the measured split's own steps."""
    splits = reports[0].splits[first_step:]
    seconds = zip(*(report.compute_s[MEASURED][first_step:] for report in reports), strict=True)
    ideal = [
        1e3 * sum(split) / sum(map(operator.truediv, split, compute_s))
        for split, compute_s in zip(splits, seconds, strict=True)
    ]

    def pick(choose: Callable[..., float], of_ranks: Iterable[list[float]]) -> list[float]:
        return [1e3 * choose(values) for values in zip(*of_ranks, strict=True)][first_step:]

    return Times(
        ideal,
        {name: pick(max, (report.step_s[name] for report in reports)) for name in WAYS},
        {
            name: pick(max, (report.compute_s[name] for report in reports))
            for name in (EVEN, MEASURED)
        },
        pick(min, (report.reduce_s for report in reports)),
    )


def table_of(times: Times, verdicts: dict[str, str]) -> Table:
    ideal = statistics.median(times.ideal)
    table = Table(title=f"a step of {len(times.ideal)}, in ms; the ideal split takes {ideal:.0f}")
    table.add_column("split")
    for heading in ("slowest rank\ncomputes", "min", "p50", "max", "p50 /\nideal"):
        table.add_column(heading, justify="right")
    table.add_column("parameters")
    for name, step_ms in times.steps.items():
        computing = times.computing.get(name)
        median = statistics.median(step_ms)
        table.add_row(
            name,
            f"{statistics.median(computing):.0f}" if computing else "-",
            *(f"{value:.0f}" for value in (min(step_ms), median, max(step_ms))),
            f"{median / ideal:.2f}",
            verdicts[name],
        )
    return table


def say_splits(splits: list[list[int]]) -> str:
    """Such as "8 + 8 (5 steps), 12 + 4 (35 steps)"."""
    runs = [(split, len(list(steps))) for split, steps in itertools.groupby(splits)]
    return ", ".join(f"{' + '.join(map(str, split))} ({num} steps)" for split, num in runs)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=positive(int), default=2)
    parser.add_argument(
        "--slow", type=positive(float), default=3.0, help="how many times slower the last rank is"
    )
    parser.add_argument("--steps", type=positive(int), default=40)
    parser.add_argument("--micro-batches", type=positive(int), default=16, help="of a step")
    parser.add_argument("--measure-every", type=positive(int), default=5, metavar="STEPS")
    parser.add_argument("--batch", type=positive(int), default=4, help="sequences per micro-batch")
    parser.add_argument("--context", type=positive(int), default=CONFIG.context)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.micro_batches & (args.micro_batches - 1):
        parser.error(f"--micro-batches: expected a power of two, got {args.micro_batches}")
    if not 2 <= args.ranks <= args.micro_batches:
        parser.error(
            f"--ranks: expected 2 to {args.micro_batches}, the number of micro-batches, since "
            f"every rank computes at least one; got {args.ranks}"
        )
    if not 1 <= args.slow < math.inf:
        parser.error(f"--slow: expected 1 or more, got {args.slow}")
    if args.steps <= args.measure_every:
        parser.error(
            f"--steps: expected more than the {args.measure_every} of --measure-every, with which "
            f"the measured split begins; got {args.steps}"
        )
    return args


def print_results(
    args: argparse.Namespace, alone: Alone, reports: Sequence[Report], joined: Tensor
) -> None:
    """Exits with an error if parameters lack the bits of one rank; `joined` are those of Join."""
    console = Console(soft_wrap=True)
    num_cores = len(os.sched_getaffinity(0))
    console.print(f"{args.ranks} ranks on {num_cores} cores, the last {args.slow:g} times slower")
    if args.ranks > num_cores:
        console.print("more ranks than cores: a rank's speed depends on what the others do")
    first, last = alone.losses[0], alone.losses[-1]
    console.print(f"one rank: loss from {first:.3f} to {last:.3f} nats per byte, {alone.hash}")
    console.print(f"measured split: {say_splits(reports[0].splits)}")
    difference = float((joined - alone.parameters).abs().max())
    verdicts = {JOIN: f"within {difference:.1e}"}
    for name in (EVEN, MEASURED):
        is_same = all(report.hashes[name] == alone.hash for report in reports)
        verdicts[name] = "one rank's bits" if is_same else "DIFFERENT"
    times = times_of(reports, args.measure_every)
    console.print(table_of(times, verdicts))
    reduction = statistics.median(times.reduction)
    console.print(
        f"of a step with the measured split, {reduction:.1f} ms are the sum over the ranks"
    )
    if "DIFFERENT" in verdicts.values():
        sys.exit("the parameters differ from those of one rank")


def main() -> None:
    args = parse_args()
    text, _ = read_corpus()
    (alone,) = run_ranks(1, train_alone, text, args)
    reports, joined = zip(*run_ranks(args.ranks, train, text, args), strict=True)
    print_results(args, alone, reports, joined[0])


if __name__ == "__main__":
    main()
