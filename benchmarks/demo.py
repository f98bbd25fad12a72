"""Trains the same GPT with rota and Gloo or NCCL, in turns, and shows the cost of communication.

    python benchmarks/demo.py     # starts its own ranks; ends in a table, a picture and JSON

All variants run in one job, each with its own process group, replica and optimizer. They start from
the same weights and use the same batches. They take turns in blocks of a few steps, so that other
load on the machine affects all of them alike.

A step's time is that of its slowest rank. Communication is a variant's median step minus that of
the variant without communication: the same DistributedDataParallel with torch's noop_hook, whose
gradients stay on their rank, so that parameters differ between ranks.

Ranks compute on GPUs if there are any; examples/devices.py chooses the devices and the backend to
compare with.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import machine
from arguments import Parser, parse_list
from demo_model import devices, train_gpt
from demo_report import Result, draw, print_table, summarize

BLOCK_STEPS = 5  # about half a second: longer than the switch takes, shorter than the noise lasts
EVAL_STEPS = 8 * BLOCK_STEPS
CPU = torch.device("cpu")
OUTPUT = machine.REPOSITORY / "build" / "demo"


@dataclass
class Run:
    """One variant's replica on this rank, and this rank's measurements of it by step."""

    model: train_gpt.GPT
    parallel: nn.Module  # the model under DistributedDataParallel or FSDP
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None  # after the last step, so that replicas are equal
    losses: list[float] = field(default_factory=list)  # bits per byte
    step_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0  # CPU time of all steps
    sent_bytes: int = 0  # by this rank's host, in all steps
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, bits per byte)


class Startable(Protocol):
    """What can take turns with others."""

    @property
    def label(self) -> str: ...
    @property
    def color(self) -> str: ...

    def start(self, initial: train_gpt.GPT) -> Run:
        """This rank's replica of `initial`, over groups of its own; a collective call."""
        ...


@dataclass(frozen=True)
class Variant:
    label: str
    backend: str
    hook: str
    color: str
    wire_dtype: str = "float16"  # used by the fused hook

    def start(self, initial: train_gpt.GPT) -> Run:
        model = copy.deepcopy(initial)
        group = dist.new_group(backend="gloo" if self.backend == "none" else self.backend)
        ddp = train_gpt.data_parallel(model, self.backend, self.hook, group, self.wire_dtype)
        return Run(model, ddp, train_gpt.make_optimizer(model))


VARIANTS = {
    "none": Variant("no communication", "none", "none", "#c4c4c4"),
    "gloo": Variant("Gloo", "gloo", "none", "#c8500a"),
    "gloo_fp16": Variant("Gloo + fp16 hook", "gloo", "fp16", "#f2a65e"),
    "nccl": Variant("NCCL", "nccl", "none", "#8a1c7c"),
    "nccl_fp16": Variant("NCCL + fp16 hook", "nccl", "fp16", "#d09ac8"),
    "rota": Variant("rota", "rota", "none", "#12497f"),
    "rota_fp16": Variant("rota + fp16 hook", "rota", "fp16", "#6fb1e8"),
    "rota_fused": Variant("rota + fused fp16", "rota", "fused", "#2a9d6f"),
    "rota_fused_fp8": Variant("rota + fused fp8", "rota", "fused", "#9bd3ae", "float8_e4m3fn"),
    "rota_fused_fp8_e5m2": Variant("rota + fused e5m2", "rota", "fused", "#d2c14a", "float8_e5m2"),
}


def default_variants(baseline: str) -> list[str]:
    """As many variants as can train 320 steps in 5 minutes on the CPU."""
    return ["none", baseline, f"{baseline}_fp16", "rota", "rota_fused", "rota_fused_fp8"]


def take_turn(
    run: Run,
    steps: range,
    num_steps: int,
    train: Tensor,
    args: argparse.Namespace,
    count_sent: Callable[[], int] = lambda: 0,
) -> None:
    """Trains `steps` of a run of `num_steps`; the ranks start together, with idle GPUs."""
    rank, context = dist.get_rank(), run.model.context
    timer = train_gpt.StepTimer(train.device)
    bits = []
    if train.is_cuda:
        torch.cuda.synchronize(train.device)
    dist.barrier()
    sent_before = count_sent()
    cpu_start = time.process_time()
    timer.start()
    for step in steps:
        batch = train_gpt.sample_batch(train, args.batch, context, (args.seed, rank, step))
        lr = train_gpt.learning_rate(step, num_steps, args.lr)
        bits.append(train_gpt.train_step(run.parallel, run.optimizer, batch, lr))
        timer.mark()
    run.step_ms += timer.step_ms()
    run.cpu_ms += (time.process_time() - cpu_start) * 1e3
    run.losses += [float(value) for value in bits]
    dist.barrier()  # other ranks of this host may still be sending
    run.sent_bytes += count_sent() - sent_before


def affordable_steps(done: int, elapsed_s: float, args: argparse.Namespace) -> int:
    """The run's total number of steps, by its pace so far: args.steps, or on a slow or busy machine
    as many as fit into the time limit. Rank 0's clock decides, as ranks must agree."""
    fitting = int(args.max_minutes * 60 / elapsed_s * done) // BLOCK_STEPS * BLOCK_STEPS
    num_steps = torch.tensor(min(args.steps, max(done, fitting, 2 * BLOCK_STEPS)))
    dist.broadcast(num_steps, src=0)
    return int(num_steps)


def train_in_turns(
    args: argparse.Namespace,
    train: Tensor,
    held_out: Tensor,
    console: Console,
    device: torch.device = CPU,
    *,
    variants: Mapping[str, Startable] = VARIANTS,
    config: train_gpt.GPTConfig | None = None,
    paces: Mapping[str, float] | None = None,
    count_sent: Callable[[], int] = lambda: 0,
) -> dict[str, Run]:
    """Trains args.variants, which take turns, from the weights and batches of args.seed.

    Args:
        variants: what the names in args.variants mean.
        config: of the model; None: the demo's for this device.
        paces: a variant with 1.2 trains 1.2 times as many steps as others; 1 where it is missing.
        count_sent: the bytes that this rank's host has sent until now.
    """
    config = config or train_gpt.SCALES[device.type].config
    train, held_out = train.to(device), held_out.to(device)
    torch.manual_seed(args.seed)
    with device:
        initial = train_gpt.GPT(config)
    runs = {name: variants[name].start(initial) for name in args.variants}
    turns = deque(runs)

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    bars = {
        name: progress.add_task(variants[name].label, total=args.steps, loss="") for name in runs
    }
    start = time.perf_counter()
    num_steps, done = args.steps, 0
    with progress:
        while done < num_steps:
            steps = range(done, min(done + BLOCK_STEPS, num_steps))
            for name in turns:
                pace = (paces or {}).get(name, 1.0)
                own_steps = range(round(steps.start * pace), round(steps.stop * pace))
                take_turn(runs[name], own_steps, round(num_steps * pace), train, args, count_sent)
                loss = f"loss {runs[name].losses[-1]:.3f}"
                progress.update(bars[name], completed=steps.stop, total=num_steps, loss=loss)
            turns.rotate(-1)  # so that no variant always comes first
            done = steps.stop
            num_steps = affordable_steps(done, time.perf_counter() - start, args)
            if done % EVAL_STEPS == 0 or done == num_steps:
                line = f"step {done:4d}  held out"
                for name, run in runs.items():
                    if done == num_steps:
                        run.finish()
                    bits = train_gpt.held_out_bits(run.model, held_out, config.context)
                    run.held_out.append((len(run.losses), bits))
                    line += f"  {name} {bits:.3f}"
                console.print(line, soft_wrap=True)
    if num_steps < args.steps:
        console.print(f"stopped at step {num_steps} of {args.steps}: --max-minutes")
    return runs


def gathered(own: Any) -> list[Any]:
    """What every rank has, by rank."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def gather(variant: Startable, run: Run) -> Result:
    """Combines all ranks' measurements; returns the same on every rank."""
    own = (run.losses, run.step_ms, run.cpu_ms / sum(run.step_ms), run.sent_bytes)
    losses, step_ms, core_share, sent_bytes = zip(*gathered(own), strict=True)
    return Result(
        label=variant.label,
        color=variant.color,
        losses=[statistics.fmean(values) for values in zip(*losses, strict=True)],
        held_out=run.held_out,
        # The first block includes allocations and DDP's own start-up.
        step_ms=[max(values) for values in zip(*step_ms, strict=True)][BLOCK_STEPS:],
        spread=train_gpt.parameter_spread(run.model),
        sent_bytes=max(sent_bytes) / len(run.losses),
        core_share=None if next(run.model.parameters()).is_cuda else min(core_share),
    )


def parse_args() -> tuple[argparse.Namespace, devices.Gpus]:
    positive = train_gpt.positive
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--variants",
        type=parse_list(list(VARIANTS)),
        metavar="A,B,...",
        help=f"of {','.join(VARIANTS)}; none is the base of the comparison (default: "
        f"{','.join(default_variants('gloo'))}, or nccl for gloo where each rank has a GPU)",
    )
    parser.add_argument("--ranks", type=positive(int), help="default: one for each GPU, at least 2")
    parser.add_argument("--device", choices=devices.DEVICES, default="auto")
    parser.add_argument(
        "--max-minutes",
        type=positive(float),
        help=f"of training (default: {train_gpt.by_scale('max_minutes')})",
    )
    parser.add_argument("--png", type=Path, default=OUTPUT / "train_gpt.png")
    parser.add_argument("--json", type=Path, default=OUTPUT / "train_gpt.json")
    train_gpt.add_training_arguments(parser)
    args = parser.parse_args()
    if args.steps <= BLOCK_STEPS:
        parser.error(f"--steps: the first {BLOCK_STEPS} are not timed, got {args.steps} in all")
    try:
        gpus = devices.find_gpus(args.device)
    except ValueError as error:
        parser.error(str(error))
    args.ranks = args.ranks or devices.default_num_ranks(gpus)
    placement = (
        devices.place_this_rank(gpus)
        if "RANK" in os.environ
        else devices.place(0, args.ranks, gpus)
    )
    args.variants = args.variants or default_variants(placement.baseline)
    if "none" not in args.variants:
        parser.error('--variants: "none" is missing, the base of the comparison')
    needs_nccl = [name for name in args.variants if VARIANTS[name].backend == "nccl"]
    if needs_nccl and placement.baseline != "nccl":
        parser.error(f"--variants {','.join(needs_nccl)} cannot run here: {placement.note}")
    train_gpt.fill_in(args, train_gpt.SCALES[placement.device.type])
    return args, gpus


def become_ranks(num_ranks: int) -> None:
    """Starts this program again under torchrun, one process per rank, unless this is a rank."""
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per rank
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        os.execv(sys.executable, [sys.executable, *launcher, str(num_ranks), *sys.argv])


def main() -> None:
    args, gpus = parse_args()
    become_ranks(args.ranks)
    placement = devices.place_this_rank(gpus)
    devices.use(placement.device)

    start = time.perf_counter()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    console.print(placement.note, soft_wrap=True)
    train, held_out = train_gpt.read_corpus()
    baseline_bits = train_gpt.order0_bits(train, held_out)
    console.print(f"order-0 baseline: {baseline_bits:.3f} bits per byte of the held-out files")

    runs = train_in_turns(args, train, held_out, console, placement.device)
    results = {name: gather(VARIANTS[name], run) for name, run in runs.items()}
    if dist.get_rank() == 0:
        core_share = results["none"].core_share
        gpus_here: dict[str, object] = {}
        if placement.device.type == "cuda":
            name = torch.cuda.get_device_name(placement.device)
            gpus_here = {"gpus": f"{torch.cuda.device_count()} x {name}"}
        record = {
            "seconds": round(time.perf_counter() - start, 1),
            "ranks": dist.get_world_size(),
            "steps": len(runs["none"].losses),
            "batch": args.batch,
            "core_share": core_share and round(core_share, 3),
            "placement": placement.note,
            "order0_bits": round(baseline_bits, 4),
            "variants": {
                name: {key: float(f"{value:.6g}") for key, value in row.items()}
                for name, row in summarize(results).items()
            },
            "machine": machine.describe() | gpus_here,
            "commit": machine.git_commit(),
        }
        curves = {name: asdict(result) for name, result in results.items()}
        draw(results, baseline_bits, args.png, placement.note if gpus.count else "")
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record | {"curves": curves}) + "\n")
        print_table(results, console)
        console.print(f"picture: {args.png}\nall numbers: {args.json}", soft_wrap=True)
        print(json.dumps(record), flush=True)
    dist.destroy_process_group()

    differing = [name for name, result in results.items() if name != "none" and result.spread != 0]
    if differing:
        sys.exit(f"parameters differ between ranks after training with {', '.join(differing)}")


if __name__ == "__main__":
    main()
