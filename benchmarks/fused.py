"""The mixed-precision turn on one bucket: rota's fused hook, torch's hook and torch's AMP.

    python benchmarks/fused.py --sizes 25M,64M --ranks 2 -c
    python benchmarks/fused.py --hook fp16_compress_hook -c

Times a step's work on a float32 bucket made by DDP, from the hook to clipped gradients:
`hook(state, bucket).wait()`, GradScaler.unscale_ with its Inf check, and clip_grad_norm_ of a
gradient above max_norm. amp_turn.py describes the values. The base of the last ratio is rota's
float32 hook with nothing after it.

With --hook the hook alone is timed, rota's and torch's of the same name. torch's hook runs on Gloo
and, to show the effect of the backend alone, on rota.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import amp_turn
import hook_turn
import traffic
from arguments import FLOAT32_BYTES, Parser, add_common_arguments, parse_bucket_sizes
from interleave import Measurement, measure_sizes
from protocol import Entry
from record import Run
from report import optional, print_table
from torch_worker import start_torch_ranks
from workers import Workers

TURN = "mixed_precision_turn"
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

HOOKS = ("fp16_compress_hook", "bf16_compress_hook", "allreduce_hook")
HOOK_ENTRIES = [
    Entry("rota hook", "rota", hook_turn.ROTA_HOOK),
    Entry("torch hook on rota", "rota", hook_turn.TORCH_HOOK),
    Entry("torch hook on gloo", "gloo", hook_turn.TORCH_HOOK),
]


def bytes_per_element(entry: Entry, num_ranks: int) -> float:
    wire = amp_turn.wire_of(entry)
    elem_bytes = wire.dtype.itemsize
    if entry.api == amp_turn.HOOK_ALONE:
        return traffic.rota_all_reduce(elem_bytes, num_ranks)
    if entry.api == amp_turn.TORCH_AMP:
        on_gloo = entry.backend == "gloo"
        all_reduce = traffic.gloo_all_reduce if on_gloo else traffic.rota_all_reduce
        hook = traffic.torch_hook(elem_bytes, all_reduce(elem_bytes, num_ranks))
        return hook + traffic.TORCH_AMP
    hook = traffic.rota_fused(wire.elem_bytes, num_ranks)
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


def print_comparison(run: Run, rows: Sequence[dict[str, Any]]) -> None:
    sizes = sorted({row["num_bytes"] for row in rows})
    lines = []
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = {row["num_bytes"]: row for row in rows if row["label"] == label}
        traffic_per_elem = cells[sizes[0]]["traffic_bytes_per_elem"]
        ratios = [optional(cells[size]["over_float32_all_reduce"], ".2f") for size in sizes]
        lines.append((label, f"{traffic_per_elem:.2f}", *ratios))
    headings = ("entry", "B/elem", *(f"x base, {num_bytes / 2**20:g}M" for num_bytes in sizes))
    title = "memory traffic by traffic.py, and time over that of rota's float32 hook alone"
    print_table(run.console, title, headings, lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--hook", choices=HOOKS, help="what to time alone")
    parser.add("--sizes", type=parse_bucket_sizes, default="25M,64M", help="of buckets")
    add_common_arguments(parser)
    parser.set_defaults(iters=10, warmup=2)  # a turn takes tens of ms
    args = parser.parse_args()

    with Run("fused", args.ranks, args, args.hook or "") as run, Workers(args.timeout) as ranks:
        if args.hook and args.check and args.ranks.bit_count() != 1:
            run.note(f"averages over {args.ranks} ranks are not exact: results are not checked")
        chosen = HOOK_ENTRIES if args.hook else ENTRIES
        entries, versions = start_torch_ranks(ranks, run, args.ranks, chosen)
        elems = [num_bytes // FLOAT32_BYTES for num_bytes in args.sizes]
        measurements = measure_sizes(entries, ranks.ask, args.hook or TURN, elems, args)
        libraries = {"torch": versions}
        if args.hook:
            return run.publish(measurements, libraries)
        rows = compare(measurements, args.ranks)
        print_comparison(run, rows)
        run.publish(measurements, libraries, more={"comparison": rows}, comparison=rows)


if __name__ == "__main__":
    main()
