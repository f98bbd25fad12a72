"""A step of ParameterServer in mode "sync", beside the all-reduce step and torch RPC.

    python benchmarks/parameter_server_step.py            # starts its own ranks; writes a record
    python benchmarks/parameter_server_step.py --quick    # the same in a minute, with more noise

Every variant trains its own replica of a GPT with AdamW. "exchange" is what a step adds to its
backward pass: to sum the gradients, step the optimizer and have the parameters everywhere.
"training" is the whole step, where DistributedDataParallel overlaps its sum with the backward pass.
torch RPC is the server of torch's tutorial: all parameters on rank 0, which also works; the last
gradient to come steps the optimizer, and the parameters are the reply. A parameter server has the
bits of the all-reduce, which is checked. Variants take turns; a step's time is that of its slowest
rank.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import report
import rota
import turns
from arguments import Parser, parse_list, parse_natural
from demo import BLOCK_STEPS
from demo_model import train_gpt
from rota.parameter_server import ParameterServer

GOAL = 1.3  # times the all-reduce step
SIZES = {
    "3.3M": train_gpt.SCALES["cpu"].config,
    "25M": dataclasses.replace(train_gpt.SCALES["cuda"].config, context=64),
}
NUM_SEQUENCES = {"3.3M": 4, "25M": 1}  # of a rank; few where steps are long
ALL_REDUCE = "all-reduce"
EXCHANGE, TRAINING = "exchange", "training"
QUICK_STEPS = 20


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class AllReduce:
    """Every rank sums all gradients, which lie in buckets, and steps all parameters."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.forward: nn.Module = model
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(self._parameters)
        self._communicator = rota.Communicator()
        self._bucket: torch.Tensor | None = None
        self._is_overlapped = kind == TRAINING
        if self._is_overlapped:
            self.forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            self.forward.register_comm_hook(None, rota.allreduce_hook)

    def exchange(self) -> None:
        if not self._is_overlapped:
            self._communicator.all_reduce(self._pack(), "avg")
        self._optimizer.step()

    def _pack(self) -> torch.Tensor:
        """The gradients in one bucket; only the first call copies them there."""
        if self._bucket is None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self._bucket = torch.cat([gradient.flatten() for gradient in gradients])
            lengths = [gradient.numel() for gradient in gradients]
            parts = self._bucket.split(lengths)
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        return self._bucket

    def close(self) -> None:
        self._communicator.close()


class Servers:
    """Every rank is a server."""

    def __init__(self, model: nn.Module, kind: str, replicas: int = 1) -> None:
        self.forward = model
        self._server = ParameterServer(model, make_optimizer, replicas=replicas)

    def exchange(self) -> None:
        self._server.step()

    def close(self) -> None:
        self._server.close()


class RpcState:
    """On rank 0: the parameters, and the replies that are due after the next update."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
        self.optimizer = make_optimizer(self.parameters)
        self.lock = threading.Lock()
        self.num_pushed = 0
        self.reply: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()


_rpc_state: RpcState | None = None


@rpc.functions.async_execution  # type: ignore[untyped-decorator, unused-ignore]
def push_by_rpc(
    gradients: list[torch.Tensor], num_workers: int
) -> torch.futures.Future[list[torch.Tensor]]:
    """Runs on rank 0; replies when all workers' gradients are applied."""
    state = _rpc_state
    assert state is not None
    with state.lock, torch.no_grad():
        reply = state.reply
        for parameter, gradient in zip(state.parameters, gradients, strict=True):
            if state.num_pushed == 0:
                parameter.grad = gradient
            else:
                assert parameter.grad is not None
                parameter.grad += gradient
        state.num_pushed += 1
        if state.num_pushed == num_workers:
            for parameter in state.parameters:
                assert parameter.grad is not None
                parameter.grad /= num_workers
            state.optimizer.step()
            state.num_pushed = 0
            state.reply = torch.futures.Future()
            reply.set_result([parameter.detach() for parameter in state.parameters])
    return reply


class Rpc:
    def __init__(self, model: nn.Module, kind: str) -> None:
        global _rpc_state
        self.forward = model
        self._parameters = list(model.parameters())
        if dist.get_rank() == 0:
            _rpc_state = RpcState(self._parameters)
        dist.barrier()

    def exchange(self) -> None:
        gradients = [p.grad for p in self._parameters]
        reply = rpc.rpc_sync("0", push_by_rpc, (gradients, dist.get_world_size()))
        with torch.no_grad():
            for parameter, value in zip(self._parameters, reply, strict=True):
                parameter.copy_(value)

    def close(self) -> None:
        dist.barrier()


# What to print, and what to call with the model and the kind.
VARIANTS: dict[str, tuple[str, Callable[[nn.Module, str], Any]]] = {
    ALL_REDUCE: ("all-reduce of rota, AdamW on every rank", AllReduce),
    "parameter server": ("rota.ParameterServer", Servers),
    "without replicas": ("rota.ParameterServer, replicas=0", partial(Servers, replicas=0)),
    "torch rpc": ("torch RPC, one server", Rpc),
}


def measure(size: str, kind: str, args: Any, console: Console) -> dict[str, list[float]]:
    """Milliseconds of each step's slowest rank, without the first block, by variant."""
    num_sequences, context = NUM_SEQUENCES[size], SIZES[size].context
    text, _ = train_gpt.read_corpus()
    torch.manual_seed(args.seed)
    initial = train_gpt.GPT(SIZES[size])
    variants = {name: make(copy.deepcopy(initial), kind) for name, (_, make) in VARIANTS.items()}
    step_ms: dict[str, list[float]] = {name: [] for name in variants}

    def backward(variant: Any, step: int) -> None:
        key = (args.seed, dist.get_rank(), step)
        batch = train_gpt.sample_batch(text, num_sequences, context, key)
        variant.forward.zero_grad()
        variant.forward(*batch).backward()

    if kind == EXCHANGE:  # every step with the gradients of the first
        for variant in variants.values():
            backward(variant, 0)
    for name, steps in turns.in_turns(variants, args.steps, console):
        for step in steps:
            dist.barrier()
            begin = time.perf_counter()
            if kind == TRAINING:
                backward(variants[name], step)
            variants[name].exchange()
            step_ms[name].append((time.perf_counter() - begin) * 1e3)
    if kind == TRAINING:
        check_bits(variants)
    for variant in variants.values():
        variant.close()
    return {name: turns.slowest_ranks(times) for name, times in step_ms.items()}


def check_bits(variants: dict[str, Any]) -> None:
    """Raises if the parameter server's parameters differ from the all-reduce's."""
    first, second = (
        variants[name].forward.parameters() for name in (ALL_REDUCE, "parameter server")
    )
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise AssertionError("the parameter server's parameters are not those of the all-reduce")


def rows_of(size: str, kind: str, step_ms: dict[str, list[float]]) -> list[dict[str, Any]]:
    median = {name: statistics.median(times) for name, times in step_ms.items()}
    return [
        {
            "label": f"{size} {kind}: {VARIANTS[name][0]}",
            "variant": name,
            "size": size,
            "kind": kind,
            "step_ms": round(median[name], 3),
            "min_ms": round(min(times), 3),
            "ratio": round(median[name] / median[ALL_REDUCE], 3),
            "step_ms_of_all": [round(value, 2) for value in times],
        }
        for name, times in step_ms.items()
    ]


COLUMNS: report.Columns = {
    "median": "{step_ms:.1f}",
    "min": "{min_ms:.1f}",
    "over\nall-reduce": "{ratio:.2f}",
}


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    parser = Parser(__doc__)
    turns.add_ranks(parser)
    parser.add("--sizes", type=parse_list(list(SIZES)), default="3.3M,25M")
    parser.add("--kinds", type=parse_list([EXCHANGE, TRAINING]), default="exchange,training")
    parser.add("--steps", type=parse_natural(BLOCK_STEPS + 1), default=60)
    parser.add("--quick", action="store_true", help=f"at most {QUICK_STEPS} steps of each variant")
    parser.add("--seed", type=int, default=0)
    parser.add_json()
    args = parser.parse_args()
    if args.quick:
        args.steps = min(args.steps, QUICK_STEPS)
    with turns.job("parameter_server", args, backend="rota") as (run, console):
        rpc.init_rpc(str(dist.get_rank()), rank=dist.get_rank(), world_size=dist.get_world_size())
        rows = []
        for size in args.sizes:
            for kind in args.kinds:
                rows += rows_of(size, kind, measure(size, kind, args, console))
        rpc.shutdown()
        title = f"a step in ms, {args.ranks} workers (goal: {GOAL} times the all-reduce)"
        turns.publish(run, title, rows, COLUMNS)


if __name__ == "__main__":
    main()
