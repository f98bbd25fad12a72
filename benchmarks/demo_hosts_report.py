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
from rich.console import Console

import convergence
import report
from demo import BLOCK_STEPS
from demo_report import SMOOTHING_STEPS, Result, picture, smooth

BASE = "gloo"  # DistributedDataParallel as torch has it
ALONE = "none"
WINDOW_STEPS = 32  # outer steps come every 8, 16 or 32


@dataclass(frozen=True)
class AtRate:
    """What was trained over links of one rate."""

    rate: str
    network: dict[str, Any]  # HostNetwork.describe()
    results: dict[str, Result]  # by variant

    @property
    def trained(self) -> dict[str, Result]:
        return {name: result for name, result in self.results.items() if name != ALONE}


def format_rate(rate: str) -> str:
    """1 Gbit/s of "1gbit"."""
    return re.sub(r"^(\d+)([kmg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)


def typical_step_ms(result: Result) -> float:
    """The median, over windows of WINDOW_STEPS steps, of a window's mean step.

    A window has its share of the outer steps, which the median of single steps would pass over, and
    the median of windows is not moved by a minute in which other programs keep the cores busy.
    """
    times = result.step_ms
    num_windows = max(1, len(times) // WINDOW_STEPS)
    windows = [times[i * WINDOW_STEPS : (i + 1) * WINDOW_STEPS] for i in range(num_windows)]
    return statistics.median(map(statistics.fmean, windows))


def rows_of(at_rate: AtRate) -> list[dict[str, Any]]:
    """One row per variant: its step, and how much of it the network takes."""
    alone_ms = typical_step_ms(at_rate.results[ALONE])
    base_ms = typical_step_ms(at_rate.results[BASE])
    rows = []
    for name, result in at_rate.results.items():
        step_ms = typical_step_ms(result)
        rows.append(
            {
                "rate": at_rate.rate,
                "variant": name,
                "label": result.label,
                "steps": len(result.losses),
                "step_ms": round(step_ms, 2),
                "communication_ms": round(step_ms - alone_ms, 2),
                "communication_share": round((step_ms - alone_ms) / step_ms, 4),
                "times_as_fast_as_base": round(base_ms / step_ms, 3),
                "sent_bytes_per_step": round(result.sent_bytes),
                "seconds": round(step_ms * len(result.losses) / 1e3, 1),
            }
        )
    return rows


STEP_COLUMNS: report.Columns = {
    "variant": "{label}",
    "steps": "{steps}",
    "ms per\nstep": "{step_ms:.1f}",
    "communi-\ncation ms": "{communication_ms:.1f}",
    "share\nof step": "{communication_share:.0%}",
    "Gloo's step\n/ its": "{times_as_fast_as_base:.2f}",
    "kB a host sends\nper step": lambda row: f"{row['sent_bytes_per_step'] / 1e3:.1f}",
    "seconds of\nall steps": "{seconds:.1f}",
}


def print_steps(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    title = f"links of {format_rate(rows[0]['rate'])}; steps of the slowest rank"
    report.print_columns(console, title, rows, STEP_COLUMNS)


def losses_of(
    at_rates: Sequence[AtRate], further: Sequence[dict[str, Result]]
) -> list[dict[str, Any]]:
    """One row per variant that communicates: held-out loss of every seed, beside the base's.

    Args:
        at_rates: of the first seed.
        further: the results of each further seed, by variant.
    """
    first = at_rates[0].trained
    of_seeds = {name: [one, *(seed[name] for seed in further)] for name, one in first.items()}
    labels = {name: result.label for name, result in first.items()}
    rows = convergence.summarize(of_seeds, BASE, labels)
    for row, (name, result) in zip(rows, first.items(), strict=True):
        others = (at_rate.results[name].losses for at_rate in at_rates[1:])
        row["same_losses_at_every_rate"] = all(result.losses == losses for losses in others)
    return rows


def draw(path: Path, at_rates: Sequence[AtRate], baseline_bits: float, note: str) -> None:
    """Writes a PNG: for every rate the loss over time, from the baseline on."""
    with picture(path, note, len(at_rates), sharey=True) as panels:
        for axes, at_rate in zip(panels, at_rates, strict=True):
            _draw_rate(axes, at_rate, baseline_bits)
        panels[0].set_ylabel(f"training loss, bits per byte, mean of {SMOOTHING_STEPS} steps")


def _draw_rate(axes: Axes, at_rate: AtRate, baseline_bits: float) -> None:
    for run in at_rate.trained.values():
        seconds = [ms / 1e3 for ms in accumulate(run.step_ms)]
        losses = smooth(run.losses)[BLOCK_STEPS:]  # the first block is not timed
        label = f"{run.label}: {seconds[-1]:.0f} s"
        axes.plot(seconds, losses, color=run.color, lw=1.8, label=label)
        axes.plot(seconds[-1], losses[-1], "o", color=run.color, markersize=5)
    axes.set_title(f"Links of {format_rate(at_rate.rate)}")
    axes.set_xlabel("seconds of training")
    axes.set_xlim(left=0)
    axes.set_ylim(top=baseline_bits)  # cuts off the first steps, which start at 8
    axes.legend(frameon=False)


def curves_of(at_rates: Sequence[AtRate]) -> list[dict[str, Any]]:
    """What the picture shows, for the record: losses and times by step."""
    return [
        {
            "rate": at_rate.rate,
            "variant": name,
            "losses": convergence.rounded(result.losses),
            "step_ms": [round(ms, 1) for ms in result.step_ms],
        }
        for at_rate in at_rates
        for name, result in at_rate.results.items()
    ]
