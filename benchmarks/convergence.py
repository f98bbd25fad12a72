"""Compares the demo's convergence with low-precision and with float32 gradients.

    python benchmarks/convergence.py     # starts its own ranks; a table, a picture and JSON

Trains the demo's GPT with gradients averaged in float32 and by rota's fused hook, from several
seeds. A seed determines weights and batches, so runs of one seed differ only in the wire dtype.
Differences of the held-out bits per byte after the last step are compared with float32's own spread
between seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import demo
import demo_report
import report
import turns
from arguments import Parser, parse_natural
from demo_model import train_gpt

BASE = "rota"  # float32 on the wire
LABELS = {
    BASE: "float32",
    "rota_fused": "fused float16",
    "rota_fused_fp8": "fused float8_e4m3fn",
    "rota_fused_fp8_e5m2": "fused float8_e5m2",
}
Results = dict[str, list[demo_report.Result]]  # by variant; one result per seed


def summarize(
    results: Results, base: str = BASE, labels: Mapping[str, str] = LABELS
) -> list[dict[str, Any]]:
    """One row per variant: its held-out bits per byte compared with those of `base`, which is the
    variant with float32."""
    final = {name: [run.held_out[-1][1] for run in runs] for name, runs in results.items()}
    low, high = min(final[base]), max(final[base])
    rows = []
    for name, bits in final.items():
        mean = statistics.fmean(bits)
        pairs = zip(bits, final[base], strict=True)
        difference = max((own - of_base for own, of_base in pairs), key=lambda value: abs(value))
        rows.append(
            {
                "gradients": labels[name],
                "held_out_bits": [round(value, 5) for value in bits],
                "mean": round(mean, 5),
                "spread": round(max(bits) - min(bits), 5),
                "largest_difference_from_float32": round(difference, 5),
                "difference_within_spread": abs(difference) <= high - low,
                "mean_within_spread": low <= mean <= high,
                "num_within_spread": sum(low <= value <= high for value in bits),
            }
        )
    return rows


LOSS_COLUMNS: report.Columns = {
    "gradients": "{gradients}",
    "each seed": lambda row: "  ".join(f"{value:.4f}" for value in row["held_out_bits"]),
    "mean": "{mean:.4f}",
    "spread": "{spread:.4f}",
    "largest diff. from\nfloat32, same seed": "{largest_difference_from_float32:+.4f}",
    "below its\nspread": lambda row: "yes" if row["difference_within_spread"] else "no",
    "mean\nwithin": lambda row: "yes" if row["mean_within_spread"] else "no",
    "seeds\nwithin": "{num_within_spread}",
}


def print_losses(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    title = "bits per byte of held-out text after the last step, by seed"
    report.print_columns(console, title, rows, LOSS_COLUMNS)


def draw(results: Results, baseline_bits: float, title: str, path: Path) -> None:
    """Draws mean loss curves with a band from best to worst seed, and each run's final loss with
    float32's spread."""
    with demo_report.picture(path, title, 2, width_ratios=(1.2, 1)) as (curves, ends):
        for line, (name, runs) in enumerate(results.items()):
            by_step = list(zip(*(demo_report.smooth(run.losses) for run in runs), strict=True))
            mean = [statistics.fmean(values) for values in by_step]
            low, high = [min(values) for values in by_step], [max(values) for values in by_step]
            color = runs[0].color
            curves.fill_between(range(len(mean)), low, high, color=color, alpha=0.2, lw=0)
            # Curves overlap, so earlier ones are drawn wider and show at the edges.
            curves.plot(mean, color=color, lw=len(results) - line, label=LABELS[name])
            bits = [run.held_out[-1][1] for run in runs]
            ends.plot(bits, [line] * len(bits), "o", color=color)
        base_bits = [run.held_out[-1][1] for run in results[BASE]]
        ends.axvspan(min(base_bits), max(base_bits), color="#e6e6e6", lw=0, zorder=0)
        curves.set_title(f"Training loss, mean of {demo_report.SMOOTHING_STEPS} steps, by seed")
        curves.set(xlabel="step", ylabel="bits per byte")
        curves.set_ylim(top=1.25 * baseline_bits)  # cuts off the first steps, which start at 8
        curves.legend(frameon=False)
        ends.set_yticks(range(len(results)), [LABELS[name] for name in results])
        ends.invert_yaxis()
        ends.margins(y=0.2)
        ends.set_title("Held-out text after the last step, every seed")
        ends.set_xlabel("bits per byte; grey: the spread of float32")
        ends.tick_params(axis="y", length=0)


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--seeds", type=parse_natural(1), default=3, help="runs of each variant")
    turns.add_ranks(parser)
    parser.add("--max-minutes", type=train_gpt.positive(float), default=30.0, help="a seed")
    args = turns.parse_arguments(parser)
    args.variants = list(LABELS)
    with turns.job("convergence", args) as (run, console):
        train_text, held_out = train_gpt.read_corpus()
        results: Results = {name: [] for name in args.variants}
        for seed in range(args.seed, args.seed + args.seeds):
            console.print(f"seed {seed}")
            of_seed = argparse.Namespace(**{**vars(args), "seed": seed})
            runs = demo.train_in_turns(of_seed, train_text, held_out, console)
            for name, one in runs.items():
                results[name].append(demo.gather(demo.VARIANTS[name], one))
        if run is None:
            return
        baseline_bits = train_gpt.order0_bits(train_text, held_out)
        rows = summarize(results)
        curves = [
            {"gradients": LABELS[name], "seed": seed, "losses": rounded(one.losses)}
            for name, of_seeds in results.items()
            for seed, one in enumerate(of_seeds, args.seed)
        ]
        png_path = run.json_path.with_suffix(".png")
        draw(results, baseline_bits, run.subtitle(), png_path)
        print_losses(run.console, rows)
        run.console.print(f"picture: {png_path}", soft_wrap=True)
        record = {"order0_bits": round(baseline_bits, 4), "held_out": rows, "curves": curves}
        run.finish(record, held_out=rows)


if __name__ == "__main__":
    main()
