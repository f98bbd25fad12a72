"""The performance targets for a GPU, compared with the rows of a run.

A target is met if its worst row meets it. It is None, "not measured", if no row applies. Rows with
wrong elements do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
LARGE_BYTES = 64 << 20
# The goals of the fused turn: rota's entry, the one that it is compared with, and how many times
# faster it is to be.
SPEEDUPS = (
    ("rota pack, unpack", "torch hook, unscale, clip", 3),
    ("rota pack, unpack, clip in place", "torch hook, unscale, clip", 3),
    ("rota pack, unpack", "torch.compile: cast, unscale, norm", 1),
)


def asked(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All targets and results, in the order of the table of docs/cuda.md."""
    right = [row for row in rows if not row.get("num_wrong")]
    found = []
    for op in ("pack", "unpack"):
        for shape in ("1 tensor", "300 tensors"):
            mine = _rota(right, op, shape=shape)
            large = [row for row in mine if row["num_bytes"] >= LARGE_BYTES]
            what = f"{op}, {shape}, 64 MiB and more, of a copy's rate, the worst format"
            found.append(_figure(what, 0.92, _named(large, "of_copy")))
    turns = [row for row in right if row["op"] == "fused turn"]
    for label, rival, bound in SPEEDUPS:
        rivals = {row["num_bytes"]: row["p50_us"] for row in turns if row["label"] == rival}
        speedups = [
            (rivals[row["num_bytes"]] / row["p50_us"], _name(row))
            for row in turns
            if row["label"] == label and row["num_bytes"] in rivals
        ]
        found.append(_figure(f"{label}: times faster than {rival}", bound, speedups))
    for ranks in (2, 4):
        waiting = _rota(right, "all_reduce, one after another", ranks=ranks)
        small = [row for row in waiting if row["algorithm"] == "low_latency"]
        what = f"low_latency to 8 KiB of {ranks} local ranks in a CUDA graph, µs"
        found.append(_figure(what, 6, _named(small, "p50_us"), smaller_is_better=True))
    shares = _named(_rota(right, "all_reduce", ranks=2), "of_copy")
    found.append(_figure("all_reduce of 2 local ranks, of a copy's rate", 0.85, shares))
    return found


def _figure(
    what: str, bound: float, values: Sequence[tuple[float, str]], smaller_is_better: bool = False
) -> dict[str, Any]:
    words = "at most" if smaller_is_better else "at least"
    figure: Row = {"what": what, "asked": f"{words} {bound:g}", "got": "not measured", "met": None}
    if values:
        worst, row = (max if smaller_is_better else min)(values)
        is_met = worst <= bound if smaller_is_better else worst >= bound
        figure |= {"got": f"{worst:.3g}", "met": is_met, "row": row}
    return figure


def _rota(rows: Iterable[Row], op: str, **fields: object) -> list[Row]:
    wanted = {"op": op, "backend": "rota", **fields}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _named(rows: Iterable[Row], key: str) -> list[tuple[float, str]]:
    return [(row[key], _name(row)) for row in rows if key in row]


def _name(row: Row) -> str:
    return f"{row['label']}, {row['num_bytes']} bytes"
