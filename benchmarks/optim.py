"""From the start of backward to updated parameters on all ranks: rota.optim beside other ways.

    python benchmarks/optim.py                     # starts its own ranks; a table and a record
    python benchmarks/optim.py --ranks 4 --sizes 25 --clip

All variants run in one job, each with its own replica under DistributedDataParallel, and take turns
step by step; a step's time is that of its slowest rank. The backward pass hands out gradients that
lie ready, so it only copies them into DDP's buckets. What is left is a variant's median step minus
that of the variant whose hook only meets: its ranks wait for each other at each bucket, and update
nothing.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the
# types themselves, and refuses strings.

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import demo
import rota
import rota.optim
import turns
from arguments import Parser, parse_each, parse_natural

MILLION = 10**6
TENSOR_ELEMS = 2**20
SHORT_ELEMS = 2**10  # one such tensor for each long one
WARM_UP = 3
MAX_NORM = 1.0
BASE = "meets"
OURS = "rota.optim"


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Given(nn.Module):
    """Parameters whose gradients lie ready."""

    def __init__(self, num_elems: int) -> None:
        super().__init__()
        lengths: list[int] = []
        while (left := num_elems - sum(lengths)) > 0:
            lengths += [min(left, TENSOR_ELEMS), SHORT_ELEMS]
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(length) for length in lengths)
        torch.manual_seed(2 + dist.get_rank())
        self.gradients = [torch.randn(length) for length in lengths]

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([_Given.apply(*pair) for pair in pairs]).sum()


@dataclass
class Replica:
    """One variant on this rank."""

    ddp: DistributedDataParallel
    update: Callable[[], object]  # after backward
    state_bytes: Callable[[], int]
    seconds: list[float]


def _meet(communicator: rota.Communicator, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    communicator.barrier()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def start(variant: str, num_elems: int, clips: bool) -> Replica:
    group = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(
        Given(num_elems), process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=25
    )
    parameters = list(ddp.parameters())
    if variant == BASE:
        ddp.register_comm_hook(rota.Communicator(group), _meet)
        return Replica(ddp, lambda: None, lambda: 0, [])
    state = rota.HookState(model=ddp)
    optimizer: Any
    if variant == OURS:
        optimizer = rota.optim.AdamW(parameters, state=state)
        clip: Callable[[], object] = lambda: optimizer.clip_grad_norm_(MAX_NORM)  # noqa: E731
        inner = optimizer
    elif variant == "fused hook":
        ddp.register_comm_hook(state, rota.fused_hook)
        inner = optimizer = torch.optim.AdamW(parameters, fused=True)
        clip = lambda: rota.clip_grad_norm_(parameters, MAX_NORM, optimizer=optimizer)  # noqa: E731
    else:
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, process_group=group, fused=True
        )
        inner = optimizer.optim
        clip = lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)  # noqa: E731

    def update() -> None:
        if clips:
            clip()
        optimizer.step()
        optimizer.zero_grad()

    return Replica(ddp, update, lambda: _state_bytes(inner), [])


LABELS = {
    BASE: "hook that only meets",
    OURS: "rota.optim.AdamW",
    "fused hook": "rota's fused hook, torch's AdamW(fused)",
    "zero": "torch's fp16 hook on Gloo, ZeroRedundancyOptimizer(AdamW)",
}


def measure(num_elems: int, num_steps: int, clips: bool) -> list[turns.Row]:
    """One row per variant; collective, and the same on every rank."""
    replicas = {variant: start(variant, num_elems, clips) for variant in LABELS}
    order = deque(replicas.values())
    for _ in range(WARM_UP + num_steps):
        for replica in order:
            loss = replica.ddp()
            dist.barrier()
            begin = time.perf_counter()
            loss.backward()
            replica.update()
            replica.seconds.append(time.perf_counter() - begin)
        order.rotate(-1)
    rows = []
    for variant, replica in replicas.items():
        seconds = zip(*demo.gathered(replica.seconds[WARM_UP:]), strict=True)
        rows.append(
            {
                "label": f"{LABELS[variant]}, {num_elems / MILLION:g} M",
                "variant": variant,
                "num_elems": num_elems,
                "clips": clips,
                "state_bytes": max(demo.gathered(replica.state_bytes())),
                "step_ms_of_all": [round(max(times) * 1e3, 3) for times in seconds],
            }
        )
        rows[-1]["step_ms"] = statistics.median(rows[-1]["step_ms_of_all"])
    for row in rows:
        row["left_ms"] = row["step_ms"] - rows[0]["step_ms"]
    for row in rows:
        row["over_fused"] = row["left_ms"] / rows[2]["left_ms"]
    return rows


def main() -> None:
    parser = Parser(__doc__)
    turns.add_ranks(parser)
    parser.add("--sizes", type=parse_each(parse_natural(1)), default="1,25", help="in M elements")
    parser.add("--steps", type=parse_natural(2), default=20, help="of each variant")
    parser.add("--clip", action="store_true", help=f"clip to a norm of {MAX_NORM}")
    parser.add_json()
    args = parser.parse_args()
    with turns.job("optim", args) as (run, _):
        rows = []
        for millions in args.sizes:
            rows += measure(millions * MILLION, args.steps, args.clip)
        turns.publish(
            run,
            f"from backward to parameters, {args.ranks} ranks{', clipped' * args.clip}",
            rows,
            {
                "ms": "{step_ms:.1f}",
                "without meeting": "{left_ms:.1f}",
                "x fused hook": "{over_fused:.2f}",
                "state, MB": lambda row: f"{row['state_bytes'] / MILLION:.1f}",
            },
        )


if __name__ == "__main__":
    main()
