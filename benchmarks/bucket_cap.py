"""Time of a DDP step with rota's fused hook, by DDP's bucket_cap_mb.

    python benchmarks/bucket_cap.py --models gpt,many_small,few_large

A step is forward, backward overlapped with communication, and AdamW's update, in float32 with
float16 on the wire. Small buckets start earlier, but every bucket has a fixed cost. The caps take
turns within one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import ddp_turn
import report
from arguments import Parser, add_common_arguments, parse_each, parse_list
from interleave import Measurement, measure
from protocol import Entry
from record import Run
from torch_worker import start_torch_ranks
from workers import Workers


def parse_cap(text: str) -> float:
    """An argparse type: MiB."""
    try:
        cap = float(text)
    except ValueError:
        cap = 0.0
    if not 0 < cap < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected MiB such as 0.5,1,25")
    return cap


def rows_of(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per model and cap: the step time, and how much longer it is than the best cap's."""
    rows = []
    for _, of_model in groupby(measurements, key=lambda result: result.op):
        results = list(of_model)
        best_us = min(result.p50_us for result in results)
        rows += [
            report.row(result, None) | {"over_best": round(result.p50_us / best_us - 1, 4)}
            for result in results
        ]
    return rows


def main() -> None:
    parser = Parser(__doc__)
    models = list(ddp_turn.MODELS)
    parser.add("--models", type=parse_list(models), default=",".join(models), help="to train")
    caps = "1,2,4,8,16,25,50,100"
    parser.add("--caps", type=parse_each(parse_cap), default=caps, help="bucket_cap_mb")
    add_common_arguments(parser)
    # A step takes about 100 ms; DDP makes its final buckets after the first one.
    parser.set_defaults(iters=5, warmup=2, repeats=3)
    args = parser.parse_args()
    if args.check:
        parser.error("--check: the result of a step is not checked")

    with Run("bucket_cap", args.ranks, args) as run, Workers(args.timeout) as ranks:
        entries = [
            Entry(f"{cap:g} MiB", "rota", ddp_turn.DDP_STEP, bucket_cap_mb=cap) for cap in args.caps
        ]
        entries, _ = start_torch_ranks(ranks, run, args.ranks, entries)
        measurements = []
        for model in args.models if entries else []:
            num_elems = ddp_turn.num_parameters(model)
            measurements += measure(entries, ranks.ask, model, num_elems, args)
        rows = rows_of(measurements)
        by_model = {model: [r for r in rows if r["op"] == model] for model in args.models}
        lines = [
            (f"{cap:g}", *(f"{c['p50_us'] / 1e3:.2f} +{c['over_best']:.1%}" for c in cells))
            for cap, *cells in zip(args.caps, *by_model.values(), strict=True)
        ]
        title = "ms per step on the slowest rank, median, and what it is beyond the best cap's"
        report.print_table(run.console, title, ("bucket_cap_mb", *by_model), lines)
        best = {row["op"]: row["bucket_cap_mb"] for row in rows if row["over_best"] == 0}
        run.finish({"steps": rows}, best_bucket_cap_mb=best)


if __name__ == "__main__":
    main()
