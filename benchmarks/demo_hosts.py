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
are compared with. The last line is JSON.

It needs the permission to make network namespaces. All hosts share the cores of this machine. Two
ranks a host are the fewest that have something to add within it, which flat Gloo does not know of.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    start_processes,
)

import driver
import turns
from arguments import Parser, parse_list, parse_natural
from convergence import print_table
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
from demo_hosts_worker import VARIANTS
from demo_model import train_gpt
from demo_report import Result
from host_network import HostNetwork, rank_environments
from hosts import parse_hosts, parse_rate
from ranks import RankError

QUICK_STEPS = 6
DEFAULT_VARIANTS = "none,gloo,rota,rota_fp16,rota_fp8,diloco_16,diloco_16_fp8"
MAX_MINUTES = 60.0  # of one seed at one rate; a limit would cut off some of the runs to compare


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--hosts",
        type=parse_hosts,
        default="2x2",
        help="hosts x ranks on each, or ranks host by host as in 3,1 (default: 2x2)",
    )
    add(
        "--rates",
        type=lambda text: [parse_rate(rate) for rate in text.split(",")],
        default="1gbit,100mbit",
        help="of each link in each direction, one run each (default: %(default)s)",
    )
    add(
        "--variants",
        type=parse_list(list(VARIANTS)),
        default=DEFAULT_VARIANTS,
        help=f"{ALONE}, {BASE}, and some of {','.join(VARIANTS)} (default: %(default)s)",
    )
    add(
        "--seeds",
        type=parse_natural(1),
        default=3,
        help="of which the first trains at every rate (default: 3)",
    )
    add(
        "--pace",
        type=train_gpt.positive(float),
        default=1.2,
        help="steps of LocalSGD and DiLoCo for each of the others (default: %(default)s)",
    )
    # 4 ranks then have the 8 sequences of demo.py's 2 in a step. A smaller model takes a larger lr.
    args: argparse.Namespace = turns.parse_arguments(parser, QUICK_STEPS, batch=2, lr=4e-3)
    if missing := {ALONE, BASE} - set(args.variants):
        parser.error(f"--variants: {', '.join(sorted(missing))} is missing, to compare with")
    if args.quick:
        args.seeds = 1
    return args


def train(args: argparse.Namespace, rate: str | None, seed: int, variants: Sequence[str]) -> AtRate:
    """Makes hosts, trains on their ranks, and returns the results.

    Raises:
        NotAvailable: this machine cannot simulate hosts.
        RankError: a rank failed; all are ended.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rota-bench-") as folder,
        HostNetwork(len(args.hosts), rate) as network,
    ):
        job, results = Path(folder, "job.json"), Path(folder, "results.json")
        more = {"seed": seed, "variants": variants, "max_minutes": MAX_MINUTES}
        names = ("steps", "batch", "lr", "pace")
        job.write_text(json.dumps({name: getattr(args, name) for name in names} | more))
        worker = (sys.executable, str(driver.HERE / "demo_hosts_worker.py"), str(job), str(results))
        environments = rank_environments(args.hosts, network.serve_store())
        commands = [network.hosts[int(env["GROUP_RANK"])].command(*worker) for env in environments]
        run_ranks(commands, environments, Path(folder))
        of_variants = json.loads(results.read_text())
        return AtRate(
            rate=str(rate or "unlimited"),
            network=network.describe(),
            results={name: Result(**result) for name, result in of_variants.items()},
        )


def run_ranks(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], folder: Path
) -> None:
    """Runs one process per rank until all have ended; ends the others if one fails.

    Raises:
        RankError: it names the rank that failed first.
    """
    # One thread, since ranks share cores. A rank that waits long for a core is not lost.
    common = {"OMP_NUM_THREADS": "1", "ROTA_HOST_SILENCE_MS": "30000"}
    ranks = start_processes(
        "demo_hosts",
        commands[0][0],
        args={rank: tuple(command[1:]) for rank, command in enumerate(commands)},
        envs={rank: env | common for rank, env in enumerate(environments)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        outcome = ranks.wait(period=0.2)
    except SignalException as signal:
        sys.exit(128 + signal.sigval)
    finally:
        ranks.close()
    assert outcome is not None, "wait() without a timeout returns when the ranks have ended"
    if outcome.is_failed():
        first = min(outcome.failures.values(), key=lambda failure: failure.timestamp)
        raise RankError(f"rank {first.local_rank} failed first, exit code {first.exitcode}")


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; returns the summary for programs."""
    layout = "+".join(map(str, args.hosts))
    run = driver.Run("demo_hosts", f"demo-hosts-{layout}", sum(args.hosts), args)
    at_rates = []
    for rate in args.rates:
        run.console.print(f"links of {rate or 'any rate'}, seed {args.seed}")
        at_rates.append(train(args, rate, args.seed, args.variants))
    further = []
    for seed in range(args.seed + 1, args.seed + args.seeds):
        run.console.print(f"seed {seed}")
        trained = [name for name in args.variants if name != ALONE]
        further.append(train(args, None, seed, trained).results)
    return publish(run, at_rates, further)


def publish(
    run: driver.Run, at_rates: Sequence[AtRate], further: Sequence[dict[str, Result]]
) -> dict[str, Any]:
    """Writes the record and the picture, prints the tables, and returns the summary."""
    baseline_bits = train_gpt.order0_bits(*train_gpt.read_corpus())
    steps = [rows_of(at_rate) for at_rate in at_rates]
    losses = losses_of(at_rates, further)
    run.write_record(
        {
            "networks": [at_rate.network for at_rate in at_rates],
            "order0_bits": round(baseline_bits, 4),
            "step_times": [row for rows in steps for row in rows],
            "held_out": losses,
            "curves": curves_of(at_rates),
        }
    )
    png_path = run.json_path.with_suffix(".png")
    draw(png_path, at_rates, baseline_bits, run.subtitle())
    for rows in steps:
        print_steps(run.console, rows)
    print_table(run.console, losses)
    run.console.print(f"picture: {png_path}\nrecord: {run.json_path}", soft_wrap=True)
    trained = [*(at_rate.trained for at_rate in at_rates), *further]
    differing = sum(result.spread != 0 for results in trained for result in results.values())
    return {
        "benchmark": "demo_hosts",
        "json": str(run.json_path),
        "num_wrong": differing,  # replicas that differ between ranks after training
        "step_times": [row for rows in steps for row in rows],
        "held_out": losses,
    }


def main() -> int:
    """Returns the exit status: 0 if all trained and all replicas of a variant are equal."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
