"""The cost of communication in FSDP2 training: rota, rota in a 16-bit wire, and Gloo.

    python benchmarks/fsdp.py            # starts its own ranks; a table and a record
    python benchmarks/fsdp.py --quick    # the same in a minute, with more noise

Shards the demo's GPT, each block on its own, and trains it on the CPU. As in benchmarks/demo.py,
all variants run in one job and take turns in blocks of a few steps, and a step's time is that of
its slowest rank. Communication is a variant's median step minus that of a variant whose collectives
do nothing, on buffers that are made once; so it includes the waits for the slower rank, and the
pages of FSDP's own buffers. Where other programs keep the cores busy, the medians are noise; the
CPU time of a step, on the rank that takes the most, then says more. The last line is JSON.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import demo
import driver
import rota.fsdp
from arguments import Parser, parse_natural
from demo_model import train_gpt

BASE = "none"
BASELINE = "gloo"
# At most this share of Gloo's communication; the goal of rota.fsdp.
GOAL = 0.25
QUICK_STEPS = 40


@dataclass(frozen=True)
class Variant:
    label: str
    backend: str
    uses_rota_fsdp: bool = False
    wire_dtype: torch.dtype | None = None
    parameter_wire_dtype: torch.dtype | None = None


VARIANTS = {
    BASE: Variant("no communication", "gloo"),
    BASELINE: Variant("Gloo", "gloo"),
    "rota_backend": Variant("rota, torch's collectives", "rota"),
    "rota": Variant("rota.fsdp", "rota", uses_rota_fsdp=True),
    "rota_bf16": Variant(
        "rota.fsdp in bfloat16",
        "rota",
        uses_rota_fsdp=True,
        wire_dtype=torch.bfloat16,
        parameter_wire_dtype=torch.bfloat16,
    ),
}


class NoAllGather(rota.fsdp.AllGather):
    """Leaves the other ranks' shards as they are in memory: zeroes, or an older shard."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        pass


class NoReduceScatter(rota.fsdp.ReduceScatter):
    """Leaves a gradient of zeroes, or an older one."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        pass


def start_run(name: str, initial: train_gpt.GPT) -> demo.Run:
    """One variant's replica, in a group of its own."""
    variant = VARIANTS[name]
    model = copy.deepcopy(initial)
    mesh = DeviceMesh.from_group(dist.new_group(backend=variant.backend), "cpu")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    if variant.uses_rota_fsdp:
        rota.fsdp.use(model, variant.wire_dtype, parameter_wire_dtype=variant.parameter_wire_dtype)
    elif name == BASE:
        all_gather, reduce_scatter = NoAllGather(), NoReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(all_gather)
                module.set_custom_reduce_scatter(reduce_scatter)
    return demo.Run(model, model, train_gpt.make_optimizer(model))


def train_in_turns(args: Any, console: Console) -> dict[str, demo.Run]:
    """Trains all variants, a block of steps each, in rotating order."""
    train, _ = train_gpt.read_corpus()
    torch.manual_seed(args.seed)
    initial = train_gpt.GPT(train_gpt.SCALES["cpu"].config)
    runs = {name: start_run(name, initial) for name in VARIANTS}
    turns = deque(runs)
    for first in track(
        range(0, args.steps, demo.BLOCK_STEPS),
        console=console,
        description="blocks of steps",
        disable=not console.is_terminal,
    ):
        steps = range(first, min(first + demo.BLOCK_STEPS, args.steps))
        for name in turns:
            demo.take_turn(runs[name], steps, args.steps, train, args)
        turns.rotate(-1)
    return runs


@dataclass
class Result:
    """All ranks' measurements of one variant."""

    step_ms: list[float]  # of each step's slowest rank, without the first block
    cpu_ms: float  # of a step, on average
    last_loss: float  # bits per byte, on this rank's batch

    @classmethod
    def of(cls, run: demo.Run) -> Result:
        """Collective; the times are the same on every rank."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (run.step_ms, run.cpu_ms))
        step_ms, cpu_ms = zip(*of_ranks, strict=True)
        return cls(
            [max(times) for times in zip(*step_ms, strict=True)][demo.BLOCK_STEPS :],
            max(cpu_ms) / len(run.step_ms),
            run.losses[-1],
        )


def summarize(results: dict[str, Result]) -> list[dict[str, Any]]:
    """One row per variant: its median step, and its communication compared with Gloo's."""
    median = {name: statistics.median(result.step_ms) for name, result in results.items()}
    cost = {name: value - median[BASE] for name, value in median.items()}
    return [
        {
            "variant": name,
            "label": VARIANTS[name].label,
            "step_ms": round(median[name], 3),
            "communication_ms": round(cost[name], 3),
            "share_of_step": round(cost[name] / median[name], 4),
            "share_of_gloo": round(cost[name] / cost[BASELINE], 4),
            "cpu_ms": round(result.cpu_ms, 3),
            "communication_cpu_ms": round(result.cpu_ms - results[BASE].cpu_ms, 3),
            # Without communication the losses mean nothing.
            "last_loss": None if name == BASE else round(result.last_loss, 5),
            "step_ms_of_all": [round(value, 2) for value in result.step_ms],
        }
        for name, result in results.items()
    ]


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per variant."""
    table = Table(title=f"FSDP2 steps of the demo's GPT, in ms (goal: {GOAL:.0%} of Gloo's)")
    table.add_column("variant", no_wrap=True)
    for heading in (
        "step",
        "communication",
        "share\nof step",
        "share\nof Gloo's",
        "CPU time\nof a step",
        "of communi-\ncation",
        "last\nloss",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        is_base = row["variant"] == BASE
        table.add_row(
            row["label"],
            f"{row['step_ms']:.1f}",
            "-" if is_base else f"{row['communication_ms']:.1f}",
            "-" if is_base else f"{row['share_of_step']:.1%}",
            "-" if is_base else f"{row['share_of_gloo']:.1%}",
            f"{row['cpu_ms']:.1f}",
            "-" if is_base else f"{row['communication_cpu_ms']:.1f}",
            "-" if is_base else f"{row['last_loss']:.4f}",
        )
    console.print(table)


def parse_arguments() -> Any:
    """Parses the command line, and adds the arguments that the demo's training needs."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=parse_natural(2), default=2, help="ranks to start (default: 2)")
    add("--quick", action="store_true", help=f"at most {QUICK_STEPS} steps of each variant")
    add("--json", type=Path, help="where to write the record (default: benchmarks/results/)")
    train_gpt.add_training_arguments(parser)
    args = parser.parse_args()
    train_gpt.fill_in(args, train_gpt.SCALES["cpu"])
    if args.quick:
        args.steps = min(args.steps, QUICK_STEPS)
    if args.steps <= demo.BLOCK_STEPS:
        parser.error(f"--steps is {args.steps}; the first {demo.BLOCK_STEPS} are not timed")
    return args


def main() -> None:
    """Restarts as ranks and trains; rank 0 publishes the results."""
    args = parse_arguments()
    demo.become_ranks(args.ranks)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    run = driver.Run("fsdp", "fsdp", args.ranks, args) if is_first else None
    runs = train_in_turns(args, Console(quiet=not is_first))
    rows = summarize({name: Result.of(one) for name, one in runs.items()})
    if run is not None:
        run.write_record({"variants": rows})
        print_table(run.console, rows)
        summary = [{k: v for k, v in row.items() if k != "step_ms_of_all"} for row in rows]
        print(json.dumps({"benchmark": "fsdp", "json": str(run.json_path), "variants": summary}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
