"""The table and the picture of examples/population.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from population_training import Outcome
from rich.console import Console
from rich.table import Table

# Of Okabe and Ito's palette, which colour-blind readers can distinguish.
STYLES = {
    "pbt": ("population-based training", "#D55E00", "-"),
    "tpe": ("Optuna TPE", "#0072B2", "--"),
    "gp": ("Optuna Gaussian process", "#009E73", "-."),
    "random": ("random search", "#000000", ":"),
}

UNIFORM_BITS = 8.0  # the loss of a model that takes all bytes for equally likely


def by_method(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    methods = dict.fromkeys(outcome.method for outcome in outcomes)
    return {method: [o for o in outcomes if o.method == method] for method in methods}


def print_table(outcomes: Sequence[Outcome], console: Console) -> None:
    """One line per method: losses on the test text, and the optimizer steps of all its models."""
    grouped = by_method(outcomes)
    seeds = [outcome.seed for outcome in next(iter(grouped.values()))]
    table = Table(title="held-out loss of the best model (bits per byte)")
    table.add_column("method", no_wrap=True)
    for heading in (*(f"seed {seed}" for seed in seeds), "mean", "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, its in grouped.items():
        losses = [outcome.best.test_bits for outcome in its]
        table.add_row(
            STYLES[method][0],
            *(f"{loss:.3f}" for loss in losses),
            f"{statistics.fmean(losses):.3f}",
            f"{statistics.fmean(outcome.num_steps for outcome in its):.0f}",
        )
    console.print(table)


def draw(path: Path, outcomes: Sequence[Outcome], subtitle: str) -> None:
    """Draws the test loss of the best model over the budget spent: mean and range of seeds."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")  # draws with Agg: needs no display
    axes = figure.add_subplot()
    total, top = outcomes[0].num_sequences, 0.0
    for method, its in by_method(outcomes).items():
        label, colour, dashes = STYLES[method]
        # All seeds spend the same with every trial or round.
        sequences = [spent for spent, _ in its[0].curve]
        losses = list(zip(*([loss for _, loss in outcome.curve] for outcome in its), strict=True))
        means = [statistics.fmean(of_seeds) for of_seeds in losses]
        lowest, highest = [min(of_seeds) for of_seeds in losses], [max(s) for s in losses]
        # A search has nothing better until its next trial has ended.
        line = "default" if method == "pbt" else "steps-post"
        axes.plot(sequences, means, color=colour, drawstyle=line, linestyle=dashes, label=label)
        axes.fill_between(
            sequences,
            lowest,
            highest,
            step=None if method == "pbt" else "post",
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        # The first random models are far worse than all later ones, and may have diverged.
        later = [loss for spent, loss in zip(sequences, highest, strict=True) if spent * 5 > total]
        top = max(top, min(UNIFORM_BITS, max(later)))
    axes.set_ylim(top=top)
    axes.set_xlabel("training sequences spent by all members or trials")
    axes.set_ylabel("held-out loss of the best model so far (bits per byte)")
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.legend(frameon=False)
    figure.suptitle("Population-based training and searches", x=0.01, ha="left", fontweight="bold")
    axes.set_title(subtitle, fontsize=8, loc="left")
    figure.savefig(path, dpi=150)
