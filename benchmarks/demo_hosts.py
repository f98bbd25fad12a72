"""Trains the demo's GPT over hosts that network namespaces simulate, and shows loss over time.

    python benchmarks/demo_hosts.py            # starts its own hosts; tables, a picture and JSON
    python benchmarks/demo_hosts.py --quick    # a few steps, to see that it runs

At each rate it compares flat Gloo with rota in float32, float16 and float8 between hosts, and with
DiLoCo, whose workers are the hosts. As in demo.py, variants take turns in blocks of a few steps,
from the same weights, on the same batches. LocalSGD and DiLoCo take 1.2 times as many steps
(--pace), which ends at about the same loss. Communication is a variant's step minus that of ranks
that do not communicate. Bytes are counted at the interface of the host that sends most, headers
included (once for each packet of many segments). Further seeds train over links that are not
limited, since losses do not depend on the rate; their spread is what differences of the final loss
are compared with.

It needs the permission to make network namespaces. All hosts share the cores of this machine. Two
ranks a host are the fewest that have something to add within it, which flat Gloo does not know of.
Between hosts rota's gradients and differences have the variant's dtype, within a host they are
float32. A worker of LocalSGD and DiLoCo is a host: its ranks average their gradients in every step.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import demo
import local_sgd
import rota
import turns
from arguments import Parser, parse_each, parse_list, parse_natural
from convergence import print_losses
from demo_hosts_report import (
    ALONE,
    BASE,
    AtRate,
    curves_of,
    draw,
    losses_of,
    print_steps,
    rows_of,
)
from demo_model import train_gpt
from demo_report import Result
from host_network import HostNetwork, Traffic
from hosts import add_hosts, parse_rate
from record import Run
from workers import Workers

QUICK_STEPS = 6
DEFAULT_VARIANTS = "none,gloo,rota,rota_fp16,rota_fp8,diloco_16,diloco_16_fp8"
# 0.46 M parameters: their gradients, 1.8 MB, take a link of 1 Gbit/s 15 ms, of 100 Mbit/s 154 ms.
CONFIG = replace(train_gpt.SCALES["cpu"].config, num_layers=2, width=128)


@dataclass(frozen=True)
class EveryStep:
    label: str
    color: str
    wire_dtype: torch.dtype  # between hosts

    def start(self, initial: train_gpt.GPT) -> demo.Run:
        model = copy.deepcopy(initial)
        ddp = train_gpt.data_parallel(model, "rota", "none", dist.new_group(backend="rota"))
        state = rota.HookState(
            model=ddp,
            wire_dtype=torch.float32,
            inter_wire_dtype=self.wire_dtype,
            error_feedback=self.wire_dtype != torch.float32,
        )
        ddp.register_comm_hook(state, rota.fused_hook)
        return demo.Run(model, ddp, train_gpt.make_optimizer(model))


VARIANTS: dict[str, demo.Startable] = {
    "none": demo.VARIANTS["none"],
    "gloo": demo.VARIANTS["gloo"],
    "rota": EveryStep("rota, float32", "#12497f", torch.float32),
    "rota_fp16": EveryStep("rota, float16", "#6fb1e8", torch.float16),
    "rota_fp8": EveryStep("rota, float8_e4m3fn", "#2a9d6f", torch.float8_e4m3fn),
    **local_sgd.OUTER,
}


def rank_main(pipe: Connection, args: argparse.Namespace) -> dict[str, Result]:
    """Trains on one rank, in the namespace of its host: the same results on every rank."""
    dist.init_process_group("gloo")
    runs = demo.train_in_turns(
        args,
        *train_gpt.read_corpus(),
        Console(quiet=dist.get_rank() != 0),
        variants=VARIANTS,
        config=CONFIG,
        paces=dict.fromkeys(local_sgd.OUTER, args.pace),
        count_sent=lambda: Traffic.now().sent,
    )
    return {name: demo.gather(VARIANTS[name], run) for name, run in runs.items()}


def train(args: argparse.Namespace, rate: str | None, seed: int, variants: Sequence[str]) -> AtRate:
    more = {"seed": seed, "variants": variants, "max_minutes": local_sgd.MAX_MINUTES}
    job = argparse.Namespace(**{**vars(args), **more})
    with (
        HostNetwork(len(args.hosts), rate) as network,
        Workers(timeout_s=2 * 60 * local_sgd.MAX_MINUTES) as ranks,
    ):
        for place in network.places(args.hosts):
            # A rank that waits long for a core is not lost.
            place["env"]["ROTA_HOST_SILENCE_MS"] = "30000"
            ranks.fork(rank_main, job, **place)
        results = ranks.recv_all()[0]
        return AtRate(str(rate or "unlimited"), network.describe(), results)


def main() -> None:
    """Exits with 0 if all trained and all replicas of a variant are equal."""
    parser = Parser(__doc__)
    add = parser.add
    add_hosts(parser)
    rates = "of each link in each direction, one run each"
    add("--rates", type=parse_each(parse_rate), default="1gbit,100mbit", help=rates)
    some = f"{ALONE}, {BASE}, and some of {','.join(VARIANTS)}"
    add("--variants", type=parse_list(list(VARIANTS)), default=DEFAULT_VARIANTS, help=some)
    seeds = "of which the first trains at every rate"
    add("--seeds", type=parse_natural(1), default=3, help=seeds)
    pace = "steps of LocalSGD and DiLoCo for each of the others"
    add("--pace", type=train_gpt.positive(float), default=1.2, help=pace)
    # 4 ranks then have the 8 sequences of demo.py's 2 in a step. A smaller model takes a larger lr.
    args = turns.parse_arguments(parser, QUICK_STEPS, batch=2, lr=4e-3)
    if missing := {ALONE, BASE} - set(args.variants):
        parser.error(f"--variants: {', '.join(sorted(missing))} is missing, to compare with")
    if args.quick:
        args.seeds = 1

    name = f"demo-hosts-{'+'.join(map(str, args.hosts))}"
    with Run("demo_hosts", sum(args.hosts), args, name) as run:
        at_rates = []
        for rate in args.rates:
            run.console.print(f"links of {rate or 'any rate'}, seed {args.seed}")
            at_rates.append(train(args, rate, args.seed, args.variants))
        further = []
        for seed in range(args.seed + 1, args.seed + args.seeds):
            run.console.print(f"seed {seed}")
            trained = [name for name in args.variants if name != ALONE]
            further.append(train(args, None, seed, trained).results)

        baseline_bits = train_gpt.order0_bits(*train_gpt.read_corpus())
        steps = [rows_of(at_rate) for at_rate in at_rates]
        losses = losses_of(at_rates, further)
        png_path = run.json_path.with_suffix(".png")
        draw(png_path, at_rates, baseline_bits, run.subtitle())
        for rows in steps:
            print_steps(run.console, rows)
        print_losses(run.console, losses)
        run.console.print(f"picture: {png_path}\nrecord: {run.json_path}", soft_wrap=True)
        results = [*(at_rate.trained for at_rate in at_rates), *further]
        # Replicas that differ between ranks after training.
        num_wrong = sum(one.spread != 0 for of_run in results for one in of_run.values())
        summary: dict[str, Any] = {"step_times": [row for rows in steps for row in rows]}
        summary["held_out"] = losses
        run.finish(
            {
                "networks": [at_rate.network for at_rate in at_rates],
                "order0_bits": round(baseline_bits, 4),
                **summary,
                "curves": curves_of(at_rates),
            },
            num_wrong=num_wrong,
            **summary,
        )


if __name__ == "__main__":
    main()
