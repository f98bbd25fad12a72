"""Trains a byte-level GPT on the sources of Python's standard library, data-parallel.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --backend rota --hook fp16

Plain PyTorch with DistributedDataParallel. rota needs two lines: `import rota`, which registers the
backend that init_process_group() finds by name, and, to send gradients in fewer bits, one of its
communication hooks: fp16, or fused, which takes any --wire-dtype. With --backend none no gradient
leaves its rank: that run shows a step's time without communication, and the ranks' parameters drift
apart. --data-cache reads the text from a cache (docs/data.md). Ranks compute on GPUs if there are
any.

benchmarks/demo.py trains the same steps with every backend in turn.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_cache import default_folder, open_corpus
from data_cache import read_corpus as read_corpus  # others take it from here
from data_order import data_loader
from devices import DEVICES, Placement, find_gpus, place_this_rank, use
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel

import rota

WIRE_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
BYTES = 256  # the vocabulary: text is read as bytes, so there is no tokenizer
WARMUP_STEPS = 20


# ---------------------------------------------------------------------------------------------
# Model: pre-norm transformer with rotary positions, QK norm and ReLU^2.


@dataclass(frozen=True)
class GPTConfig:
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 256


@dataclass(frozen=True)
class Scale:
    """Defaults of the command line: what a kind of device can train in a few minutes."""

    config: GPTConfig
    batch: int  # sequences per rank
    lr: float
    max_minutes: float  # of the demo's training


SCALES = {
    "cpu": Scale(GPTConfig(), batch=4, lr=2e-3, max_minutes=5.4),  # 3.3 M parameters
    "cuda": Scale(  # 25 M
        GPTConfig(context=256, num_layers=8, num_heads=8, width=512),
        batch=16,
        lr=1e-3,
        max_minutes=2.0,
    ),
}


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021).

    x: (batch, time, heads, head_width); cos, sin: (time, 1, head_width / 2).
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        # Of tensor-parallel ranks, each has some of the heads.
        qkv = self.qkv(x).view(batch, time_, 3, -1, self.head_width)
        q, k, v = qkv.unbind(dim=2)  # each (batch, time, heads, head_width)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention_out(y.transpose(1, 2).reshape(batch, time_, -1))
        return out

    def mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp_out(F.relu(self.mlp_in(x)).square())
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: (batch, time, width)
        x = x + self.attention(norm(x), cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, BYTES, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

        half = config.width // config.num_heads // 2
        angles = torch.outer(torch.arange(config.context), 1000.0 ** -(torch.arange(half) / half))
        # Plain tensors, since DDP would broadcast buffers before every forward. So the model must
        # be made on its final device.
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte. inputs, targets: (batch, context) int64."""
        x = norm(self.embedding(inputs))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(norm(x)).flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------------
# Text


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (len(starts), context) int64; targets are one byte ahead.
    All are on the device of `text`, where `starts` must be, too."""
    block = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return block[:, :-1], block[:, 1:]


def sample_batch(
    text: Tensor, num_sequences: int, context: int, key: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """A rank's batch of one step, determined by key = (seed, rank, step): comparable runs."""
    rng = random.Random(str(key))
    starts = torch.tensor([rng.randrange(len(text) - context) for _ in range(num_sequences)])
    return windows(text, starts.to(text.device), context)


def order0_bits(train: Tensor, held_out: Tensor) -> float:
    """Bits per byte of `held_out` under the byte frequencies of `train`, the best that a model
    without context can reach."""
    train_counts, counts = (torch.bincount(text, minlength=BYTES) for text in (train, held_out))
    frequencies = train_counts.double() + 1  # once more, so that no probability is zero
    bits = -(frequencies / frequencies.sum()).log2()
    return float((counts * bits).sum() / counts.sum())


# ---------------------------------------------------------------------------------------------
# Training


class StepTimer:
    """Times steps, each from the end of the one before, and never makes a GPU wait for the host.

    Uses the wall clock on the CPU. On a GPU it uses CUDA events on the current stream, which waits
    for a step's communication before the optimizer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        """Marks the end of a step."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Milliseconds of each step since `start`; waits until they are done."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            return [begin.elapsed_time(end) for begin, end in pairwise(self._marks)]
        return [(end - begin) * 1e3 for begin, end in pairwise(self._marks)]


def data_parallel(
    model: GPT,
    backend: str,
    hook: str,
    group: dist.ProcessGroup | None = None,
    wire_dtype: str = WIRE_DTYPES[0],
) -> DistributedDataParallel:
    """`model` as a replica whose gradients backward() averages over the ranks of `group`."""
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if backend == "none":
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    elif hook == "fp16":
        hooks: Any = rota if backend == "rota" else default_hooks
        ddp.register_comm_hook(group, hooks.fp16_compress_hook)
    elif hook == "fused":
        state = rota.HookState(group, getattr(torch, wire_dtype))
        ddp.register_comm_hook(state, rota.fused_hook)
    return ddp


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up, constant, then from 40 % of the steps a linear decay to 5 % of the peak."""
    warmup = (step + 1) / WARMUP_STEPS
    decay = (1 - step / num_steps) / 0.6
    return peak * max(0.05, min(1.0, warmup, decay))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    lr: float,
) -> Tensor:
    """One step on this rank's batch; returns its loss in bits per byte, still on the device."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    optimizer.zero_grad()
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    bits: Tensor = loss.detach() / math.log(2)
    return bits


@torch.no_grad()
def held_out_bits(
    model: GPT,
    text: Tensor,
    context: int,
    num_windows: int = 128,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Bits per byte on windows spread evenly over `text`; each rank reads its share of them."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    starts = torch.arange(rank, num_windows, world_size, device=text.device)
    starts *= len(text) // num_windows
    nats = model(*windows(text, starts, context)) * len(starts)
    dist.all_reduce(nats, group=group)
    return float(nats) / num_windows / math.log(2)


@torch.no_grad()
def parameter_spread(model: GPT) -> float:
    """The largest difference of any parameter between two ranks."""
    high = torch.cat([parameter.flatten() for parameter in model.parameters()])
    low = high.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return float((high - low).max())


def positive(number: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a number above zero, got {text}")
        return value

    return parse


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive(int), default=320)
    parser.add_argument(
        "--batch", type=positive(int), help=f"sequences per rank (default: {by_scale('batch')})"
    )
    parser.add_argument(
        "--lr", type=positive(float), help=f"peak learning rate (default: {by_scale('lr')})"
    )
    parser.add_argument("--seed", type=int, default=0)


def by_scale(name: str) -> str:
    return ", ".join(f"{getattr(scale, name)} on {device}" for device, scale in SCALES.items())


def fill_in(args: argparse.Namespace, scale: Scale) -> None:
    """Sets arguments missing from the command line to the defaults of `scale`."""
    for name in ("batch", "lr", "max_minutes"):
        if getattr(args, name, 0) is None:
            setattr(args, name, getattr(scale, name))


class Data(NamedTuple):
    """What a rank reads of the corpus."""

    batches: Iterator[tuple[Tensor, Tensor]]  # of this rank, one per step
    held_out: Tensor  # on the device
    order0_bits: float
    num_train_bytes: int


def load_data(args: argparse.Namespace, device: torch.device, context: int) -> Data:
    """The corpus with batches at random places, or with --data-cache in epochs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches: Iterator[tuple[Tensor, Tensor]]
    if args.data_cache is None:
        train, held_out = read_corpus()
        on_device = train.to(device)
        keys = ((args.seed, rank, step) for step in count())
        batches = (sample_batch(on_device, args.batch, context, key) for key in keys)
    else:
        train, held_out = open_corpus(args.data_cache)
        order = {"seed": args.seed, "rank": rank, "world_size": world_size}
        loader = data_loader(train, context, args.batch * world_size, **order)
        batches = ((inputs.to(device), targets.to(device)) for inputs, targets in loader)
    return Data(batches, held_out.to(device), order0_bits(train, held_out), len(train))


def parse_args() -> tuple[argparse.Namespace, Placement]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("rota", "gloo", "nccl", "none"), default="rota")
    parser.add_argument("--hook", choices=("none", "fp16", "fused"), default="none")
    parser.add_argument("--wire-dtype", choices=WIRE_DTYPES, help="of --hook fused (float16)")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--data-cache",
        type=Path,
        nargs="?",
        const=default_folder(),
        metavar="FOLDER",
        help="read the text from a cache, in epochs of one order for any number of ranks "
        "(default folder: %(const)s)",
    )
    parser.add_argument("--eval-every", type=positive(int), default=40, metavar="STEPS")
    add_training_arguments(parser)
    args = parser.parse_args()
    if args.backend == "none" and args.hook != "none":
        parser.error("--hook needs a backend that communicates, got --backend none")
    if args.wire_dtype is not None and args.hook != "fused":
        parser.error(f"--wire-dtype is of --hook fused, got --hook {args.hook}")
    if "RANK" not in os.environ:
        parser.error("expected torchrun: torchrun --standalone --nproc-per-node 2 " + sys.argv[0])
    try:
        gpus = find_gpus(args.device)
    except ValueError as error:
        parser.error(str(error))
    placement = place_this_rank(gpus)
    if args.backend == "nccl" and placement.baseline != "nccl":
        parser.error(f"--backend nccl cannot run here: {placement.note}")
    fill_in(args, SCALES[placement.device.type])
    return args, placement


def main() -> None:
    args, placement = parse_args()
    device = placement.device
    use(device)
    # Without gradient communication, Gloo still sums the held-out losses.
    dist.init_process_group("gloo" if args.backend == "none" else args.backend)
    rank = dist.get_rank()
    console = Console(quiet=rank != 0)

    config = SCALES[device.type].config
    data = load_data(args, device, config.context)
    console.print(placement.note, soft_wrap=True)
    console.print(f"order-0 baseline: {data.order0_bits:.3f} bits per byte, held out")
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    with device:
        model = GPT(config)
    optimizer = make_optimizer(model)
    wire_dtype = args.wire_dtype or WIRE_DTYPES[0]
    ddp = data_parallel(model, args.backend, args.hook, wire_dtype=wire_dtype)

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{num_parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, "
        f"train {data.num_train_bytes / 1e6:.1f} MB, held out {len(data.held_out) / 1e6:.1f} MB"
    )

    step_ms: list[float] = []
    timer = StepTimer(device)
    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with progress:
        bar = progress.add_task("train", total=args.steps, loss=math.nan)
        for first in range(0, args.steps, args.eval_every):
            timer.start()
            for step in range(first, min(first + args.eval_every, args.steps)):
                lr = learning_rate(step, args.steps, args.lr)
                bits = train_step(ddp, optimizer, next(data.batches), lr)
                timer.mark()
                progress.update(bar, advance=1)
            step_ms += timer.step_ms()
            progress.update(bar, loss=float(bits))
            held_out = held_out_bits(model, data.held_out, config.context)
            console.print(
                f"step {step + 1:4d}  loss {float(bits):.3f}  "
                f"held out {held_out:.3f} bits per byte  "
                f"{statistics.median(step_ms):.1f} ms per step"
            )

    spread = parameter_spread(model)
    console.print(f"largest parameter difference between ranks: {spread:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
