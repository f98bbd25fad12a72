"""How soon ranks notice failures: a rank killed, a mismatch, a Ctrl-C, a host that vanishes.

    python benchmarks/failures.py --trials 30 --host-trials 5

Each trial starts its own ranks. Times are from the event to the exception in Python, by a clock
that all processes of the machine share. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import driver
import report
from arguments import Parser, parse_natural
from host_network import HostNetwork, NotAvailable, enter_namespace, rank_environments

try:
    import rota
except ImportError as error:
    sys.exit(f"error: rota is not built: run make venv ({error})")

# What the victim has resident beside Python and torch, which the kernel frees before it reports
# the end: with ranks up to the cores of a small machine, and beyond.
GIGABYTE = 1 << 30
KILLS = [(num_ranks, num_bytes) for num_ranks in (2, 4) for num_bytes in (0, GIGABYTE)]
OTHERS = [
    "mismatch: Mismatch on both ranks, from the later call",
    "Ctrl-C: KeyboardInterrupt",
    "Ctrl-C: PeerFailed on a waiting peer",
]
# Long enough for the waiting ranks to fall asleep, the case with the highest latency.
SETTLE_S = 0.05
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rota"])


def exception_time(call: Callable[[], object], expected: type[BaseException]) -> int:
    """The time at which `call` raised `expected`, in nanoseconds."""
    try:
        call()
    except expected:
        return time.monotonic_ns()
    raise RuntimeError(f"expected {expected.__name__}, nothing was raised")


def rank_main(
    scenario: str, rank: int, num_ranks: int, ballast_bytes: int, store_path: str, pipe: Connection
) -> None:
    """One rank: sends its pid when it is ready, then the times of its call and its failure."""
    # Shells let background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, num_ranks)
    timeout = timedelta(seconds=30)
    dist.init_process_group("rota", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    communicator = rota.Communicator()
    communicator.barrier()
    tensor = torch.ones(1 << 20)
    if rank == 1 and scenario != "mismatch":
        ballast = torch.ones(ballast_bytes, dtype=torch.uint8)  # noqa: F841
        pipe.send(os.getpid())
        signal.pause()  # the others wait for this rank
    pipe.send(os.getpid())
    called = time.monotonic_ns()
    if scenario == "mismatch":
        op = "sum" if rank == 0 else "max"
        heard = exception_time(lambda: communicator.all_reduce(tensor, op), rota.Mismatch)
    elif scenario == "interrupt" and rank == 0:
        heard = exception_time(lambda: communicator.all_reduce(tensor), KeyboardInterrupt)
    else:
        heard = exception_time(lambda: communicator.all_reduce(tensor), rota.PeerFailed)
    pipe.send((called, heard))
    pipe.recv()  # a rank that ends takes a core from those that have not heard yet


def trial(scenario: str, num_ranks: int, ballast_bytes: int = GIGABYTE // 4) -> dict[int, float]:
    """Causes one event; returns the milliseconds until each surviving rank had its exception."""
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            pipe, rank_pipe = CONTEXT.Pipe()
            store = os.path.join(folder, "store")
            arguments = (scenario, rank, num_ranks, ballast_bytes, store, rank_pipe)
            processes.append(CONTEXT.Process(target=rank_main, args=arguments, daemon=True))
            processes[-1].start()
            rank_pipe.close()
            pipes.append(pipe)
        try:
            pids = [pipe.recv() for pipe in pipes]
            time.sleep(SETTLE_S)
            event = time.monotonic_ns()
            if scenario == "killed rank":
                processes[1].kill()
            elif scenario == "interrupt":
                os.kill(pids[0], signal.SIGINT)
            absent = None if scenario == "mismatch" else 1
            replies = {rank: pipes[rank].recv() for rank in range(num_ranks) if rank != absent}
        finally:
            for process in processes:
                process.kill()
                process.join()
    if scenario == "mismatch":
        event = max(called for called, _ in replies.values())
    return {rank: (heard - event) / 1e6 for rank, (_, heard) in replies.items()}


# Of two simulated hosts.
RANKS_PER_HOST = (2, 2)
VICTIM = 3
SURVIVORS = (0, 1)  # on the other host


def host_rank_main(namespace: str, environment: dict[str, str], pipe: Connection) -> None:
    """A rank of a simulated host, as rank_main."""
    enter_namespace(namespace)
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("rota", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    pipe.send(None)
    if rank == VICTIM:
        signal.pause()  # the others wait for this rank
    pipe.send(exception_time(lambda: dist.all_reduce(tensor), rota.PeerFailed))


def host_trial(event_of: Callable[[HostNetwork, list[Any]], object]) -> float:
    """Causes an event on host 1; returns the milliseconds until all of host 0 had exceptions."""
    with HostNetwork(len(RANKS_PER_HOST)) as network:
        pipes, processes = [], []
        for environment in rank_environments(RANKS_PER_HOST, network.serve_store()):
            pipe, rank_pipe = CONTEXT.Pipe()
            namespace = network.hosts[int(environment["GROUP_RANK"])].path
            arguments = (namespace, environment, rank_pipe)
            processes.append(CONTEXT.Process(target=host_rank_main, args=arguments, daemon=True))
            processes[-1].start()
            rank_pipe.close()
            pipes.append(pipe)
        try:
            for pipe in pipes:
                pipe.recv()
            time.sleep(SETTLE_S)
            event = time.monotonic_ns()
            event_of(network, processes)
            heard = max(pipes[rank].recv() for rank in SURVIVORS)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return float(heard - event) / 1e6


def measure_hosts(num_trials: int) -> dict[str, list[float]]:
    """Milliseconds by event, one value per trial: the slowest rank's of the other host.

    Raises:
        NotAvailable: this machine cannot simulate hosts.
    """
    events: dict[str, Callable[[HostNetwork, list[Any]], object]] = {
        "killed rank on another host": lambda _, processes: processes[VICTIM].kill(),
        "another host's link goes down": lambda network, _: network.take_link_down(1),
        "another host's packets vanish": lambda network, _: network.drop_traffic(1),
    }
    return {
        f"{name}: PeerFailed": [host_trial(event) for _ in range(num_trials)]
        for name, event in events.items()
    }


def measure(num_trials: int) -> dict[str, list[float]]:
    """Milliseconds by event, one value per trial: the slowest rank's."""
    kills = {kill: f"killed rank of {kill[0]}, {kill[1] >> 30} GB: PeerFailed" for kill in KILLS}
    times: dict[str, list[float]] = {name: [] for name in (*kills.values(), *OTHERS)}
    mismatch, interrupt, told = (times[name] for name in OTHERS)
    for _ in range(num_trials):
        for kill, name in kills.items():
            times[name].append(max(trial("killed rank", *kill).values()))
        mismatch.append(max(trial("mismatch", 2).values()))
        heard = trial("interrupt", 3)
        interrupt.append(heard[0])
        told.append(heard[2])
    return times


def summary(values: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile (the nearest value) and maximum."""
    ordered = sorted(values)
    return median(ordered), ordered[round(0.99 * (len(ordered) - 1))], ordered[-1]


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, writes the record, prints the table and sums up."""
    run = driver.Run("failures", "failures", sum(RANKS_PER_HOST), args)
    times = measure(args.trials)
    try:
        times |= measure_hosts(args.host_trials)
    except NotAvailable as reason:
        run.note(f"no hosts can be simulated: {reason}")
    run.write_record(
        {
            "times_ms": [
                {"event": event, "samples": [round(value, 3) for value in values]}
                for event, values in times.items()
            ]
        }
    )
    report.print_labelled(
        run.console,
        "milliseconds from the event to the exception",
        ("event", "trials", "median", "p99", "max"),
        [
            (event, str(len(values)), *(f"{value:.2f}" for value in summary(values)))
            for event, values in times.items()
        ],
    )
    return {"benchmark": "failures", "json": str(run.json_path)}


def main() -> int:
    """Returns the exit status: 0 if every trial ended as expected."""
    parser = Parser(description=__doc__)
    parser.add_argument("--trials", type=parse_natural(1), default=30, help="default: %(default)s")
    parser.add_argument(
        "--host-trials", type=parse_natural(1), default=5, help="with hosts, default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="the record (default: in benchmarks/results)")
    args = parser.parse_args()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
