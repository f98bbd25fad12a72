"""Trains the demo's GPT on 8 ranks with data, pipeline and tensor parallelism, and on 1 rank.

    python examples/train_3d.py                     # 50 steps in float32, starts its own ranks
    python examples/train_3d.py --float16 --inf-step 3 --steps 10 --context 16

The second trains on short sequences: torch's products of float16 take 10 to 30 times as long as
those of float32 on a CPU without instructions for them.

Two data-parallel copies of the model have two pipeline stages each, and each stage's matrices are
cut over two tensor-parallel ranks. torch's pipelining and DTensor do the latter two over the
backend rota. rota.reduce_gradients averages the gradients of the copies, and the HookState's
model_group lets all ranks of a copy clip by one norm and skip the same steps.

The run fails if the losses, the norms or the skipped steps of the two runs differ. --inf-step puts
an Inf into one gradient of one rank, in the stage that --inf-in names.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from run_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_gpt import GPT, SCALES, learning_rate, norm, positive, read_corpus, sample_batch

import rota

NUM_COPIES, NUM_STAGES, NUM_SHARDS = 2, 2, 2
NUM_RANKS = NUM_COPIES * NUM_STAGES * NUM_SHARDS
NUM_MICROBATCHES = 4  # of one sequence
MAX_NORM = 1.0
CONFIG = SCALES["cpu"].config


class Tolerance(NamedTuple):
    """The largest differences between the two runs that count as none."""

    loss: float  # nats per byte
    norm: float  # relative


# Matrices that are cut are summed in another order. In float16 each product is also rounded.
FLOAT32 = Tolerance(loss=1e-5, norm=1e-4)
FLOAT16 = Tolerance(loss=1e-3, norm=1e-3)


@dataclass
class Report:
    """What a rank has to say about its run, by step."""

    losses: list[float] = field(default_factory=list)  # of the last stage: nats per byte
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)  # whether its parameters stayed as they were
    idle_shares: list[float] = field(default_factory=list)
    memory_mb: float = 0.0  # peak of parameters, gradients, optimizer, activations and transport


# ---------------------------------------------------------------------------------------------
# The model in parts


class Stage(nn.Module):
    """Consecutive blocks of a GPT; the first stage embeds, the last one returns logits."""

    def __init__(self, model: GPT, index: int, num_stages: int, float16: bool) -> None:
        super().__init__()
        size = len(model.blocks) // num_stages
        self.embedding = model.embedding if index == 0 else None
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.head = model.head if index == num_stages - 1 else None
        self.cos, self.sin = model.cos, model.sin
        self.float16 = float16

    def forward(self, x: Tensor) -> Tensor:  # (batch, time), or activations (batch, time, width)
        with torch.autocast("cpu", torch.float16, enabled=self.float16):
            if self.embedding is not None:
                x = norm(self.embedding(x))
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return x if self.head is None else self.head(norm(x))


def cut_matrices(stage: Stage, mesh: Any) -> None:
    """Leaves this rank its heads and its columns of each MLP; embedding and head stay whole."""
    for block in stage.blocks:
        weight = block.get_parameter("qkv.weight")
        # The rows are those of all queries, all keys and all values, of which each rank needs its
        # heads' ones in sequence.
        rows = weight.detach().view(3, NUM_SHARDS, -1, CONFIG.width).transpose(0, 1)
        weight.data = rows.reshape(weight.shape)
        columns, rows_of_input = ColwiseParallel(), RowwiseParallel()
        plan = {"qkv": columns, "attention_out": rows_of_input}
        parallelize_module(block, mesh, plan | {"mlp_in": columns, "mlp_out": rows_of_input})


class TimedStage(PipelineStage):
    """Reports each of its computations as report(is_forward, microbatch, seconds)."""

    def __init__(
        self,
        part: nn.Module,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        report: Callable[[bool, int, float], None],
    ) -> None:
        super().__init__(part, index, num_stages, torch.device("cpu"), group=group)
        self._report = report

    @contextlib.contextmanager
    def _timed(self, is_forward: bool, microbatch: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._report(is_forward, microbatch, time.perf_counter() - start)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(True, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed(False, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


# ---------------------------------------------------------------------------------------------
# Training


class Training:
    """The optimizer of some parameters, and the report of what it did."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, is_hit: bool) -> None:
        """is_hit: --inf-step puts the Inf into a gradient of this rank."""
        self.parameters = list(model.parameters())
        self.report = Report()
        self._args = args
        self._step = 0
        # A fused optimizer takes no list of DTensors and plain tensors.
        groups: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()],
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        if is_hit:
            weight = getattr(model, args.inf_in).weight
            weight.register_hook(self._put_inf)

    def _put_inf(self, gradient: Tensor) -> Tensor:
        return gradient + torch.inf if self._step == self._args.inf_step else gradient

    def begin_step(self) -> None:
        self._before = self.parameters[0].detach().clone()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._step, self._args.steps, SCALES["cpu"].lr)
        self.optimizer.zero_grad()

    def end_step(self, norm_of_step: Tensor, scaler: torch.amp.GradScaler) -> None:
        scaler.step(self.optimizer)
        scaler.update()
        self.report.norms.append(norm_of_step.item())
        before, after = (local(t) for t in (self._before, self.parameters[0]))
        self.report.skipped.append(torch.equal(before, after))
        self._step += 1


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_alone(args: argparse.Namespace, model: GPT, batches: tuple[Tensor, Tensor]) -> Report:
    """With torch alone. batches: inputs and targets, (steps, copies, sequences, time) each."""
    stage = Stage(model, 0, 1, args.float16)
    training = Training(stage, args, is_hit=True)
    scaler = torch.amp.GradScaler("cpu", enabled=args.float16)
    for inputs, targets in zip(*batches, strict=True):
        training.begin_step()
        loss = loss_of(stage(inputs.flatten(0, 1)), targets.flatten(0, 1))
        scaler.scale(loss).backward()
        training.report.losses.append(loss.item())
        scaler.unscale_(training.optimizer)
        total = nn.utils.clip_grad_norm_(training.parameters, MAX_NORM)
        training.end_step(total, scaler)
    return training.report


def train_in_parts(args: argparse.Namespace, model: GPT, batches: tuple[Tensor, Tensor]) -> Report:
    """On NUM_RANKS ranks; arguments as for train_alone."""
    shape, names = (NUM_COPIES, NUM_STAGES, NUM_SHARDS), ("copy", "stage", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    copy, index, shard = (mesh.get_local_rank(name) for name in names)
    part = Stage(model, index, NUM_STAGES, args.float16)
    cut_matrices(part, mesh["shard"])
    hit_stage = 0 if args.inf_in == "embedding" else NUM_STAGES - 1
    training = Training(part, args, is_hit=(copy, index, shard) == (0, hit_stage, 0))

    state = rota.HookState(
        mesh.get_group("copy"),
        torch.float16 if args.float16 else torch.float32,
        model=part,
        model_group=mesh["stage", "shard"]._flatten("model").get_group(),
        replicas=lambda parameter: NUM_SHARDS,  # of what is no DTensor: the embedding and the head
    )
    scaler = rota.amp.GradScaler(state, enabled=args.float16)
    loss_scale = torch.ones(())

    def scaled_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) * loss_scale / NUM_MICROBATCHES

    busy_s: list[float] = []  # of each computation of a step

    def record(is_forward: bool, microbatch: int, seconds: float) -> None:
        busy_s.append(seconds)

    stage = TimedStage(part, index, NUM_STAGES, mesh.get_group("stage"), record)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=scaled_loss, scale_grads=False)
    for inputs, targets in zip(*batches, strict=True):
        training.begin_step()
        loss_scale = scaler.scale(torch.ones(()))  # on every rank, whether it has a loss or not
        losses: list[Tensor] = []
        busy_s.clear()
        start = time.perf_counter()
        with reduction(args, training.parameters, state):
            if index == 0:
                schedule.step(inputs[copy])
            else:
                schedule.step(target=targets[copy], losses=losses)
            step_s = time.perf_counter() - start
        training.report.idle_shares.append(1 - sum(busy_s) / step_s)
        if losses:
            training.report.losses.append((torch.stack(losses).sum() / loss_scale).item())
        scaler.unscale_(training.optimizer)
        total = rota.clip_grad_norm_(training.parameters, MAX_NORM)
        training.end_step(total, scaler)
    return training.report


@contextlib.contextmanager
def reduction(
    args: argparse.Namespace, parameters: list[nn.Parameter], state: rota.HookState
) -> Iterator[None]:
    """Averages the gradients over the copies: while they come, or at the end of the context."""
    if args.overlap:
        with rota.overlap_gradients(parameters, state, num_backwards=NUM_MICROBATCHES):
            yield
    else:
        yield
        rota.reduce_gradients(parameters, state)


# ---------------------------------------------------------------------------------------------
# Processes


def memory_mb(name: str) -> float:
    """VmRSS, the memory of this process now, or VmHWM, its peak."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024 / 1e6


def train(rank: int, args: argparse.Namespace, batches: tuple[Tensor, Tensor]) -> Report:
    """One rank, which may be alone."""
    before_mb = memory_mb("VmRSS")
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = GPT(replace(CONFIG, context=args.context))
    is_alone = dist.get_world_size() == 1
    report = (train_alone if is_alone else train_in_parts)(args, model, batches)
    report.memory_mb = memory_mb("VmHWM") - before_mb
    return report


def largest(differences: Iterable[float]) -> float:
    """The largest magnitude; NaN if there is one."""
    return torch.tensor(list(differences)).abs().max().item()


def problems_of(alone: Report, ranks: list[Report], tolerance: Tolerance) -> list[str]:
    """Prints how the two runs compare, and returns what differs."""
    losses = [rank.losses for rank in ranks if rank.losses]
    means = [statistics.fmean(values) for values in zip(*losses, strict=True)]
    loss_difference = largest(a - b for a, b in zip(alone.losses, means, strict=True))
    norms = zip(alone.norms, ranks[0].norms, strict=True)
    norm_difference = largest((a - b) / a for a, b in norms if math.isfinite(a))
    print(f"loss of the first step {alone.losses[0]:.5f}, of the last {alone.losses[-1]:.5f}")
    print(f"largest difference of a loss from 1 rank: {loss_difference:.2g} nats per byte")
    print(f"largest difference of a norm from 1 rank: {norm_difference:.2g} of the norm")
    skipped = [step for step, is_skipped in enumerate(alone.skipped) if is_skipped]
    print(f"skipped steps: {skipped or 'none'}")
    problems = []
    if not loss_difference <= tolerance.loss:
        problems.append(f"losses differ by more than {tolerance.loss}")
    if not norm_difference <= tolerance.norm:
        problems.append(f"norms differ by more than {tolerance.norm}")
    if any(str(rank.norms) != str(ranks[0].norms) for rank in ranks):
        problems.append("ranks have different norms")
    if any(rank.skipped != alone.skipped for rank in ranks):
        problems.append(f"ranks have skipped other steps: {[rank.skipped for rank in ranks]}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive(int), default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--context", type=positive(int), default=CONFIG.context, help="bytes in a sequence"
    )
    parser.add_argument(
        "--float16", action="store_true", help="autocast, and gradients on the wire"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="reduce gradients in the backward pass"
    )
    parser.add_argument("--inf-step", type=int, help="for --float16, whose scaler skips it")
    parser.add_argument("--inf-in", choices=("embedding", "head"), default="head")
    args = parser.parse_args()
    if args.inf_step is not None and not args.float16:
        parser.error("--inf-step needs --float16: in float32 no scaler skips the step")

    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks
    text, _ = read_corpus()
    samples = [
        sample_batch(text, NUM_MICROBATCHES, args.context, (args.seed, copy, step))
        for step in range(args.steps)
        for copy in range(NUM_COPIES)
    ]
    shape = (args.steps, NUM_COPIES, NUM_MICROBATCHES, args.context)
    batches = tuple(torch.stack(tensors).view(shape) for tensors in zip(*samples, strict=True))
    (alone,) = run_ranks(1, train, args, batches)
    ranks = run_ranks(NUM_RANKS, train, args, batches)

    problems = problems_of(alone, ranks, FLOAT16 if args.float16 else FLOAT32)
    idle = statistics.median(share for rank in ranks for share in rank.idle_shares)
    bubble = (NUM_STAGES - 1) / (NUM_MICROBATCHES + NUM_STAGES - 1)
    print(
        f"a rank waits {idle:.0%} of the pipeline's time (median); with a core for each rank, 1F1B "
        f"leaves {bubble:.0%} idle (here {os.cpu_count()} cores for {NUM_RANKS} ranks)"
    )
    peak = max(rank.memory_mb for rank in ranks)
    print(f"memory of a rank: {peak:.0f} MB at most, of 1 rank alone: {alone.memory_mb:.0f} MB")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
