"""How well the demo's GPT learns when its ranks communicate every few steps.

    python benchmarks/local_sgd.py            # starts its own ranks; a table and a record
    python benchmarks/local_sgd.py --quick    # a few steps, to see that it runs

Under torchrun on every host it measures over a network. A worker is a host, whose ranks average
their gradients in every step, or on a single host a rank. As in demo.py, variants take turns from
the same weights, on the same batches. AdamW is the inner optimizer, with the demo's learning rate.
DiLoCo's outer one is SGD with Nesterov momentum and lr=0.7, as in the paper, but with less
momentum. Wires narrower than float32 have error feedback. Bytes are computed, not counted: what a
rank sends in a reduction that scatters and gathers, over the steps that share it. Seconds are of
training alone, of the slowest rank, without the first block of steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

import demo
import error_bound
import report
import rota
import turns
from arguments import Parser, parse_list
from demo_model import train_gpt
from rota.local_sgd import DiLoCo, LocalSGD

# The paper's 0.9 is for hundreds of outer steps: with 20 it ended 0.26 bits per byte above 0.5
# (2026-11-25 in LOG.md), and 0.2 to 0.5 are within what one seed can tell.
MOMENTUM = 0.3
MAX_MINUTES = 60.0  # of one seed at one rate; a limit would cut off some of the runs to compare


@dataclass(frozen=True)
class EveryFewSteps:
    """LocalSGD or DiLoCo between workers, DistributedDataParallel within each."""

    color: str
    label: str
    sync_every: int
    outer_momentum: float | None = None  # of DiLoCo; None: LocalSGD
    wire_dtype: torch.dtype = torch.float32  # between workers
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, initial: train_gpt.GPT) -> demo.Run:
        model = copy.deepcopy(initial)
        everyone = dist.new_group(backend="rota")
        workers = rota.Communicator(everyone).hosts
        has_hosts = len(workers) > 1
        if not has_hosts:
            workers = [[rank] for rank in workers[0]]
        worker, _ = dist.new_subgroups_by_enumeration(workers, backend="rota")
        state = rota.HookState(
            everyone,
            torch.float32 if has_hosts else self.wire_dtype,
            inter_wire_dtype=self.wire_dtype,
            error_feedback=self.wire_dtype != torch.float32,
        )
        ddp = train_gpt.data_parallel(model, "rota", "none", worker)
        optimizer = train_gpt.make_optimizer(model)
        outer = self._outer(model, state)
        optimizer.register_step_post_hook(lambda *_: outer.step())
        return demo.Run(model, ddp, optimizer, finish=outer.sync)

    def _outer(self, model: train_gpt.GPT, state: rota.HookState) -> LocalSGD:
        if self.outer_momentum is None:
            return LocalSGD(model, self.sync_every, state=state, **self.options)
        outer_optimizer = torch.optim.SGD(
            model.parameters(), lr=0.7, momentum=self.outer_momentum, nesterov=True
        )
        return DiLoCo(model, outer_optimizer, self.sync_every, state=state, **self.options)


E4M3 = torch.float8_e4m3fn
FRAGMENTS = {"num_fragments": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
COLORS = ("#8a1c7c", "#5b4a9e", "#a89be0", "#7a6a4f", "#d2c14a", "#d08ac4")
_OUTER: dict[str, tuple[Any, ...]] = {
    "local_8": ("LocalSGD, 8 steps", 8),
    "local_8_fp16": ("LocalSGD, 8 steps, float16", 8, None, torch.float16),
    "local_8_fp8": ("LocalSGD, 8 steps, float8_e4m3fn", 8, None, E4M3),
    "local_32": ("LocalSGD, 32 steps", 32),
    "diloco_8": ("DiLoCo, 8 steps", 8, MOMENTUM),
    "diloco_16": ("DiLoCo, 16 steps", 16, MOMENTUM),
    "diloco_16_fp8": ("DiLoCo, 16 steps, float8_e4m3fn", 16, MOMENTUM, E4M3),
    "diloco_16_paper": ("DiLoCo, 16 steps, momentum 0.9", 16, 0.9),
    "diloco_32": ("DiLoCo, 32 steps", 32, MOMENTUM),
    "diloco_32_fp8": ("DiLoCo, 32 steps, float8_e4m3fn", 32, MOMENTUM, E4M3),
    "streaming_32_fp8": (
        *("the same, 4 fragments, delay 2, alpha 0.5", 32, MOMENTUM, E4M3, FRAGMENTS),
    ),
}
OUTER = {
    name: EveryFewSteps(color, *outer)
    for color, (name, outer) in zip(cycle(COLORS), _OUTER.items(), strict=False)
}
VARIANTS: dict[str, demo.Startable] = {
    "ddp": demo.VARIANTS["rota"],
    "alone": demo.VARIANTS["none"],
    **OUTER,
}


def bytes_per_step(name: str, num_parameters: int, world_size: int) -> float:
    """What a rank sends: its part of every other rank's sum, and its own sum to all others."""
    if name == "alone":
        return 0.0
    outer = OUTER.get(name, EveryFewSteps("", "", sync_every=1))
    elem_bytes = error_bound.rota_wire(outer.wire_dtype, block_scaling=True).elem_bytes
    return 2 * (world_size - 1) / world_size * num_parameters * elem_bytes / outer.sync_every


def row_of(name: str, run: demo.Run) -> dict[str, Any]:
    """The same on every rank."""
    result = demo.gather(VARIANTS[name], run)
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    return {
        "label": result.label,
        "held_out_bits": round(result.held_out[-1][1], 4),
        "bytes_per_step": round(bytes_per_step(name, num_parameters, dist.get_world_size())),
        "seconds": round(sum(result.step_ms) / 1e3, 1),
        "parameter_spread": result.spread,
        "losses_of_all": [round(loss, 4) for loss in result.losses],
    }


COLUMNS: report.Columns = {
    "held-out\nbits per byte": "{held_out_bits:.4f}",
    "MB sent by a\nrank per step": lambda row: f"{row['bytes_per_step'] / 1e6:.3f}",
    "seconds": "{seconds:.1f}",
}


def main() -> None:
    parser = Parser(__doc__)
    turns.add_ranks(parser)
    parser.add("--variants", type=parse_list(list(VARIANTS)), default=",".join(VARIANTS))
    args = turns.parse_arguments(parser)
    args.max_minutes = MAX_MINUTES
    with turns.job("local_sgd", args) as (run, console):
        runs = demo.train_in_turns(args, *train_gpt.read_corpus(), console, variants=VARIANTS)
        rows = [row_of(name, one) for name, one in runs.items()]
        title = f"{args.steps} steps of the demo's GPT on {args.ranks} ranks"
        turns.publish(run, title, rows, COLUMNS)


if __name__ == "__main__":
    main()
