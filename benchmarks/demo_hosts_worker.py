"""One rank of benchmarks/demo_hosts.py, in the namespace of its host: trains and measures.

    python demo_hosts_worker.py JOB.json RESULTS.json     # rank 0 writes the results

The environment is that of host_network.rank_environments. Between hosts rota's gradients and
differences have the variant's dtype, within a host they are float32. A worker of LocalSGD and
DiLoCo is a host: its ranks average their gradients in every step, as one group.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import demo
import demo_report
import local_sgd
import report
import rota
from demo_model import train_gpt
from host_network import Traffic

# 0.46 M parameters: their gradients, 1.8 MB, take a link of 1 Gbit/s 15 ms, of 100 Mbit/s 154 ms.
CONFIG = replace(train_gpt.SCALES["cpu"].config, num_layers=2, width=128)
COLORS = ("#8a1c7c", "#5b4a9e", "#a89be0", "#7a6a4f", "#d2c14a", "#d08ac4")  # of EveryFewSteps


@dataclass(frozen=True)
class EveryStep:
    """DistributedDataParallel with rota's fused hook."""

    label: str
    color: str
    wire_dtype: torch.dtype  # between hosts

    def start(self, initial: train_gpt.GPT) -> demo.Run:
        model = copy.deepcopy(initial)
        ddp = train_gpt.data_parallel(model, "rota", "none", dist.new_group(backend="rota"))
        ddp.register_comm_hook(hook_state(self.wire_dtype, model=ddp), rota.fused_hook)
        return demo.Run(model, ddp, train_gpt.make_optimizer(model))


@dataclass(frozen=True)
class EveryFewSteps:
    """LocalSGD or DiLoCo between hosts, DistributedDataParallel within each."""

    outer: local_sgd.Variant
    color: str

    @property
    def label(self) -> str:
        return self.outer.label

    def start(self, initial: train_gpt.GPT) -> demo.Run:
        model = copy.deepcopy(initial)
        everyone = dist.new_group(backend="rota")
        ddp = train_gpt.data_parallel(model, "rota", "none", group_of_host(everyone))
        optimizer = train_gpt.make_optimizer(model)
        state = hook_state(self.outer.wire_dtype, group=everyone)
        outer = local_sgd.make_outer(self.outer, model, state)
        optimizer.register_step_post_hook(lambda *_: outer.step())
        return demo.Run(model, ddp, optimizer, finish=outer.sync)


def hook_state(wire_dtype: torch.dtype, **options: Any) -> rota.HookState:
    """A state with this dtype between hosts, and error feedback if it is narrow."""
    return rota.HookState(
        wire_dtype=torch.float32,
        inter_wire_dtype=wire_dtype,
        error_feedback=wire_dtype != torch.float32,
        **options,
    )


def group_of_host(everyone: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of this rank's host; a collective call."""
    hosts = rota.Communicator(everyone).hosts
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(hosts, backend="rota")
    return group


_OUTER = [
    (name, variant)
    for name, variant in local_sgd.VARIANTS.items()
    if variant.method in (local_sgd.LOCAL_SGD, local_sgd.DILOCO)
]
VARIANTS: dict[str, demo.Startable] = {
    "none": demo.VARIANTS["none"],
    "gloo": demo.VARIANTS["gloo"],
    "rota": EveryStep("rota, float32", "#12497f", torch.float32),
    "rota_fp16": EveryStep("rota, float16", "#6fb1e8", torch.float16),
    "rota_fp8": EveryStep("rota, float8_e4m3fn", "#2a9d6f", torch.float8_e4m3fn),
    **{
        name: EveryFewSteps(variant, color)
        for (name, variant), color in zip(_OUTER, cycle(COLORS), strict=False)
    },
}


def train(args: argparse.Namespace) -> dict[str, demo_report.Result]:
    """The results of each variant; the same on every rank."""
    runs = demo.train_in_turns(
        args,
        *train_gpt.read_corpus(),
        Console(quiet=dist.get_rank() != 0),
        variants=VARIANTS,
        config=CONFIG,
        paces={
            name: args.pace for name in args.variants if isinstance(VARIANTS[name], EveryFewSteps)
        },
        count_sent=lambda: Traffic.now().sent,
    )
    return {name: demo.gather(VARIANTS[name], run) for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="the arguments of the training, as JSON")
    parser.add_argument("results", type=Path)
    paths = parser.parse_args()
    args = argparse.Namespace(**json.loads(paths.job.read_text()))

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = train(args)
    if dist.get_rank() == 0:
        as_dicts = {name: asdict(result) for name, result in results.items()}
        report.write_whole(paths.results, json.dumps(as_dicts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
