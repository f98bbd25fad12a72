"""Trains a small GPT on two workers, one 3 times slower, in every mode of a parameter server.

    python examples/parameter_server.py               # 1.5 minutes; starts its own ranks
    python examples/parameter_server.py --seconds 5 --modes all-reduce async

All modes start from the same weights and train for the same time: DistributedDataParallel, and
ParameterServer with "sync", "async" and "stale". First the workers train alone, without
communication: the sum of their speeds is what an asynchronous server can reach. The last worker
sleeps twice as long as its forward and backward passes took there. The picture shows the loss over
time.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from run_ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, GPTConfig, held_out_bits, positive, read_corpus, sample_batch

import rota
from rota.parameter_server import ParameterServer

CONFIG = GPTConfig(context=64, num_layers=2, num_heads=2, width=128)
NUM_SEQUENCES = 4
LR = 2e-3
SLOWNESS = 3.0  # of the last worker
ALONE, ALL_REDUCE, SYNC, ASYNC, STALE = "alone", "all-reduce", "sync", "async", "stale"
COLORS = {ALL_REDUCE: "#c8500a", SYNC: "#f2a65e", ASYNC: "#12497f", STALE: "#2a9d6f"}


@dataclass
class Report:
    """One worker's run in one mode."""

    times: list[float]  # seconds from the start to the end of each step
    losses: list[float]  # bits per byte of each step's batch
    computed: list[float]  # seconds of each step's forward and backward pass
    held_out: float  # bits per byte, with the parameters of each worker's last pull
    staleness: int  # clocks that it was ahead at most


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def start_mode(
    mode: str, model: GPT, staleness: int
) -> tuple[torch.nn.Module, Callable[[], None], ParameterServer | None]:
    """What computes the loss, what follows a backward pass, and the parameter server, if any."""
    if mode in (ALONE, ALL_REDUCE):
        module: torch.nn.Module = model
        if mode == ALL_REDUCE:
            module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            module.register_comm_hook(None, rota.allreduce_hook)
        optimizer = make_optimizer(model.parameters())
        return module, optimizer.step, None
    server = ParameterServer(
        model, make_optimizer, mode=mode, staleness=staleness if mode == STALE else None
    )
    return model, server.step, server


def train_mode(
    mode: str,
    initial: GPT,
    text: torch.Tensor,
    held_out: torch.Tensor,
    sleep: Callable[[float], float],
    args: argparse.Namespace,
) -> Report:
    """Trains for args.seconds. sleep(seconds of the passes): how long a step sleeps."""
    rank = dist.get_rank()
    model = copy.deepcopy(initial)
    module, exchange, server = start_mode(mode, model, args.staleness)
    times, losses, computed = [], [], []
    dist.barrier()
    start = time.perf_counter()
    step = 0
    while True:
        begin = time.perf_counter()
        is_over = begin - start > args.seconds
        if mode == ALL_REDUCE:  # all stop after the same step
            verdict = torch.tensor(float(is_over))
            dist.all_reduce(verdict, dist.ReduceOp.MAX)
            is_over = bool(verdict)
        if is_over:
            break
        batch = sample_batch(text, NUM_SEQUENCES, CONFIG.context, (args.seed, rank, step))
        model.zero_grad()
        loss = module(*batch)
        loss.backward()
        computed.append(time.perf_counter() - begin)
        time.sleep(sleep(computed[-1]))
        exchange()
        times.append(time.perf_counter() - start)
        losses.append(loss.item() / math.log(2))
        step += 1
    ahead = 0
    if server is not None:
        ahead = max(max(counter) for counter in server.staleness.values())
        server.close()  # the others no longer wait for this worker, which may have stopped first
    bits = held_out_bits(model, held_out, CONFIG.context)
    return Report(times, losses, computed, bits, ahead)


def work(
    rank: int, text: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace
) -> dict[str, Report]:
    """One worker, in every mode."""
    torch.manual_seed(args.seed)
    initial = GPT(CONFIG)
    factor = SLOWNESS - 1.0 if rank == args.ranks - 1 else 0.0
    reports = {
        ALONE: train_mode(ALONE, initial, text, held_out, lambda passes: factor * passes, args)
    }
    # In a mode with all-reduce a backward pass may wait, so the passes alone count.
    seconds = factor * statistics.median(reports[ALONE].computed)
    for mode in args.modes:
        reports[mode] = train_mode(mode, initial, text, held_out, lambda passes: seconds, args)
    return reports


def smoothed(report: Report, num_steps: int) -> list[float]:
    """The mean of each loss and those before it."""
    losses = report.losses
    return [statistics.fmean(losses[max(0, i + 1 - num_steps) : i + 1]) for i in range(len(losses))]


def draw(path: Path, reports: list[dict[str, Report]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for mode in args.modes:
        report = reports[0][mode]  # of the fastest worker
        label = f"stale, k = {args.staleness}" if mode == STALE else mode
        axes.plot(report.times, smoothed(report, 40), color=COLORS[mode], label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss of worker 0, bits per byte")
    axes.set_title(f"{args.ranks} workers, one of them {SLOWNESS:g} times slower", loc="left")
    axes.legend(frameon=False)
    axes.grid(linewidth=0.4, alpha=0.6)
    figure.savefig(path, dpi=150)


def print_table(reports: list[dict[str, Report]], args: argparse.Namespace) -> None:
    def speed(mode: str) -> list[float]:
        """Steps a second of each worker."""
        return [len(of[mode].times) / of[mode].times[-1] for of in reports]

    alone = sum(speed(ALONE))
    table = Table(title=f"{args.seconds:g} s of each mode")
    for heading in ("mode", "steps of each worker", "steps/s", "of the workers alone"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    table.add_column("most clocks ahead", justify="right")
    table.add_column("held out, bits per byte", justify="right")
    for mode in [ALONE, *args.modes]:
        total = sum(speed(mode))
        row = [mode, " + ".join(str(len(of[mode].times)) for of in reports)]
        row += [f"{total:.1f}", f"{total / alone:.0%}"]
        row += [str(max(of[mode].staleness for of in reports))] if mode != ALONE else ["-"]
        row += [f"{reports[0][mode].held_out:.3f}"] if mode != ALONE else ["-"]
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=positive(float), default=15.0, help="of each mode")
    parser.add_argument(
        "--modes", nargs="+", choices=list(COLORS), default=[ALL_REDUCE, SYNC, ASYNC, STALE]
    )
    parser.add_argument("--staleness", type=int, default=3, help="of mode stale")
    parser.add_argument("--ranks", type=positive(int), default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()

    reports = run_ranks(args.ranks, work, *read_corpus(), args)
    print_table(reports, args)
    draw(args.png, reports, args)
    print(f"picture: {args.png}")


if __name__ == "__main__":
    main()
