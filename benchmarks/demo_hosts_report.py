"""Tables and picture of demo_hosts.py. Independent of how numbers were taken."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

import convergence
import report
from demo import BLOCK_STEPS
from demo_report import SMOOTHING_STEPS, Result, smooth

BASE = "gloo"  # DistributedDataParallel as torch has it
ALONE = "none"
# By variant, one for each seed.
Results = dict[str, list[Result]]


@dataclass(frozen=True)
class AtRate:
    """What was trained over links of one rate."""

    rate: str
    network: dict[str, Any]  # HostNetwork.describe()
    results: Results

    @property
    def trained(self) -> Results:
        """Without the variant whose ranks train alone."""
        return {name: runs for name, runs in self.results.items() if name != ALONE}


def format_rate(rate: str) -> str:
    """1 Gbit/s of "1gbit"."""
    return re.sub(r"^(\d+)([kmg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)


def mean_step_ms(runs: Sequence[Result]) -> float:
    """Of all steps of all seeds. Not the median, which would pass over outer steps."""
    return statistics.fmean(ms for run in runs for ms in run.step_ms)


def rows_of(at_rate: AtRate) -> list[dict[str, Any]]:
    """One row per variant: its step, and how much of it the network takes."""
    alone_ms = mean_step_ms(at_rate.results[ALONE])
    base_ms = mean_step_ms(at_rate.results[BASE])
    rows = []
    for name, runs in at_rate.results.items():
        step_ms = mean_step_ms(runs)
        rows.append(
            {
                "rate": at_rate.rate,
                "variant": name,
                "label": runs[0].label,
                "steps": len(runs[0].losses),
                "step_ms": round(step_ms, 2),
                "communication_ms": round(step_ms - alone_ms, 2),
                "communication_share": round((step_ms - alone_ms) / step_ms, 4),
                "times_as_fast_as_base": round(base_ms / step_ms, 3),
                "sent_bytes_per_step": round(statistics.fmean(run.sent_bytes for run in runs)),
                "seconds": round(step_ms * len(runs[0].losses) / 1e3, 1),
            }
        )
    return rows


def print_steps(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """The table of one rate."""
    headings = (
        "variant",
        "steps",
        "ms per\nstep",
        "communi-\ncation ms",
        "share\nof step",
        "Gloo's step\n/ its",
        "kB a host sends\nper step",
        "seconds of\nall steps",
    )
    cells = (
        (
            row["label"],
            str(row["steps"]),
            f"{row['step_ms']:.1f}",
            f"{row['communication_ms']:.1f}",
            f"{row['communication_share']:.0%}",
            f"{row['times_as_fast_as_base']:.2f}",
            f"{row['sent_bytes_per_step'] / 1e3:.1f}",
            f"{row['seconds']:.1f}",
        )
        for row in rows
    )
    title = f"links of {format_rate(rows[0]['rate'])}; mean step of the slowest rank"
    report.print_labelled(console, title, headings, cells)


def losses_of(at_rates: Sequence[AtRate]) -> list[dict[str, Any]]:
    """One row per variant that communicates: held-out loss of every seed, beside the base's."""
    trained = at_rates[0].trained
    labels = {name: runs[0].label for name, runs in trained.items()}
    rows = convergence.summarize(trained, BASE, labels)
    for row, name in zip(rows, trained, strict=True):
        others = [at_rate.results[name][0].losses for at_rate in at_rates[1:]]
        row["same_losses_at_every_rate"] = all(trained[name][0].losses == other for other in others)
    return rows


def draw(path: Path, at_rates: Sequence[AtRate], baseline_bits: float, note: str) -> None:
    """Writes a PNG: for every rate the first seed's loss over time, and `note` above."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, len(at_rates), sharey=True, squeeze=False)[0]
    for axes, at_rate in zip(panels, at_rates, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        _draw_rate(axes, at_rate, baseline_bits)
    panels[0].set_ylabel(f"training loss, bits per byte, mean of {SMOOTHING_STEPS} steps")
    figure.suptitle(note, fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_rate(axes: Axes, at_rate: AtRate, baseline_bits: float) -> None:
    for runs in at_rate.trained.values():
        run = runs[0]
        seconds = [ms / 1e3 for ms in accumulate(run.step_ms)]
        losses = smooth(run.losses)[BLOCK_STEPS:]  # the first block is not timed
        label = f"{run.label}: {seconds[-1]:.0f} s"
        axes.plot(seconds, losses, color=run.color, lw=1.8, label=label)
        axes.plot(seconds[-1], losses[-1], "o", color=run.color, markersize=5)
    axes.axhline(baseline_bits, color="black", lw=1, ls=":")
    axes.set_title(f"Links of {format_rate(at_rate.rate)}")
    axes.set_xlabel("seconds of training")
    axes.set_xlim(left=0)
    axes.set_ylim(top=1.25 * baseline_bits)  # cuts off the first steps, which start at 8
    axes.legend(frameon=False)


def curves_of(at_rates: Sequence[AtRate]) -> list[dict[str, Any]]:
    """What the picture shows, for the record: the first seed's losses and times by step."""
    return [
        {
            "rate": at_rate.rate,
            "variant": name,
            "losses": convergence.rounded(runs[0].losses),
            "step_ms": [round(ms, 1) for ms in runs[0].step_ms],
        }
        for at_rate in at_rates
        for name, runs in at_rate.results.items()
    ]
