"""The table and picture that demo.py shows at its end. Independent of how numbers were taken."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

import report

SMOOTHING_STEPS = 20  # one step's batch is small and its loss noisy
RIVALS = tuple(
    (ours, theirs + of_hook)
    for theirs in ("gloo", "nccl")
    for ours, of_hook in (("rota", ""), ("rota_fp16", "_fp16"), ("rota_fused", "_fp16"))
)
UNDISTURBED = 0.95  # share of a core


@dataclass(frozen=True)
class Result:
    """One variant's results over all ranks. Losses are in bits per byte."""

    label: str
    color: str
    losses: list[float]  # by step, mean over ranks
    held_out: list[tuple[int, float]]  # (steps done, bits per byte)
    step_ms: list[float]  # by step, slowest rank
    spread: float  # largest difference of a parameter between two ranks
    sent_bytes: float  # per step, by the host that sends most; 0 on a single host
    core_share: float | None  # lowest CPU time over wall time of any rank; on the CPU


def summarize(results: dict[str, Result]) -> dict[str, dict[str, float]]:
    """One row per variant: its median step, what that takes beyond the one of "none", the run
    without communication, and its losses."""
    base_ms = statistics.median(results["none"].step_ms)
    rows = {}
    for name, result in results.items():
        p50_ms = statistics.median(result.step_ms)
        rows[name] = {
            "ms_per_step": p50_ms,
            "communication_ms": p50_ms - base_ms,
            "communication_share": (p50_ms - base_ms) / p50_ms,
            "final_loss": statistics.fmean(result.losses[-SMOOTHING_STEPS:]),
            "held_out_bits": result.held_out[-1][1],
            "max_parameter_difference": result.spread,
        }
    return rows


COLUMNS: report.Columns = {
    "variant": "{label}",
    "ms per\nstep": "{ms_per_step:.1f}",
    "communi-\ncation ms": "{communication_ms:.1f}",
    "share\nof step": "{communication_share:.1%}",
    "final\nloss": "{final_loss:.3f}",
    "held\nout": "{held_out_bits:.3f}",
    "max diff.\nof ranks": "{max_parameter_difference:.2g}",
}


def print_table(results: dict[str, Result], console: Console) -> None:
    rows = summarize(results)
    labelled = [{"label": results[name].label, **row} for name, row in rows.items()]
    title = "times: median of the slowest rank; losses: bits per byte"
    report.print_columns(console, title, labelled, COLUMNS)
    for ours, theirs in RIVALS:
        shares = [rows[name]["communication_share"] for name in (ours, theirs) if name in rows]
        if len(shares) == 2 and shares[1] > 0:
            console.print(
                f"communication's share of a step: {results[ours].label} = "
                f"{shares[0] / shares[1]:.2f} x {results[theirs].label}",
                soft_wrap=True,
            )
    core_share = results["none"].core_share  # never waits: below 1, other work had the core
    if core_share is not None and core_share < UNDISTURBED:
        console.print(
            f"a rank had only {core_share:.0%} of a core: other work on this machine disturbs "
            "these times",
            soft_wrap=True,
        )


def draw(results: dict[str, Result], baseline_bits: float, path: Path, note: str = "") -> None:
    """Writes a PNG with loss curves on the left and step times on the right."""
    with picture(path, note, 2, width_ratios=(1.2, 1)) as (curves, bars):
        draw_curves(curves, results, baseline_bits)
        draw_step_times(bars, results)


@contextmanager
def picture(path: Path, note: str, num_panels: int, **options: Any) -> Iterator[Sequence[Axes]]:
    """Yields panels side by side, by Figure.subplots' options; then writes them, with `note` above,
    as a PNG."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, num_panels, squeeze=False, **options)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    yield panels
    if note:
        figure.suptitle(note, fontsize=8, x=0.01, ha="left", wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_curves(axes: Axes, results: dict[str, Result], baseline_bits: float) -> None:
    # Curves of variants with equal sums overlap: earlier ones are wider and show at the edges.
    for line, result in enumerate(results.values()):
        axes.plot(
            smooth(result.losses), color=result.color, lw=len(results) - line, label=result.label
        )
    axes.axhline(baseline_bits, color="black", lw=1, ls=":")
    axes.annotate(
        f"order-0 baseline {baseline_bits:.2f}",
        (1, baseline_bits),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
    )
    axes.set_title(f"Training loss, mean of {SMOOTHING_STEPS} steps")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(top=1.25 * baseline_bits)  # cuts off the first steps, which start at 8
    axes.legend(frameon=False)


def draw_step_times(axes: Axes, results: dict[str, Result]) -> None:
    rows = summarize(results)
    for position, (name, row) in enumerate(rows.items()):
        # In a slow minute of the base run, a step with communication may seem faster: no block.
        visible_ms = max(0.0, row["communication_ms"])
        base_ms = row["ms_per_step"] - visible_ms
        axes.barh(position, base_ms, color="#d9d9d9")
        axes.barh(position, visible_ms, left=base_ms, color=results[name].color)
        text = f"{row['ms_per_step']:.1f}"
        if row["communication_ms"]:
            text += f"  ({row['communication_ms']:+.1f}, {row['communication_share']:.0%})"
        axes.annotate(
            text,
            (row["ms_per_step"], position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(results)), [result.label for result in results.values()])
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set_title("Time of a step, communication in colour")
    axes.set_xlabel("ms, median of the slowest rank")
    axes.tick_params(axis="y", length=0)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean of each value and those before it, over at most SMOOTHING_STEPS values."""
    return [
        statistics.fmean(values[max(0, end - SMOOTHING_STEPS) : end])
        for end in range(1, len(values) + 1)
    ]
