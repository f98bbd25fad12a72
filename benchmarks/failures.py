"""How soon ranks notice failures: a rank killed, a mismatch, a Ctrl-C, a host that vanishes.

    python benchmarks/failures.py --trials 30 --host-trials 5

Each trial starts its own ranks. Times are from the event to the exception in Python, by a clock
that all processes of the machine share.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median

import torch
import torch.distributed as dist

import rota
from arguments import Parser, parse_natural
from host_network import HostNetwork, NotAvailable
from record import Run
from report import print_table
from workers import Workers

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
TIMEOUT = timedelta(seconds=30)


def exception_time(call: Callable[[], object], expected: type[BaseException]) -> int:
    """The time at which `call` raised `expected`, in nanoseconds."""
    try:
        call()
    except expected:
        return time.monotonic_ns()
    raise RuntimeError(f"expected {expected.__name__}, nothing was raised")


def rank_main(
    pipe: Connection, scenario: str, rank: int, num_ranks: int, ballast_bytes: int, store_path: str
) -> None:
    """One rank: says when it is ready, and sends the times of its call and its failure."""
    # Shells let background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(store_path, num_ranks)
    dist.init_process_group("rota", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    communicator = rota.Communicator()
    communicator.barrier()
    tensor = torch.ones(1 << 20)
    is_absent = rank == 1 and scenario != "mismatch"
    ballast = torch.ones(ballast_bytes if is_absent else 0, dtype=torch.uint8)  # noqa: F841
    pipe.send("ready")
    if is_absent:
        signal.pause()  # the others wait for this rank
    called = time.monotonic_ns()
    if scenario == "mismatch":
        op = "sum" if rank == 0 else "max"
        heard = exception_time(lambda: communicator.all_reduce(tensor, op), rota.Mismatch)
    elif scenario == "interrupt" and rank == 0:
        heard = exception_time(lambda: communicator.all_reduce(tensor), KeyboardInterrupt)
    else:
        heard = exception_time(lambda: communicator.all_reduce(tensor), rota.PeerFailed)
    pipe.send((called, heard))
    pipe.poll(None)  # its communicator stays open until all have heard


def trial(scenario: str, num_ranks: int, ballast_bytes: int = GIGABYTE // 4) -> dict[int, float]:
    """Causes one event; returns the milliseconds until each surviving rank had its exception."""
    with Workers() as ranks:
        for rank in range(num_ranks):
            store = str(ranks.folder / "store")
            ranks.fork(rank_main, scenario, rank, num_ranks, ballast_bytes, store)
        ranks.recv_all()
        time.sleep(SETTLE_S)
        event = time.monotonic_ns()
        if scenario == "killed rank":
            event = ranks.kill(1)
        elif scenario == "interrupt":
            ranks.signal(0, signal.SIGINT)
        absent = None if scenario == "mismatch" else 1
        replies = ranks.recv_all([rank for rank in range(num_ranks) if rank != absent])
    if scenario == "mismatch":
        event = max(called for called, _ in replies.values())
    return {rank: (heard - event) / 1e6 for rank, (_, heard) in replies.items()}


# There are two simulated hosts.
RANKS_PER_HOST = (2, 2)
VICTIM = 3
SURVIVORS = (0, 1)  # on the other host
HOST_EVENTS: dict[str, Callable[[HostNetwork, Workers], object]] = {
    "killed rank on another host": lambda _, ranks: ranks.kill(VICTIM),
    "another host's link goes down": lambda network, _: network.take_link_down(1),
    "another host's packets vanish": lambda network, _: network.drop_traffic(1),
}


def host_rank_main(pipe: Connection) -> None:
    """A rank of a simulated host, as rank_main."""
    dist.init_process_group("rota", timeout=TIMEOUT)
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    pipe.send("ready")
    if dist.get_rank() == VICTIM:
        signal.pause()  # the others wait for this rank
    pipe.send(exception_time(lambda: dist.all_reduce(tensor), rota.PeerFailed))


def host_trial(event_of: Callable[[HostNetwork, Workers], object]) -> float:
    """Causes an event on host 1; returns the milliseconds until all of host 0 had exceptions."""
    with HostNetwork(len(RANKS_PER_HOST)) as network, Workers() as ranks:
        for place in network.places(RANKS_PER_HOST):
            ranks.fork(host_rank_main, **place)
        ranks.recv_all()
        time.sleep(SETTLE_S)
        event = time.monotonic_ns()
        event_of(network, ranks)
        return float(max(ranks.recv_all(SURVIVORS).values()) - event) / 1e6


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


def main() -> None:
    """Exits with 0 if every trial ended as expected."""
    parser = Parser(__doc__)
    parser.add("--trials", type=parse_natural(1), default=30)
    parser.add("--host-trials", type=parse_natural(1), default=5, help="with hosts")
    parser.add_json()
    args = parser.parse_args()

    with Run("failures", sum(RANKS_PER_HOST), args) as run:
        times = measure(args.trials)
        try:
            for name, event in HOST_EVENTS.items():
                trials = [host_trial(event) for _ in range(args.host_trials)]
                times[f"{name}: PeerFailed"] = trials
        except NotAvailable as reason:
            run.note(f"no hosts can be simulated: {reason}")
        print_table(
            run.console,
            "milliseconds from the event to the exception",
            ("event", "trials", "median", "p99", "max"),
            [
                (event, str(len(values)), *(f"{value:.2f}" for value in summary(values)))
                for event, values in times.items()
            ],
        )
        samples = {event: [round(value, 3) for value in times[event]] for event in times}
        run.finish({"times_ms": [{"event": e, "samples": s} for e, s in samples.items()]})


if __name__ == "__main__":
    main()
