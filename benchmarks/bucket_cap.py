"""Time of a DDP step with rota's fused hook, by DDP's bucket_cap_mb.

    python benchmarks/bucket_cap.py --models gpt,many_small,few_large

A step is forward, backward overlapped with communication, and AdamW's update, in float32 with
float16 on the wire. Small buckets start earlier, but every bucket has a fixed cost. The caps take
turns within one run. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ddp_turn
import driver
import interleave
from arguments import FLOAT32_BYTES, Parser, add_common_arguments, parse_list, plan_of
from interleave import Measurement
from protocol import Entry


def parse_caps(text: str) -> list[float]:
    """An argparse type: MiB of "0.5,1,25"."""
    try:
        caps = [float(cap) for cap in text.split(",")]
    except ValueError:
        caps = []
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise argparse.ArgumentTypeError(f"{text!r}; expected MiB such as 0.5,1,25")
    return caps


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    models = list(ddp_turn.MODELS)
    parser.add_argument(
        "--models",
        type=parse_list(models),
        default=",".join(models),
        help="what to train (default: %(default)s)",
    )
    parser.add_argument(
        "--caps",
        type=parse_caps,
        default="1,2,4,8,16,25,50,100",
        metavar="MIB,...",
        help="bucket_cap_mb (default: %(default)s)",
    )
    add_common_arguments(parser)
    # A step takes about 100 ms; DDP makes its final buckets after the first one.
    parser.set_defaults(iters=5, warmup=2, repeats=3)
    args = parser.parse_args()
    if args.check:
        parser.error("--check: the result of a step is not checked")
    return args


def rows_of(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per model and cap: the step time, and how much longer it is than the best cap's."""
    rows = []
    for model, of_model in groupby(measurements, key=lambda result: result.op):
        results = list(of_model)
        best_us = min(result.p50_us for result in results)
        rows += [
            {
                "model": model,
                "gradient_bytes": result.num_bytes,
                "bucket_cap_mb": result.entry.bucket_cap_mb,
                "num_samples": len(result.times_us),
                "p50_us": round(result.p50_us, 1),
                "min_us": round(result.min_us, 1),
                "p99_us": round(result.p99_us, 1),
                "over_best": round(result.p50_us / best_us - 1, 4),
            }
            for result in results
        ]
    return rows


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per cap, one column per model."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("bucket_cap_mb", justify="right", no_wrap=True)
    for model in dict.fromkeys(row["model"] for row in rows):
        table.add_column(model, justify="right", no_wrap=True)
    for cap in dict.fromkeys(row["bucket_cap_mb"] for row in rows):
        cells = [row for row in rows if row["bucket_cap_mb"] == cap]
        texts = (f"{cell['p50_us'] / 1e3:.2f} +{cell['over_best']:.1%}" for cell in cells)
        table.add_row(f"{cap:g}", *texts)
    console.print("ms per step on the slowest rank, median, and what it is beyond the best cap's")
    console.print(table)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: starts ranks, measures every model, prints, writes and sums up."""
    run = driver.Run("bucket_cap", "bucket_cap", args.ranks, args)
    measurements = []
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        group = driver.torch_ranks(args, ["rota"], Path(folder))
        with driver.running([group]):
            caps = [
                Entry(f"{cap:g} MiB", "rota", ddp_turn.DDP_STEP, bucket_cap_mb=cap)
                for cap in args.caps
            ]
            entries = driver.drop_missing(run, caps, group)
            for model in args.models if entries else []:
                num_elems = ddp_turn.num_parameters(model)
                num_bytes = num_elems * FLOAT32_BYTES
                measurements += interleave.measure(
                    entries, group.ask, model, "float32", num_elems, num_bytes, plan_of(args)
                )
    rows = rows_of(measurements)
    run.write_record({"steps": rows})
    print_table(run.console, rows)
    best = {row["model"]: row["bucket_cap_mb"] for row in rows if row["over_best"] == 0}
    return {"benchmark": "bucket_cap", "json": str(run.json_path), "best_bucket_cap_mb": best}


def main() -> int:
    """Returns the exit status: 0 if everything was measured."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
