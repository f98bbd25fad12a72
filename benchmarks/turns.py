"""What benchmarks share that train the demo's GPT on the CPU, several variants in one job.

The variants take turns in blocks of a few steps; the first block is not timed.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import track

import demo
import driver
import report
from arguments import Parser
from demo_model import train_gpt

# At most this share of Gloo's communication; the goal of rota in training.
GOAL = 0.25
QUICK_STEPS = 40


def parse_arguments(parser: Parser, quick_steps: int = QUICK_STEPS, **defaults: float) -> Any:
    """Parses the command line, with the arguments that all these benchmarks have.

    Args:
        parser: with a benchmark's own arguments.
        quick_steps: of --quick.
        defaults: of arguments of training, where they are not the demo's.
    """
    add = parser.add_argument
    add("--quick", action="store_true", help=f"at most {quick_steps} steps of each variant")
    add("--json", type=Path, help="where to write the record (default: benchmarks/results/)")
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
) -> Iterator[tuple[driver.Run | None, Console]]:
    """Restarts this program as args.ranks ranks, in a default group of the backend.

    Yields:
        The run, on rank 0 only, and a console, on which only rank 0 prints.
    """
    demo.become_ranks(args.ranks)
    dist.init_process_group(backend)
    is_first = dist.get_rank() == 0
    run = driver.Run(benchmark, benchmark, args.ranks, args) if is_first else None
    yield run, Console(quiet=not is_first)
    dist.destroy_process_group()


def publish(
    run: driver.Run,
    title: str,
    rows: list[dict[str, Any]],
    columns: Mapping[str, Callable[[dict[str, Any]], str]],
) -> None:
    """Writes the record, and prints the table and a last line for programs.

    Args:
        title: of the table.
        rows: one per variant, with its "label"; lists under keys "..._of_all" are not printed.
        columns: the table's headings, and what a row shows below them.
    """
    run.write_record({"variants": rows})
    report.print_labelled(
        run.console,
        title,
        ("variant", *columns),
        [(row["label"], *(show(row) for show in columns.values())) for row in rows],
    )
    summary = [{k: v for k, v in row.items() if not k.endswith("_of_all")} for row in rows]
    print(json.dumps({"benchmark": run.benchmark, "json": str(run.json_path), "variants": summary}))
