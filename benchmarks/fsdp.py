"""The cost of communication in FSDP2 training: rota, rota in a 16-bit wire, and Gloo.

    python benchmarks/fsdp.py            # starts its own ranks; a table and a record
    python benchmarks/fsdp.py --quick    # the same in a minute, with more noise

Shards the demo's GPT, each block on its own, and trains it on the CPU. As in benchmarks/demo.py,
all variants run in one job and take turns in blocks of a few steps, and a step's time is that of
its slowest rank. Communication is a variant's median step minus that of a variant whose collectives
do nothing, on buffers that are made once; so it includes the waits for the slower rank, and the
pages of FSDP's own buffers. Where other programs keep the cores busy, the medians are noise; the
CPU time of a step, on the rank that takes the most, then says more.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import demo
import report
import rota.fsdp
import turns
from arguments import Parser
from demo_model import train_gpt

BASE = "none"
BASELINE = "gloo"


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


def summarize(runs: dict[str, demo.Run]) -> list[dict[str, Any]]:
    """One row per variant: its median step, and its communication compared with Gloo's. Collective;
    losses are of this rank's batch, and the times are the same on every rank."""
    step_ms = {name: turns.slowest_ranks(run.step_ms) for name, run in runs.items()}
    cpu_ms = {name: max(demo.gathered(run.cpu_ms)) / len(run.step_ms) for name, run in runs.items()}
    median = {name: statistics.median(times) for name, times in step_ms.items()}
    cost = {name: value - median[BASE] for name, value in median.items()}
    return [
        {
            "variant": name,
            "label": VARIANTS[name].label,
            "step_ms": round(median[name], 3),
            "communication_ms": round(cost[name], 3),
            "share_of_step": round(cost[name] / median[name], 4),
            "share_of_gloo": round(cost[name] / cost[BASELINE], 4),
            "cpu_ms": round(cpu_ms[name], 3),
            "communication_cpu_ms": round(cpu_ms[name] - cpu_ms[BASE], 3),
            # Without communication the losses mean nothing.
            "last_loss": None if name == BASE else round(run.losses[-1], 5),
            "step_ms_of_all": [round(value, 2) for value in step_ms[name]],
        }
        for name, run in runs.items()
    ]


def unless_base(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    """A column of what means nothing without communication."""
    return lambda row: "-" if row["variant"] == BASE else format(row[key], form)


COLUMNS: report.Columns = {
    "step": "{step_ms:.1f}",
    "communication": unless_base("communication_ms", ".1f"),
    "share\nof step": unless_base("share_of_step", ".1%"),
    "share\nof Gloo's": unless_base("share_of_gloo", ".1%"),
    "CPU time\nof a step": "{cpu_ms:.1f}",
    "of communi-\ncation": unless_base("communication_cpu_ms", ".1f"),
    "last\nloss": unless_base("last_loss", ".4f"),
}


def main() -> None:
    parser = Parser(__doc__)
    turns.add_ranks(parser)
    args = turns.parse_arguments(parser)
    with turns.job("fsdp", args) as (run, console):
        text, _ = train_gpt.read_corpus()
        torch.manual_seed(args.seed)
        initial = train_gpt.GPT(train_gpt.SCALES["cpu"].config)
        runs = {name: start_run(name, initial) for name in VARIANTS}
        for name, steps in turns.in_turns(VARIANTS, args.steps, console):
            demo.take_turn(runs[name], steps, args.steps, text, args)
        title = f"FSDP2 steps of the demo's GPT, in ms (goal: {turns.GOAL:.0%} of Gloo's)"
        turns.publish(run, title, summarize(runs), COLUMNS)


if __name__ == "__main__":
    main()
