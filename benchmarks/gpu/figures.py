"""What issue 5 asks of a GPU, beside what the rows of a run have: asked and got.

A figure is met if its worst row is. It is None, "not measured", where no row tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpu.frame import COPY
from gpu.gradients import MANY

Row = dict[str, Any]
LARGE_BYTES = 64 << 20
SMALL_BYTES = 8 << 10

PACK_OF_COPY = 0.92
NUM_LAUNCHES = 1
FUSED_SPEEDUP = 3.0
LOCAL_OF_BOUND = 0.85
SMALL_US = 6.0


@dataclass(frozen=True)
class Figure:
    """One line of the issue: what is asked, what came, by which row."""

    what: str
    asked: str
    got: str
    is_met: bool | None
    row: str


def figures(rows: Sequence[Row]) -> list[Figure]:
    """All of them, in the order of the issue."""
    return [
        *(
            _of_copy(rows, op, shape)
            for op in ("pack", "unpack")
            for shape in ("1 tensor", _many())
        ),
        *(_launches(rows, op) for op in ("pack", "unpack")),
        *(_fused(rows, f"rota pack, unpack{suffix}") for suffix in ("", ", clip in place")),
        *(_local(rows, ranks) for ranks in (2, 4)),
        *(_small(rows, ranks) for ranks in (2, 4)),
    ]


def as_dicts(found: Iterable[Figure], is_dry: bool) -> list[dict[str, Any]]:
    """As they stand in the record; of a dry run none is met or missed."""
    if is_dry:
        found = [
            f if f.is_met is None else replace(f, got=f"made up: {f.got}", is_met=None)
            for f in found
        ]
    return [asdict(figure) for figure in found]


def _many() -> str:
    return f"{MANY} tensors"


def _rota(rows: Sequence[Row], op: str, **fields: object) -> list[Row]:
    return [
        row
        for row in rows
        if row.get("op") == op
        and row.get("backend") == "rota"
        and all(row.get(key) == value for key, value in fields.items())
    ]


def _name(row: Row) -> str:
    ranks = f", {row['ranks']} ranks" if row.get("ranks") else ""
    shape = f", {row['shape']}" if row.get("shape") else ""
    return f"{row['label']}, {row['num_bytes']} bytes{shape}{ranks}"


def _worst(
    what: str,
    asked: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    show: Callable[[float], str],
    is_met: Callable[[float], bool],
    best_of: Callable[[Row], object] | None = None,
) -> Figure:
    """By the row with the worst value; of rows that are alike by `best_of`, by their best one.

    Whatever was wrong is not counted as measured: a quick wrong result is no result.
    """
    found = [(v, row) for row in rows if (v := value(row)) is not None and not row.get("num_wrong")]
    smaller_is_better = is_met(0.0)
    if best_of is not None:
        alike: dict[object, tuple[float, Row]] = {}
        for one in found:
            best = alike.get(key := best_of(one[1]))
            if best is None or (one[0] < best[0]) == smaller_is_better:
                alike[key] = one
        found = list(alike.values())
    if not found:
        return Figure(what, asked, "not measured", None, "-")
    pick = max if smaller_is_better else min
    worst, row = pick(found, key=lambda one: one[0])
    return Figure(what, asked, show(worst), is_met(worst), _name(row))


def _of_copy(rows: Sequence[Row], op: str, shape: str) -> Figure:
    large = [row for row in _rota(rows, op, shape=shape) if row["num_bytes"] >= LARGE_BYTES]
    return _worst(
        f"{op}, {shape}, 64 MiB and more: of the rate of a copy of as many bytes, the worst format",
        f"at least {PACK_OF_COPY:.0%}",
        large,
        lambda row: row.get("of_copy"),
        lambda share: f"{share:.1%}",
        lambda share: share >= PACK_OF_COPY,
    )


def _launches(rows: Sequence[Row], op: str) -> Figure:
    return _worst(
        f"{op} of {MANY} tensors of mixed sizes: kernels launched",
        f"{NUM_LAUNCHES}",
        _rota(rows, op, shape=_many()),
        lambda row: row.get("launches"),
        lambda launches: f"{launches:.0f}",
        lambda launches: launches <= NUM_LAUNCHES,
    )


def _fused(rows: Sequence[Row], label: str) -> Figure:
    op = "mixed precision"
    torchs = {
        (row["num_bytes"], row.get("shape")): row["p50_us"]
        for row in rows
        if row.get("op") == op and row.get("backend") == "torch" and row["label"] != COPY
    }

    def speedup(row: Row) -> float | None:
        torch_us = torchs.get((row["num_bytes"], row.get("shape")))
        return torch_us / row["p50_us"] if torch_us is not None else None

    return _worst(
        f"{label}: times faster than torch's hook, unscale, Inf check, norm and clip",
        f"at least {FUSED_SPEEDUP:g}",
        _rota(rows, op, label=label),
        speedup,
        lambda ratio: f"{ratio:.2f}",
        lambda ratio: ratio >= FUSED_SPEEDUP,
    )


def _local(rows: Sequence[Row], ranks: int) -> Figure:
    return _worst(
        f"local-rank all-reduce, {ranks} ranks, 64 MiB each: of the bound 2·N·S over the copy rate,"
        " the best algorithm",
        f"at least {LOCAL_OF_BOUND:.0%}",
        _rota(rows, "all_reduce", ranks=ranks, num_bytes=LARGE_BYTES),
        lambda row: row.get("of_copy"),
        lambda share: f"{share:.1%}",
        lambda share: share >= LOCAL_OF_BOUND,
        best_of=lambda row: row["num_bytes"],
    )


def _small(rows: Sequence[Row], ranks: int) -> Figure:
    op = "all_reduce, one after another"
    small = [row for row in _rota(rows, op, ranks=ranks) if row["num_bytes"] <= SMALL_BYTES]
    return _worst(
        f"all-reduce to 8 KiB, {ranks} local ranks, in a CUDA graph: launch to completion, the best"
        " algorithm",
        f"at most {SMALL_US:g} µs",
        small,
        lambda row: row["p50_us"],
        lambda time_us: f"{time_us:.2f} µs",
        lambda time_us: time_us <= SMALL_US,
        best_of=lambda row: row["num_bytes"],
    )
