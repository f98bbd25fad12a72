"""What rota.LogicalShards costs: a step of the demo's GPT, with and without it.

    python benchmarks/logical_shards.py            # starts its own ranks; a table and a record
    python benchmarks/logical_shards.py --quick    # the same in a minute, with more noise

Both variants run the same passes of one sequence each and reduce the same gradients. One lets
autograd add up a rank's gradients, and adds those of the ranks in ascending order; the other adds
in the tree of its logical shards. They take turns in blocks of a few steps. A step's time is that
of its slowest rank, without its optimizer.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch

import report
import rota
import turns
from arguments import Parser
from demo_model import train_gpt

GOAL = 0.05  # of a step
NUM_SHARDS = 8
PLAIN, TREE = "plain", "tree"
LABELS = {PLAIN: "gradients of autograd", TREE: "rota.LogicalShards"}


class Variant:
    def __init__(self, initial: train_gpt.GPT) -> None:
        self.model = copy.deepcopy(initial)
        self.shards = rota.LogicalShards(self.model, NUM_SHARDS)
        self.state = rota.HookState(wire_dtype=torch.float32)  # of a reduction without shards
        self.step_ms: list[float] = []


def backward(variant: Variant, text: torch.Tensor, shard: int) -> None:
    context = train_gpt.SCALES["cpu"].config.context
    chosen = variant.shards.samples(shard, len(text) // (context + 1), 1)
    variant.model(*train_gpt.windows(text, chosen * (context + 1), context)).backward()


def take_step(name: str, variant: Variant, text: torch.Tensor) -> None:
    """All passes of this rank, and the reduction of their gradients."""
    begin = time.perf_counter()
    for shard in variant.shards:
        if name == TREE:
            with variant.shards.backward_of(shard):
                backward(variant, text, shard)
        else:
            backward(variant, text, shard)
    if name == TREE:
        variant.shards.reduce()
    else:
        rota.reduce_gradients(variant.model.parameters(), variant.state)
    variant.step_ms.append((time.perf_counter() - begin) * 1e3)
    variant.model.zero_grad()


COLUMNS: report.Columns = {
    "step": "{step_ms:.1f}",
    "more than\nautograd's": "{share_more:.1%}",
}


def main() -> None:
    parser = Parser(__doc__)
    turns.add_ranks(parser, 1)
    args = turns.parse_arguments(parser)
    with turns.job("logical_shards", args, backend="rota") as (run, console):
        torch.manual_seed(args.seed)
        initial = train_gpt.GPT(train_gpt.SCALES["cpu"].config)
        text, _ = train_gpt.read_corpus()
        variants = {name: Variant(initial) for name in LABELS}
        for name, steps in turns.in_turns(variants, args.steps, console):
            for _ in steps:
                take_step(name, variants[name], text)
        times = {name: turns.slowest_ranks(of.step_ms) for name, of in variants.items()}
        median = {name: statistics.median(step_ms) for name, step_ms in times.items()}
        rows = [
            {
                "variant": name,
                "label": LABELS[name],
                "step_ms": round(median[name], 3),
                "share_more": round(median[name] / median[PLAIN] - 1, 4),
                "step_ms_of_all": [round(value, 2) for value in step_ms],
            }
            for name, step_ms in times.items()
        ]
        title = f"a step of {NUM_SHARDS} logical shards, in ms (goal: {GOAL:.0%} more)"
        turns.publish(run, title, rows, COLUMNS)


if __name__ == "__main__":
    main()
