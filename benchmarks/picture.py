"""The picture of a run. Separate from report.py, which must work without matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import report
from interleave import Measurement
from protocol import FAKE_AND_BARRIER

# Okabe and Ito's palette, which colour-blind readers can distinguish: a fixed colour and marker for
# each peer; entries of rota use the warm colours in turn.
PEER_STYLES = {
    "gloo": ("#0072B2", "^"),
    "openmpi": ("#009E73", "D"),
    "mpich": ("#56B4E9", "v"),
    "impi": ("#CC79A7", "P"),
    "fake": ("#7F7F7F", "x"),
    FAKE_AND_BARRIER: ("#7F7F7F", "+"),
}
ROTA_STYLES = (("#D55E00", "o"), ("#E69F00", "s"), ("#8C2D04", "X"), ("#F0C30F", "*"))


def draw(path: Path, measurements: Sequence[Measurement], title: str, subtitle: str) -> None:
    """Draws median time over message size, both axes logarithmic."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")  # draws with Agg: needs no display
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(result.entry.label for result in measurements))
    rota_styles = cycle(ROTA_STYLES)
    for label in labels:
        points = [result for result in measurements if result.entry.label == label]
        sizes = [point.num_bytes for point in points]
        times_us = [point.p50_us for point in points]
        if label == report.ROOFLINE:
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
    axes.set_xticks(sizes[::every], [report.format_bytes(size) for size in sizes[::every]])
    axes.minorticks_off()
