"""What benchmarks share that train the demo's GPT on the CPU, several variants in one job.

The variants take turns in blocks of a few steps; the first block is not timed.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import track

import demo
import report
from arguments import Parser, parse_natural
from demo_model import train_gpt
from record import Run

# At most this share of Gloo's communication; the goal of rota in training.
GOAL = 0.25
QUICK_STEPS = 40

Row = dict[str, Any]


def add_ranks(parser: Parser, minimum: int = 2) -> None:
    parser.add("--ranks", type=parse_natural(minimum), default=2, help="to start")


def parse_arguments(
    parser: Parser, quick_steps: int = QUICK_STEPS, **defaults: float
) -> argparse.Namespace:
    """Parses the command line, with the arguments that all these benchmarks have; `defaults` are
    for those of training that differ from the demo's."""
    parser.add("--quick", action="store_true", help=f"at most {quick_steps} steps of each variant")
    parser.add_json()
    train_gpt.add_training_arguments(parser)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    train_gpt.fill_in(args, train_gpt.SCALES["cpu"])
    if args.quick:
        args.steps = min(args.steps, quick_steps)
    if args.steps <= demo.BLOCK_STEPS:
        parser.error(f"--steps is {args.steps}; the first {demo.BLOCK_STEPS} are not timed")
    return args


def in_turns(
    variants: Iterable[str], num_steps: int, console: Console
) -> Iterator[tuple[str, range]]:
    """Yields whose turn it is and its steps; rotates, so that no variant always comes first."""
    order = deque(variants)
    for first in track(
        range(0, num_steps, demo.BLOCK_STEPS),
        console=console,
        description="blocks of steps",
        disable=not console.is_terminal,
    ):
        steps = range(first, min(first + demo.BLOCK_STEPS, num_steps))
        for name in order:
            yield name, steps
        order.rotate(-1)


@contextmanager
def job(
    benchmark: str, args: argparse.Namespace, backend: str = "gloo"
) -> Iterator[tuple[Run | None, Console]]:
    """Restarts this program as args.ranks ranks, in a default group of the backend.

    Yields:
        The run, on rank 0 only, and a console, on which only rank 0 prints.
    """
    demo.become_ranks(args.ranks)
    dist.init_process_group(backend)
    is_first = dist.get_rank() == 0
    yield Run(benchmark, args.ranks, args) if is_first else None, Console(quiet=not is_first)
    dist.destroy_process_group()


def slowest_ranks(step_ms: Sequence[float]) -> list[float]:
    """The time of each step's slowest rank, without the first block. Collective."""
    return [max(times) for times in zip(*demo.gathered(step_ms), strict=True)][demo.BLOCK_STEPS :]


def publish(run: Run | None, title: str, rows: list[Row], columns: report.Columns) -> None:
    """Prints a table, writes the record, and prints a last line for programs; only on rank 0.

    Args:
        rows: one per variant, with its "label"; lists under keys "..._of_all" are not printed.
        columns: the table's headings, and what a row shows below them.
    """
    if run is None:
        return
    report.print_columns(run.console, title, rows, {"variant": "{label}", **columns})
    short = [{k: v for k, v in row.items() if not k.endswith("_of_all")} for row in rows]
    run.finish({"variants": rows}, variants=short)
