"""The cost of communication in pipeline training with 1F1B: rota and Gloo.

    python benchmarks/pipeline.py            # starts its own ranks; a table and a record
    python benchmarks/pipeline.py --quick    # the same in less than a minute, with more noise

Cuts the demo's GPT into one stage per rank and trains it on the CPU by torch's Schedule1F1B. All
variants run in one job and take turns in blocks of a few steps. A pipeline also waits where
communication costs nothing, because a stage needs what another one computes, and torch's own code
runs between two computations. So both are timed, and every step is replayed with these times, in
the order in which each stage ran them, and with messages that take no time. Communication is what
the measured step takes longer: to post messages, to wait for them, and to wake up.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, schedules

import demo
import report
import turns
from arguments import Parser, parse_natural
from demo_model import train_gpt
from pipeline_replay import Computation, Step, seconds_without_communication

import train_3d  # isort: skip  (demo_model has put the examples on the path)

BASELINE = "gloo"
VARIANTS = {BASELINE: "Gloo", "rota": "rota"}


class Stopwatch:
    """The seconds spent in some functions of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added up."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


COMMUNICATION = Stopwatch()


class Run:
    """One variant's stage on this rank, in a group of its own, and what it has measured by step."""

    def __init__(self, backend: str, initial: train_gpt.GPT, args: Any) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        part = train_3d.Stage(copy.deepcopy(initial), rank, num_ranks, float16=False)
        self._stage = train_3d.TimedStage(
            part, rank, num_ranks, dist.new_group(backend=backend), self._record
        )
        self._schedule = Schedule1F1B(self._stage, args.microbatches, loss_fn=self._loss_of)
        self._optimizer = torch.optim.AdamW(part.parameters(), args.lr, fused=True)
        self.losses: list[float] = []  # nats per byte; in the last stage
        self.step_s: list[float] = []
        self.steps: list[Step] = []
        self._computations: list[Computation] = []
        self._passed_at = self._communicated = 0.0

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """inputs, targets: (batch, time), of which a stage uses what it needs."""
        self._optimizer.zero_grad()
        self._computations = []
        losses: list[Tensor] = []
        dist.barrier()
        start = time.perf_counter()
        self._pass_to(start)
        if self._stage.is_first:
            self._schedule.step(inputs)
        elif self._stage.is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step()
        end = time.perf_counter()
        self.step_s.append(end - start)
        self.steps.append(Step(self._computations, self._pass_to(end)))
        self.losses += [torch.stack(losses).mean().item()] if losses else []
        self._optimizer.step()

    def _pass_to(self, now: float) -> float:
        """The seconds since the last call that neither computed nor communicated."""
        own_seconds = (now - self._passed_at) - (COMMUNICATION.seconds - self._communicated)
        self._passed_at, self._communicated = now, COMMUNICATION.seconds
        return own_seconds

    def _record(self, is_forward: bool, microbatch: int, seconds: float) -> None:
        end = time.perf_counter()
        before_seconds = self._pass_to(end - seconds)
        self._passed_at = end
        self._computations.append(Computation(is_forward, microbatch, seconds, before_seconds))

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Counts as part of the forward computation before it."""
        start = time.perf_counter()
        loss = train_3d.loss_of(logits, targets)
        seconds = time.perf_counter() - start
        self._passed_at += seconds
        if self._computations:  # otherwise torch only infers shapes
            last = self._computations[-1]
            self._computations[-1] = last._replace(seconds=last.seconds + seconds)
        return loss


def summarize(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """One row per variant; collective, and the same on every rank."""
    rows = []
    for name, run in runs.items():
        own = (run.step_s, run.steps, run.losses)
        step_s, steps, losses = zip(*demo.gathered(own), strict=True)
        step_ms = [max(times) * 1e3 for times in zip(*step_s, strict=True)]
        ideal_ms = [
            seconds_without_communication(stages) * 1e3 for stages in zip(*steps, strict=True)
        ]
        costs = [step - ideal for step, ideal in zip(step_ms, ideal_ms, strict=True)]
        rows.append(
            {
                "variant": name,
                "label": VARIANTS[name],
                "step_ms": statistics.median(step_ms[demo.BLOCK_STEPS :]),
                "without_communication_ms": statistics.median(ideal_ms[demo.BLOCK_STEPS :]),
                "communication_ms": statistics.median(costs[demo.BLOCK_STEPS :]),
                "last_loss": losses[-1][-1],
                "step_ms_of_all": [round(value, 2) for value in step_ms],
                "communication_ms_of_all": [round(value, 2) for value in costs],
            }
        )
    baseline = next(row for row in rows if row["variant"] == BASELINE)
    for row in rows:
        row["share_of_gloo"] = row["communication_ms"] / baseline["communication_ms"]
    return rows


COLUMNS: report.Columns = {
    "step": "{step_ms:.1f}",
    "without\ncommunication": "{without_communication_ms:.1f}",
    "communication": "{communication_ms:.2f}",
    "share\nof Gloo's": "{share_of_gloo:.1%}",
    "last\nloss": "{last_loss:.4f}",
}


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--ranks", type=parse_natural(2), default=2, help="stages, a rank each")
    parser.add("--microbatches", type=parse_natural(2), default=4, help="of a batch")
    args = turns.parse_arguments(parser)
    config = train_gpt.SCALES["cpu"].config
    if config.num_layers % args.ranks != 0:
        parser.error(
            f"--ranks is {args.ranks}; the model's {config.num_layers} blocks must divide evenly"
        )
    if args.batch % args.microbatches != 0:
        parser.error(f"--batch is {args.batch}, expected a multiple of {args.microbatches}")
    for name in ("_batch_p2p", "_wait_batch_p2p"):
        setattr(schedules, name, COMMUNICATION.timed(getattr(schedules, name)))
    with turns.job("pipeline", args, backend="rota") as (run, console):
        text, _ = train_gpt.read_corpus()
        torch.manual_seed(args.seed)
        initial = train_gpt.GPT(config)
        runs = {name: Run(name, initial, args) for name in VARIANTS}
        for name, steps in turns.in_turns(VARIANTS, args.steps, console):
            for step in steps:
                key = (args.seed, 0, step)
                runs[name].train_step(
                    *train_gpt.sample_batch(text, args.batch, config.context, key)
                )
        title = f"1F1B steps of the demo's GPT, in ms (goal: {turns.GOAL:.0%} of Gloo's)"
        turns.publish(run, title, summarize(runs), COLUMNS)


if __name__ == "__main__":
    main()
