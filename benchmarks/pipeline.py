"""The cost of communication in pipeline training with 1F1B: rota and Gloo.

    python benchmarks/pipeline.py            # starts its own ranks; a table and a record
    python benchmarks/pipeline.py --quick    # the same in less than a minute, with more noise

Cuts the demo's GPT into one stage per rank and trains it on the CPU by torch's Schedule1F1B. All
variants run in one job and take turns in blocks of a few steps. A pipeline also waits where
communication costs nothing, because a stage needs what another one computes, and torch's own code
runs between two computations. So both are timed, and every step is replayed with these times, in
the order in which each stage ran them, and with messages that take no time. Communication is what
the measured step takes longer: to post messages, to wait for them, and to wake up. The last line
is JSON.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

import demo
import driver
from arguments import Parser, parse_natural
from demo_model import train_gpt
from pipeline_replay import Computation, Step, seconds_without_communication

import train_3d  # isort: skip  (demo_model has put the examples on the path)

BASELINE = "gloo"
VARIANTS = {BASELINE: "Gloo", "rota": "rota"}
# At most this share of Gloo's communication.
GOAL = 0.25
QUICK_STEPS = 40


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


class RecordedStage(PipelineStage):
    """Records its computations, and torch's own code between them and after the last.

    A loss belongs to the forward computation before it.
    """

    def __init__(self, part: nn.Module, group: dist.ProcessGroup) -> None:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(part, rank, num_ranks, torch.device("cpu"), group=group)
        self.computations: list[Computation] = []
        self._ended = self._communicated = 0.0

    def begin_step(self) -> None:
        self.computations = []
        self._ended, self._communicated = time.perf_counter(), COMMUNICATION.seconds

    def end_step(self) -> Step:
        return Step(self.computations, self._pass_time()[1])

    def _pass_time(self) -> tuple[float, float]:
        """The time, and how much of it since the last call neither computed nor communicated."""
        now, communicated = time.perf_counter(), COMMUNICATION.seconds
        own_seconds = (now - self._ended) - (communicated - self._communicated)
        self._ended, self._communicated = now, communicated
        return now, own_seconds

    @contextlib.contextmanager
    def _recorded(self, is_forward: bool, microbatch: int) -> Iterator[None]:
        start, before_seconds = self._pass_time()
        yield
        self._ended = time.perf_counter()
        computation = Computation(is_forward, microbatch, self._ended - start, before_seconds)
        self.computations.append(computation)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._recorded(True, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._recorded(False, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        start = self._ended
        loss = train_3d.loss_of(logits, targets)
        self._ended = time.perf_counter()
        if self.computations:  # otherwise torch only infers shapes, before the first step
            last = self.computations[-1]
            seconds = last.seconds + (self._ended - start)
            self.computations[-1] = last._replace(seconds=seconds)
        return loss


@dataclass
class Run:
    """One variant's stage on this rank, and what it has measured by step."""

    stage: RecordedStage
    schedule: Schedule1F1B
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # nats per byte; in the last stage
    step_s: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def start_run(name: str, initial: train_gpt.GPT, args: Any) -> Run:
    """One variant's stage, in a group of its own."""
    group = dist.new_group(backend=name)
    part = train_3d.Stage(
        copy.deepcopy(initial), dist.get_rank(), dist.get_world_size(), float16=False
    )
    stage = RecordedStage(part, group)
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=stage.loss_of)
    return Run(stage, schedule, torch.optim.AdamW(part.parameters(), args.lr, fused=True))


def train_step(run: Run, inputs: Tensor, targets: Tensor) -> None:
    """inputs, targets: (batch, time), of which a stage uses what it needs."""
    run.optimizer.zero_grad()
    losses: list[Tensor] = []
    dist.barrier()
    start = time.perf_counter()
    run.stage.begin_step()
    if run.stage.is_first:
        run.schedule.step(inputs)
    elif run.stage.is_last:
        run.schedule.step(target=targets, losses=losses)
    else:
        run.schedule.step()
    run.step_s.append(time.perf_counter() - start)
    run.steps.append(run.stage.end_step())
    run.losses += [torch.stack(losses).mean().item()] if losses else []
    run.optimizer.step()


def train_in_turns(args: Any, console: Console) -> dict[str, Run]:
    """Trains all variants, a block of steps each, in rotating order."""
    train, _ = train_gpt.read_corpus()
    torch.manual_seed(args.seed)
    config = train_gpt.SCALES["cpu"].config
    initial = train_gpt.GPT(config)
    runs = {name: start_run(name, initial, args) for name in VARIANTS}
    turns = deque(runs)
    for first in track(
        range(0, args.steps, demo.BLOCK_STEPS),
        console=console,
        description="blocks of steps",
        disable=not console.is_terminal,
    ):
        for name in turns:
            for step in range(first, min(first + demo.BLOCK_STEPS, args.steps)):
                batch = train_gpt.sample_batch(
                    train, args.batch, config.context, (args.seed, 0, step)
                )
                train_step(runs[name], *batch)
        turns.rotate(-1)
    return runs


def summarize(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """One row per variant; collective, and the same on every rank."""
    rows = []
    for name, run in runs.items():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (run.step_s, run.steps, run.losses))
        step_s, steps, losses = zip(*of_ranks, strict=True)
        step_ms = [max(times) * 1e3 for times in zip(*step_s, strict=True)]
        ideal_ms = [
            seconds_without_communication(stages) * 1e3 for stages in zip(*steps, strict=True)
        ]
        costs = [step - ideal for step, ideal in zip(step_ms, ideal_ms, strict=True)]
        rows.append(
            {
                "variant": name,
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


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per variant."""
    table = Table(title=f"1F1B steps of the demo's GPT, in ms (goal: {GOAL:.0%} of Gloo's)")
    table.add_column("variant", no_wrap=True)
    for heading in (
        "step",
        "without\ncommunication",
        "communication",
        "share\nof Gloo's",
        "last\nloss",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            VARIANTS[row["variant"]],
            f"{row['step_ms']:.1f}",
            f"{row['without_communication_ms']:.1f}",
            f"{row['communication_ms']:.2f}",
            f"{row['share_of_gloo']:.1%}",
            f"{row['last_loss']:.4f}",
        )
    console.print(table)


def parse_arguments() -> Any:
    """Parses the command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=parse_natural(2), default=2, help="stages, a rank each (default: 2)")
    add("--microbatches", type=parse_natural(2), default=4, help="of a batch (default: 4)")
    add("--quick", action="store_true", help=f"at most {QUICK_STEPS} steps of each variant")
    add("--json", type=Path, help="where to write the record (default: benchmarks/results/)")
    train_gpt.add_training_arguments(parser)
    args = parser.parse_args()
    train_gpt.fill_in(args, train_gpt.SCALES["cpu"])
    num_blocks = len(train_gpt.GPT(train_gpt.SCALES["cpu"].config).blocks)
    if num_blocks % args.ranks != 0:
        parser.error(f"--ranks is {args.ranks}; the model's {num_blocks} blocks must divide evenly")
    if args.batch % args.microbatches != 0:
        parser.error(f"--batch is {args.batch}, expected a multiple of {args.microbatches}")
    if args.quick:
        args.steps = min(args.steps, QUICK_STEPS)
    if args.steps <= demo.BLOCK_STEPS:
        parser.error(f"--steps is {args.steps}; the first {demo.BLOCK_STEPS} are not timed")
    return args


def main() -> None:
    """Restarts as ranks and trains; rank 0 publishes the results."""
    args = parse_arguments()
    demo.become_ranks(args.ranks)
    dist.init_process_group("rota")
    for name in ("_batch_p2p", "_wait_batch_p2p"):
        setattr(schedules, name, COMMUNICATION.timed(getattr(schedules, name)))
    is_first = dist.get_rank() == 0
    run = driver.Run("pipeline", "pipeline", args.ranks, args) if is_first else None
    rows = summarize(train_in_turns(args, Console(quiet=not is_first)))
    if run is not None:
        run.write_record({"variants": rows})
        print_table(run.console, rows)
        summary = [{k: v for k, v in row.items() if not k.endswith("of_all")} for row in rows]
        print(json.dumps({"benchmark": "pipeline", "json": str(run.json_path), "rows": summary}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
