"""A training step of GPT-2 (124 million parameters) under DDP: rota's hook, AMP and clipping beside
torch's.

One rank, so nothing is reduced: it shows what each side adds to a step, on the GPU and on the host.
The model has random weights and random tokens. Both sides compute in float16 with a loss scale,
send float16, clip by norm and update with fused AdamW; they take turns. Without transformers it is
the demo's model in GPT-2's size, whose vocabulary of bytes leaves 85 million parameters.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import rota
from demo_model import train_gpt
from gpu import bench
from gpu.bench import Bench

OP = "training step of GPT-2"
TORCH = "torch: fp16_compress_hook, GradScaler, clip_grad_norm_"
ROTA = "rota: fused_hook, amp.GradScaler, clip by the optimizer"
CONTEXT, BATCH = 1024, 4
NUM_TURNS, STEPS_PER_TURN = 3, 10
MAX_NORM = 1.0


class DemoGPT(nn.Module):
    """The demo's model, called like a model of transformers."""

    def __init__(self, config: train_gpt.GPTConfig, device: torch.device) -> None:
        super().__init__()
        with device:
            self.gpt = train_gpt.GPT(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(tokens[:, :-1], tokens[:, 1:])
        return loss


class TransformersGPT2(nn.Module):
    """transformers' model with its default configuration, the smallest GPT-2's, without dropout."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        with device:
            self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


@dataclass
class Side:
    label: str
    step: Callable[[], torch.Tensor]  # returns the loss
    host_us: list[float]  # of the hook, for each bucket


def make_side(label: str, is_rota: bool, model: nn.Module, tokens: torch.Tensor) -> Side:
    """The model under DDP, and what a training loop does in a step."""
    ddp = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    hook: Any = rota.fused_hook if is_rota else default_hooks.fp16_compress_hook
    state: Any = rota.HookState(model=ddp, wire_dtype=torch.float16) if is_rota else None
    scaler: Any = rota.amp.GradScaler(state, "cuda") if is_rota else torch.amp.GradScaler("cuda")
    host_us: list[float] = []

    @functools.wraps(hook)  # DDP looks at a hook's annotations
    def timed_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin_ns = perf_counter_ns()
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        host_us.append((perf_counter_ns() - begin_ns) / 1e3)
        return future

    ddp.register_comm_hook(state, timed_hook)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            loss: torch.Tensor = ddp(tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if is_rota:
            rota.clip_grad_norm_(ddp.parameters(), MAX_NORM, optimizer=optimizer)
        else:
            nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Side(label, step, host_us)


def make_model(bench: Bench) -> tuple[nn.Module, torch.Tensor]:
    if bench.is_small:
        config = train_gpt.GPTConfig(context=16, num_layers=1, num_heads=2, width=32)
        model: nn.Module = DemoGPT(config, bench.device)
    else:
        try:
            model = TransformersGPT2(bench.device)
        except ImportError:
            config = train_gpt.GPTConfig(CONTEXT, num_layers=12, num_heads=12, width=768)
            model = DemoGPT(config, bench.device)
    # One more than the context of the demo's model, which predicts the next one.
    shape = (2, 17) if bench.is_small else (BATCH, CONTEXT + isinstance(model, DemoGPT))
    tokens = torch.randint(train_gpt.BYTES, shape, generator=torch.Generator().manual_seed(0))
    return model, tokens.to(bench.device)


def benchmark(bench: Bench) -> None:
    """Both sides in turns, on one process group."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        # Gloo on a simulated GPU, which has no NCCL.
        backend = "gloo" if bench.is_small else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            train_in_turns(bench)
        finally:
            dist.destroy_process_group()


def train_in_turns(bench: Bench) -> None:
    """Records a row for each side's step and one for its hook on the host."""
    torch.manual_seed(0)
    model, tokens = make_model(bench)
    both = ((TORCH, False, model), (ROTA, True, copy.deepcopy(model)))
    sides = [make_side(*side, tokens) for side in both]
    losses = {side.label: [float(side.step()) for _ in range(3)] for side in sides}  # warm up
    for side in sides:
        side.host_us.clear()
    times_ms: dict[str, list[float]] = {side.label: [] for side in sides}
    num_turns, num_steps = (1, 2) if bench.is_small else (NUM_TURNS, STEPS_PER_TURN)
    for turn in range(num_turns):
        for side in sides[turn % 2 :] + sides[: turn % 2]:
            timer = train_gpt.StepTimer(bench.device)
            timer.start()
            for _ in range(num_steps):
                loss = side.step()
                timer.mark()
            times_ms[side.label] += timer.step_ms()
            losses[side.label].append(float(loss))
    for side in sides:
        num_buckets = len(side.host_us) // (num_turns * num_steps)
        step_us = [ms * 1e3 for ms in times_ms[side.label]]
        bench.keep_times(step_us, label=side.label, op=OP, losses=losses[side.label])
        op = "its hook on the host, for each bucket"
        bench.keep_times(side.host_us, label=side.label, op=op, buckets=num_buckets)


if __name__ == "__main__":
    bench.main("gpt2", __doc__, benchmark, "1", "1")
