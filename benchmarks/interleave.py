"""Lets the backends take turns at one message size, and reduces the ranks' samples.

Backends are measured close together in time, in rotating order, so that changes of the machine
(other load, clock, page placement) affect all of them and ratios stay fair.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from protocol import Entry, Reply, Turn

Ask = Callable[[Turn], list[Reply]]

# A sample shorter than this is batched: perf_counter_ns and the loop around it cost about 0.1 us.
MIN_SAMPLE_US = 20.0
MAX_BATCH = 1000
# The first calls at a size are slow, so the batch is determined in several trials, unless a call
# takes longer than this.
SURELY_LONG_US = 50 * MIN_SAMPLE_US
NUM_TRIALS = 3
NUM_TRIAL_SAMPLES = 5


@dataclass
class Measurement:
    """One entry at one size; `times_us` is the time of one call on the slowest rank, per sample."""

    entry: Entry
    op: str
    num_elems: int
    num_bytes: int
    batch: int
    times_us: list[float] = field(default_factory=list)
    num_wrong: int | None = None

    @property
    def min_us(self) -> float:
        return min(self.times_us)

    @property
    def p50_us(self) -> float:
        """The median, which all ratios use."""
        return float(np.median(self.times_us))

    @property
    def p99_us(self) -> float:
        """The 99th percentile, always one of the samples."""
        return float(np.percentile(self.times_us, 99, method="inverted_cdf"))


def measure(
    entries: Sequence[Entry],
    ask: Ask,
    op: str,
    num_elems: int,
    args: argparse.Namespace,
    dtype: str = "float32",
) -> list[Measurement]:
    """Measures all `entries` at one size, in turns; `args` are those of
    arguments.add_measuring_arguments."""
    num_bytes = num_elems * getattr(torch, dtype).itemsize
    results = []
    for entry in entries:
        batch = 1
        for _ in range(NUM_TRIALS):
            trial = Turn(entry, op, dtype, num_elems, args.warmup, NUM_TRIAL_SAMPLES, batch)
            call_us = min(slowest_rank_us(ask(trial), batch))
            batch = min(MAX_BATCH, math.ceil(MIN_SAMPLE_US / call_us))
            if call_us > SURELY_LONG_US:
                break
        results.append(Measurement(entry, op, num_elems, num_bytes, batch))

    checks = args.check and num_elems > 0  # a barrier has no result
    for repeat in range(args.repeats):
        first = repeat % len(results)
        for result in results[first:] + results[:first]:
            seed = repeat if checks else None
            samples = (args.warmup, args.iters, result.batch, seed)
            replies = ask(Turn(result.entry, op, dtype, num_elems, *samples))
            result.times_us += slowest_rank_us(replies, result.batch)
            for reply in replies:
                if reply.num_wrong is not None:
                    result.num_wrong = (result.num_wrong or 0) + reply.num_wrong
    return results


def measure_sizes(
    entries: Sequence[Entry],
    ask: Ask,
    op: str,
    sizes: Sequence[int],
    args: argparse.Namespace,
    dtype: str = "float32",
) -> list[Measurement]:
    """The same at several sizes, in elements; shows how far it is."""
    progress = Console(stderr=True)
    shown = track(
        sizes, "sizes", console=progress, transient=True, disable=not progress.is_terminal
    )
    return [
        result
        for num_elems in shown
        for result in measure(entries, ask, op, num_elems, args, dtype)
    ]


def slowest_rank_us(replies: Sequence[Reply], batch: int) -> list[float]:
    """Per sample, the time of one call on the slowest rank."""
    sample_ns = np.array([reply.sample_ns for reply in replies])  # [ranks, samples]
    return [float(ns) / batch / 1e3 for ns in sample_ns.max(axis=0)]
