"""The performance targets for a GPU, compared with the rows of a run.

A target is met if its worst row meets it. It is None, "not measured", if no row applies. Rows with
wrong elements do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
LARGE_BYTES = 64 << 20
SMALL_BYTES = 8 << 10
BUILT = ("build", "passed")


def asked(rows: Sequence[Row], steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All targets and results, in the order of README's table."""
    right = [row for row in rows if not row.get("num_wrong")]
    builds = [(one["seconds"], "-") for one in steps if (one["name"], one["verdict"]) == BUILT]
    found = [_figure("the build, s", 180, builds, smaller_is_better=True)]
    for op in ("pack", "unpack"):
        for shape in ("1 tensor", "300 tensors"):
            mine = _rota(right, op, shape=shape)
            large = [row for row in mine if row["num_bytes"] >= LARGE_BYTES]
            what = f"{op}, {shape}, 64 MiB and more, of a copy's rate, the worst format"
            found.append(_figure(what, 0.92, _named(large, "of_copy")))
    torchs = {
        (row["num_bytes"], row["shape"]): row["p50_us"]
        for row in right
        if row["op"] == "fused turn" and row["api"] == "fp16_compress_hook"
    }
    for label in ("rota pack, unpack", "rota pack, unpack, clip in place"):
        speedups = [
            (torchs[key] / row["p50_us"], _name(row))
            for row in _rota(right, "fused turn", label=label)
            if (key := (row["num_bytes"], row["shape"])) in torchs
        ]
        found.append(_figure(f"{label}: times faster than torch's sequence", 3, speedups))
    for ranks in (2, 4):
        mine = _rota(right, "all_reduce", ranks=ranks, num_bytes=LARGE_BYTES)
        best = _best(_named(mine, "of_copy"), max)
        what = f"all-reduce of {ranks} local ranks, 64 MiB, of the memory's bound"
        found.append(_figure(what, 0.85, best))
    for ranks in (2, 4):
        mine = _rota(right, "all_reduce, one after another", ranks=ranks)
        sizes = {row["num_bytes"] for row in mine if row["num_bytes"] <= SMALL_BYTES}
        best = [
            one
            for size in sizes
            for one in _best(_named((r for r in mine if r["num_bytes"] == size), "p50_us"), min)
        ]
        what = f"all-reduce to 8 KiB of {ranks} local ranks in a CUDA graph, µs"
        found.append(_figure(what, 6, best, smaller_is_better=True))
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


def _best(
    values: list[tuple[float, str]], pick: Callable[..., tuple[float, str]]
) -> list[tuple[float, str]]:
    return [pick(values)] if values else []


def _name(row: Row) -> str:
    return f"{row['label']}, {row['num_bytes']} bytes"
