"""The mixed-precision turn on one bucket: rota's fused hook, torch's hook and torch's AMP.

    python benchmarks/fused.py --sizes 25M,64M --ranks 2 -c

Times a step's work on a float32 bucket made by DDP, from the hook to clipped gradients:
`hook(state, bucket).wait()`, GradScaler.unscale_ with its Inf check, and clip_grad_norm_ of a
gradient above max_norm. amp_turn.py describes the values. The base of the last ratio is rota's
float32 hook with nothing after it. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

import amp_turn
import driver
import traffic
from arguments import Parser, add_bucket_sizes, add_common_arguments
from interleave import Measurement
from protocol import Entry

BASE = "rota float32 allreduce_hook, alone"
# Label, backend, api and wire dtype of each entry.
ENTRIES = [
    Entry(label, backend, api, wire_dtype=wire_dtype)
    for label, backend, api, wire_dtype in (
        ("rota fused float16", "rota", amp_turn.FUSED, "float16"),
        ("rota fused float16, unscaled", "rota", amp_turn.FUSED_UNSCALED, "float16"),
        ("rota fused bfloat16", "rota", amp_turn.FUSED, "bfloat16"),
        ("rota fused float8_e4m3fn", "rota", amp_turn.FUSED, "float8_e4m3fn"),
        ("rota fused float8_e5m2", "rota", amp_turn.FUSED, "float8_e5m2"),
        ("rota fused float32", "rota", amp_turn.FUSED, "float32"),
        ("rota fused float16, clip in place", "rota", amp_turn.FUSED_IN_PLACE, "float16"),
        ("rota fp16 hook, torch amp", "rota", amp_turn.ROTA_HOOK_TORCH_AMP, "float16"),
        ("torch fp16 hook on rota, torch amp", "rota", amp_turn.TORCH_AMP, "float16"),
        ("torch fp16 hook on gloo, torch amp", "gloo", amp_turn.TORCH_AMP, "float16"),
        (BASE, "rota", amp_turn.HOOK_ALONE, "float32"),
    )
]


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    add_bucket_sizes(parser)
    add_common_arguments(parser)
    parser.set_defaults(iters=10, warmup=2)  # a turn takes tens of ms
    return parser.parse_args()


def bytes_per_element(entry: Entry, num_ranks: int) -> float:
    """The entry's memory traffic, as counted by traffic.py."""
    wire = amp_turn.wire_of(entry)
    elem_bytes = wire.dtype.itemsize
    if entry.api == amp_turn.HOOK_ALONE:
        return traffic.rota_all_reduce(elem_bytes, num_ranks)
    if entry.api == amp_turn.TORCH_AMP:
        on_gloo = entry.backend == "gloo"
        all_reduce = traffic.gloo_all_reduce if on_gloo else traffic.rota_all_reduce
        hook = traffic.torch_hook(elem_bytes, all_reduce(elem_bytes, num_ranks))
        return hook + traffic.TORCH_AMP
    scale_bytes = 1 / wire.block_elems if wire.block_elems else 0.0
    hook = traffic.rota_fused(elem_bytes + scale_bytes, num_ranks)
    after = {amp_turn.ROTA_HOOK_TORCH_AMP: traffic.TORCH_AMP, amp_turn.FUSED_IN_PLACE: traffic.CLIP}
    return hook + after.get(entry.api, 0)


def compare(measurements: Sequence[Measurement], num_ranks: int) -> list[dict[str, Any]]:
    """One row per size and entry: memory traffic, and time relative to rota's float32 hook."""
    rows = []
    for _, at_size in groupby(measurements, key=lambda result: result.num_bytes):
        results = list(at_size)
        base_us = {result.entry.label: result.p50_us for result in results}.get(BASE)
        rows += [
            {
                "label": result.entry.label,
                "num_bytes": result.num_bytes,
                "traffic_bytes_per_elem": round(bytes_per_element(result.entry, num_ranks), 3),
                "p50_us": round(result.p50_us, 3),
                "over_float32_all_reduce": base_us and round(result.p50_us / base_us, 4),
            }
            for result in results
        ]
    return rows


def print_comparison(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per entry; its time over that of BASE at each size."""
    sizes = sorted({row["num_bytes"] for row in rows})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("entry", no_wrap=True)
    table.add_column("traffic B/elem", justify="right", no_wrap=True)
    for num_bytes in sizes:
        table.add_column(f"x base, {num_bytes / 2**20:g}M", justify="right", no_wrap=True)
    for label, of_entry in groupby(sorted(rows, key=by_entry), key=lambda row: row["label"]):
        cells = list(of_entry)
        ratios = [cell["over_float32_all_reduce"] for cell in cells]
        table.add_row(
            label,
            f"{cells[0]['traffic_bytes_per_elem']:.2f}",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    console.print("\nmemory traffic by traffic.py, and time / that of rota's float32 hook alone")
    console.print(table)


def by_entry(row: dict[str, Any]) -> tuple[int, int]:
    """Sort key: the order of ENTRIES, then size."""
    labels = [entry.label for entry in ENTRIES]
    return labels.index(row["label"]), row["num_bytes"]


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: starts ranks, measures every size, prints, writes and sums up."""
    run = driver.Run("fused", "fused", args.ranks, args)
    measurements, group = driver.measure_buckets(run, args, ENTRIES, "mixed_precision_turn")
    rows = compare(measurements, args.ranks)
    summary = run.publish(measurements, [group], mpis=[], more={"comparison": rows})
    print_comparison(run.console, rows)
    ratios: dict[str, dict[int, float]] = {}
    for row in rows:
        ratios.setdefault(row["label"], {})[row["num_bytes"]] = row["over_float32_all_reduce"]
    return summary | {"over_float32_all_reduce": ratios}


def main() -> int:
    """Returns the exit status: 0 if everything was measured and no result was wrong."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
