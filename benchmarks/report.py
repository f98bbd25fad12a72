"""Tables, the JSON record and the picture of a run. Knows nothing of how the numbers were taken.

GB is 1e9 bytes, times are in us. algbw is message bytes over the median time; busbw is algbw times
the factor of nccl-tests' doc/PERFORMANCE.md, which makes it comparable with a link's bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from interleave import Measurement

ROOFLINE = "memcpy"
BEST_MPI = "best MPI"

# Okabe and Ito's palette, which colour-blind readers can tell apart: a fixed colour and marker for
# each peer, warm ones for the entries of rota in turn.
PEER_STYLES = {
    "gloo": ("#0072B2", "^"),
    "openmpi": ("#009E73", "D"),
    "mpich": ("#56B4E9", "v"),
    "impi": ("#CC79A7", "P"),
}
ROTA_STYLES = (("#D55E00", "o"), ("#E69F00", "s"), ("#8C2D04", "X"), ("#F0C30F", "*"))


@dataclass(frozen=True)
class Ratio:
    """How many times faster one entry of rota is than a peer, by median times at one size."""

    num_bytes: int
    entry: str
    peer: str
    against: str
    speedup: float


def busbw_factor(op: str, num_ranks: int) -> float:
    """busbw over algbw (nccl-tests, doc/PERFORMANCE.md)."""
    match op:
        case "broadcast":
            return 1.0
        case "all_gather":
            return (num_ranks - 1) / num_ranks
    return 2 * (num_ranks - 1) / num_ranks  # all_reduce, and the hooks that are made of one


def speedups(measurements: Sequence[Measurement], mpi_names: Iterable[str]) -> list[Ratio]:
    """Every entry of rota against Gloo, the best MPI and the memcpy roofline, at every size."""
    groups = {"gloo": {"gloo"}, BEST_MPI: set(mpi_names), ROOFLINE: {ROOFLINE}}
    ratios = []
    for num_bytes, at_size in groupby(measurements, key=lambda result: result.num_bytes):
        results = list(at_size)
        for ours in (result for result in results if result.entry.backend == "rota"):
            for against, backends in groups.items():
                peers = [result for result in results if result.entry.backend in backends]
                if not peers:
                    continue
                best = min(peers, key=lambda result: result.p50_us)
                ratios.append(
                    Ratio(
                        num_bytes,
                        ours.entry.label,
                        best.entry.label,
                        against,
                        best.p50_us / ours.p50_us,
                    )
                )
    return ratios


def nested(ratios: Sequence[Ratio]) -> dict[str, dict[str, dict[int, float]]]:
    """The speed-ups as {entry: {against: {num_bytes: speed-up}}}."""
    tree: dict[str, dict[str, dict[int, float]]] = {}
    for ratio in ratios:
        by_size = tree.setdefault(ratio.entry, {}).setdefault(ratio.against, {})
        by_size[ratio.num_bytes] = float(f"{ratio.speedup:.4g}")
    return tree


def row(result: Measurement, num_ranks: int | None) -> dict[str, Any]:
    """One measurement as it stands in the JSON record; without busbw if `num_ranks` is None."""
    algbw = result.num_bytes / result.p50_us / 1e3 if result.num_bytes else None
    busbw = None
    if algbw is not None and num_ranks is not None and result.entry.label != ROOFLINE:
        busbw = algbw * busbw_factor(result.op, num_ranks)
    return {
        **asdict(result.entry),
        "op": result.op,
        "num_bytes": result.num_bytes,
        "num_elems": result.num_elems,
        "batch": result.batch,
        "num_samples": len(result.times_us),
        "p50_us": round(result.p50_us, 3),
        "min_us": round(result.min_us, 3),
        "p99_us": round(result.p99_us, 3),
        "algbw_gb_per_s": algbw and round(algbw, 6),
        "busbw_gb_per_s": busbw and round(busbw, 6),
        "num_wrong": result.num_wrong,
    }


def print_times(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One line per size and entry."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("p50 us", "min us", "p99 us", "algbw GB/s", "busbw GB/s", "#wrong", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for num_bytes, at_size in groupby(rows, key=lambda row: row["num_bytes"]):
        for cells in at_size:
            table.add_row(
                format_bytes(num_bytes),
                cells["label"],
                *(format_time(cells[key]) for key in ("p50_us", "min_us", "p99_us")),
                *(_bandwidth(cells[key]) for key in ("algbw_gb_per_s", "busbw_gb_per_s")),
                _wrong(cells["num_wrong"]),
                str(cells["batch"]),
            )
        table.add_row()
    console.print(table)
    console.print(
        "[dim]Times are of one call on the slowest rank. A sample is `batch` calls in a row, "
        "divided by `batch`: above 1, min and p99 are of such means.[/dim]\n",
        soft_wrap=True,
    )


def print_speedups(console: Console, ratios: Sequence[Ratio]) -> None:
    """One line per size and entry of rota: how many times faster than each peer."""
    if not ratios:
        return
    peers = list(dict.fromkeys(ratio.against for ratio in ratios))
    console.print("peer's time / rota's time: above 1, rota is faster")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("entry", no_wrap=True)
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
    for num_bytes, at_size in groupby(ratios, key=lambda ratio: ratio.num_bytes):
        for entry, of_entry in groupby(at_size, key=lambda ratio: ratio.entry):
            cells = {ratio.against: _speedup(ratio) for ratio in of_entry}
            table.add_row(format_bytes(num_bytes), entry, *(cells[peer] for peer in peers))
    console.print(table)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes the record of one run, one measurement a line, so that records can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lists = {key: value for key, value in record.items() if isinstance(value, list)}
    head = {key: value for key, value in record.items() if key not in lists}
    parts = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
    for key, values in lists.items():
        lines = ",\n".join(f"    {json.dumps(value)}" for value in values)
        parts.append(f'  "{key}": [\n{lines}\n  ]' if values else f'  "{key}": []')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def draw(path: Path, measurements: Sequence[Measurement], title: str, subtitle: str) -> None:
    """The picture: median time over message size, both axes logarithmic."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")  # draws with Agg: needs no display
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(result.entry.label for result in measurements))
    rota_styles = cycle(ROTA_STYLES)
    for label in labels:
        points = [result for result in measurements if result.entry.label == label]
        sizes = [point.num_bytes for point in points]
        times_us = [point.p50_us for point in points]
        if label == ROOFLINE:
            axes.plot(sizes, times_us, "--", color="black", linewidth=1, label="memcpy (roofline)")
        else:
            backend = points[0].entry.backend
            colour, marker = next(rota_styles) if backend == "rota" else PEER_STYLES[backend]
            axes.plot(sizes, times_us, color=colour, marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _label_sizes(axes, sorted({result.num_bytes for result in measurements}))
    axes.set_xlabel("message size (bytes; K = 1024)")
    axes.set_ylabel("time of one call, slowest rank, median (µs)")
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes.set_title(subtitle, fontsize=8, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    every = -(-len(sizes) // 14)  # more labels than this overlap
    axes.set_xticks(sizes[::every], [format_bytes(size) for size in sizes[::every]])
    axes.minorticks_off()


def format_bytes(num_bytes: int) -> str:
    """4, 64K, 1M: as on the command line."""
    if num_bytes == 0:
        return "-"
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return str(num_bytes)


def format_time(time_us: float) -> str:
    """Four digits of µs."""
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"


def _bandwidth(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else f"{gb_per_s:.3f}"


def _wrong(num_wrong: int | None) -> str:
    if num_wrong is None:
        return "-"
    return f"[bold red]{num_wrong}[/bold red]" if num_wrong else "0"


def _speedup(ratio: Ratio) -> str:
    name = f"{ratio.peer} " if ratio.against == BEST_MPI else ""
    return f"{name}{ratio.speedup:.3g}"
