"""How well the demo's GPT learns when its ranks communicate every few steps.

    python benchmarks/local_sgd.py            # starts its own ranks; a table and a record
    python benchmarks/local_sgd.py --quick    # a few steps, to see that it runs

Under torchrun on every host it measures over a network: each rank is then a worker of its own. All
variants start from the same weights, and rank i of each sees the same batches. AdamW is the inner
optimizer, with the demo's learning rate. DiLoCo's outer one is SGD with Nesterov momentum and
lr=0.7, as in the paper, but with less momentum. Wires narrower than float32 have error feedback.
Bytes are computed, not counted: what a rank sends in a reduction that scatters and gathers, over
the steps that share it. Seconds are of training alone, of the slowest rank. The last line is JSON.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import report
import rota
import turns
from arguments import Parser, parse_list
from demo_model import train_gpt
from rota.local_sgd import DiLoCo, LocalSGD

ALONE, DDP, LOCAL_SGD, DILOCO = "alone", "ddp", "local_sgd", "diloco"
# The paper's 0.9 is for hundreds of outer steps: with 20 it ended 0.26 bits per byte above 0.5
# (2026-11-25 in LOG.md), and 0.2 to 0.5 are within what one seed can tell.
OUTER_MOMENTUM = 0.3


@dataclass(frozen=True)
class Variant:
    label: str
    method: str
    sync_every: int = 1
    wire_dtype: torch.dtype = torch.float32
    num_fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    outer_momentum: float = OUTER_MOMENTUM


E4M3 = torch.float8_e4m3fn
VARIANTS = {
    "ddp": Variant("DDP, float32", DDP),
    "alone": Variant("no communication", ALONE),
    "local_8": Variant("LocalSGD, 8 steps", LOCAL_SGD, 8),
    "local_8_fp16": Variant("LocalSGD, 8 steps, float16", LOCAL_SGD, 8, torch.float16),
    "local_8_fp8": Variant("LocalSGD, 8 steps, float8_e4m3fn", LOCAL_SGD, 8, E4M3),
    "local_32": Variant("LocalSGD, 32 steps", LOCAL_SGD, 32),
    "diloco_8": Variant("DiLoCo, 8 steps", DILOCO, 8),
    "diloco_16": Variant("DiLoCo, 16 steps", DILOCO, 16),
    "diloco_16_fp8": Variant("DiLoCo, 16 steps, float8_e4m3fn", DILOCO, 16, E4M3),
    "diloco_16_paper": Variant("DiLoCo, 16 steps, momentum 0.9", DILOCO, 16, outer_momentum=0.9),
    "diloco_32": Variant("DiLoCo, 32 steps", DILOCO, 32),
    "diloco_32_fp8": Variant("DiLoCo, 32 steps, float8_e4m3fn", DILOCO, 32, E4M3),
    "streaming_32_fp8": Variant(
        "the same, 4 fragments, delay 2, alpha 0.5", DILOCO, 32, E4M3, 4, 2, 0.5
    ),
}


def make_outer(variant: Variant, model: train_gpt.GPT, state: rota.HookState) -> LocalSGD:
    options: dict[str, Any] = {
        "state": state,
        "num_fragments": variant.num_fragments,
        "fragment_sync_delay": variant.fragment_sync_delay,
        "fragment_update_alpha": variant.fragment_update_alpha,
    }
    if variant.method == LOCAL_SGD:
        return LocalSGD(model, variant.sync_every, **options)
    outer_optimizer = torch.optim.SGD(
        model.parameters(), lr=0.7, momentum=variant.outer_momentum, nesterov=True
    )
    return DiLoCo(model, outer_optimizer, variant.sync_every, **options)


def bytes_per_step(variant: Variant, num_parameters: int) -> float:
    """What a rank sends: its part of every other rank's sum, and its own sum to all others."""
    if variant.method == ALONE:
        return 0.0
    size = float(variant.wire_dtype.itemsize)
    if size < 4:
        size += 1 / rota._C.block_elems(variant.wire_dtype)  # a block's scale
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * num_parameters * size / variant.sync_every


def train(
    variant: Variant, initial: train_gpt.GPT, text: Tensor, held_out: Tensor, args: Any
) -> dict[str, Any]:
    """Trains a model; the same row on every rank."""
    rank, context = dist.get_rank(), train_gpt.SCALES["cpu"].config.context
    model = copy.deepcopy(initial)
    optimizer = train_gpt.make_optimizer(model)
    parallel: torch.nn.Module = model
    outer = None
    if variant.method == DDP:
        parallel = train_gpt.data_parallel(model, "rota", "none")
    elif variant.method != ALONE:
        is_narrow = variant.wire_dtype != torch.float32
        state = rota.HookState(wire_dtype=variant.wire_dtype, error_feedback=is_narrow)
        outer = make_outer(variant, model, state)  # over all ranks, each of which is a worker
    losses = []
    dist.barrier()
    begin = time.perf_counter()
    for step in range(args.steps):
        batch = train_gpt.sample_batch(text, args.batch, context, (args.seed, rank, step))
        lr = train_gpt.learning_rate(step, args.steps, args.lr)
        losses.append(float(train_gpt.train_step(parallel, optimizer, batch, lr)))
        if outer is not None:
            outer.step()
    if outer is not None:
        outer.sync()
    seconds = max(turns.gathered(time.perf_counter() - begin))
    mean_losses = torch.tensor(losses)
    dist.all_reduce(mean_losses)
    mean_losses /= dist.get_world_size()
    return {
        "label": variant.label,
        "held_out_bits": round(train_gpt.held_out_bits(model, held_out, context), 4),
        "bytes_per_step": round(
            bytes_per_step(variant, sum(p.numel() for p in model.parameters()))
        ),
        "seconds": round(seconds, 1),
        "parameter_spread": train_gpt.parameter_spread(model),
        "losses_of_all": [round(loss, 4) for loss in mean_losses.tolist()],
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
    with turns.job("local_sgd", args, backend="rota") as (run, console):
        torch.manual_seed(args.seed)
        initial = train_gpt.GPT(train_gpt.SCALES["cpu"].config)
        text, held_out = train_gpt.read_corpus()
        rows = []
        for name in args.variants:
            row = train(VARIANTS[name], initial, text, held_out, args)
            rows.append(row)
            console.print(f"{row['label']}: {row['held_out_bits']}, {row['seconds']} s")
        title = f"{args.steps} steps of the demo's GPT on {args.ranks} ranks"
        turns.publish(run, title, rows, COLUMNS)


if __name__ == "__main__":
    main()
