"""How soon training goes on after a rank is killed, and how soon a new one is back.

    python benchmarks/recovery.py --trials 30

Ranks hold a state of --bytes each: parameters and the two moments of Adam. In each trial one is
killed. "recovered" is the time from the kill until the slower survivor has made a correct
all-reduce, in a new generation and with the model wrapped anew. Then a new process starts: "back"
is the time from its first line of Python until it has made a correct all-reduce, and "pause" how
long the survivors' training stands meanwhile. Terms are those of one rank, the slowest. "ends of
steps" are what commit() and is_over() take while nothing happens. After each newcomer a bare
process imports torch, and what DDP does of it, which is not rota's to shorten. Beside it, Gloo's
ranks make a new group after a kill, told by the parent how many are left, and copy no state. The
last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.table import Table

import driver
from arguments import Parser, parse_natural, parse_size

WORKER = Path(__file__).resolve().parent / "recovery_worker.py"
# Long enough for the ranks to fall asleep, the case with the highest latency.
SETTLE_S = 0.3
ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
Facts = dict[str, Any]
IMPORTS = """
import time
begin = time.monotonic()
import torch
print(time.monotonic() - begin)
import torch._dynamo
print(time.monotonic() - begin)
"""


class Workers:
    """The processes of one backend; a context manager that leaves none of them behind."""

    def __init__(self, backend: str, args: argparse.Namespace) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._backend = backend
        self._args = args
        self.running: list[subprocess.Popen[str]] = []
        for rank in range(args.ranks):
            self.start(rank, args.ranks)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.running:
            worker.kill()
            worker.wait()

    def start(self, rank: int, num_ranks: int) -> None:
        command = [sys.executable, str(WORKER), "--port", str(self._store.port)]
        command += ["--backend", self._backend, "--rank", str(rank), "--ranks", str(num_ranks)]
        command += ["--bytes", str(self._args.bytes)]
        self.running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENV)
        )

    def kill(self, place: int) -> int:
        """Returns the time of the kill, in nanoseconds."""
        victim = self.running.pop(place)
        killed = time.monotonic_ns()
        victim.kill()
        victim.wait()
        return killed

    def hear(self) -> list[Facts]:
        """The next line of each worker."""
        return [self._hear(worker) for worker in self.running]

    @staticmethod
    def _hear(worker: subprocess.Popen[str]) -> Facts:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise SystemExit(f"error: a rank has ended with {worker.wait()}")
        facts: Facts = json.loads(line)
        return facts


def milliseconds(begin_ns: int, end_ns: int) -> float:
    return (end_ns - begin_ns) / 1e6


def recovered(facts: Facts, killed: int) -> dict[str, float]:
    """The terms of a survivor's recovery, in milliseconds."""
    terms = {"notice": milliseconds(killed, facts["begin"])}
    terms |= {term: seconds * 1e3 for term, seconds in facts["terms"].items()}
    terms["all"] = milliseconds(killed, facts["done"])
    return terms


def back(facts: Facts) -> dict[str, float]:
    """The terms of a newcomer's start, in milliseconds."""
    terms = {
        "import torch and rota": milliseconds(facts["started"], facts["imported"]),
        "make the model": milliseconds(facts["imported"], facts["made"]),
        "open the membership": milliseconds(facts["made"], facts["opened"]),
        "prepare": milliseconds(facts["opened"], facts["begin"]),
    }
    terms |= {term: seconds * 1e3 for term, seconds in facts["terms"].items()}
    terms["all"] = milliseconds(facts["started"], facts["done"])
    return terms


def slowest(terms: Iterable[dict[str, float]]) -> dict[str, float]:
    return max(terms, key=lambda of_rank: of_rank["all"])


def import_torch_ms() -> list[float]:
    """From the first line of Python until torch is imported, and until torch._dynamo is, too."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, check=True, env=os.environ | ENV)
    return [float(seconds) * 1e3 for seconds in done.stdout.split()]


def measure_rota(args: argparse.Namespace) -> dict[str, list[Any]]:
    names = ("steps", "recovered", "back", "pause_ms", "memcpy_s", "import_torch_ms")
    results: dict[str, list[Any]] = {name: [] for name in names}
    with Workers("rota", args) as workers:
        results["steps"] = [facts["step_s"] for facts in workers.hear()]
        for trial in range(args.trials):
            time.sleep(SETTLE_S)
            killed = workers.kill(trial % args.ranks)
            results["recovered"].append(
                slowest(recovered(facts, killed) for facts in workers.hear())
            )
            workers.start(args.ranks - 1, 1)
            *survivors, newcomer = workers.hear()
            results["pause_ms"].append(
                max(milliseconds(facts["begin"], facts["done"]) for facts in survivors)
            )
            results["back"].append(back(newcomer))
            results["memcpy_s"].append(newcomer["memcpy_s"])
            results["import_torch_ms"].append(import_torch_ms())
    return results


def measure_gloo(args: argparse.Namespace) -> list[float]:
    """Milliseconds from a kill to the slower survivor's all-reduce, by trial."""
    times = []
    for _ in range(args.gloo_trials):
        with Workers("gloo", args) as workers:
            workers.hear()
            time.sleep(SETTLE_S)
            killed = workers.kill(args.ranks - 1)
            times.append(max(milliseconds(killed, facts["done"]) for facts in workers.hear()))
    return times


def print_terms(run: driver.Run, title: str, trials: list[dict[str, float]]) -> None:
    table = Table(title=f"{title}, milliseconds, {len(trials)} trials")
    for column in ("term", "min", "p50", "p90", "max"):
        table.add_column(column, justify="left" if column == "term" else "right")
    for term in trials[0]:
        values = sorted(trial.get(term, 0.0) for trial in trials)
        chosen = (values[0], median(values), values[(len(values) - 1) * 9 // 10], values[-1])
        table.add_row(term, *(f"{value:.1f}" for value in chosen))
    run.console.print(table)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: measures, writes the record, prints the tables and sums up."""
    run = driver.Run("recovery", "recovery", args.ranks, args)
    rota = measure_rota(args)
    gloo = measure_gloo(args)
    run.write_record(rota | {"gloo_recovered_ms": gloo})
    print_terms(run, "from the kill to an all-reduce of the survivors", rota["recovered"])
    run.console.print(
        f"Gloo, a new group of the survivors: p50 {median(gloo):.0f}, max {max(gloo):.0f} ms "
        f"({len(gloo)} trials)"
    )
    print_terms(run, "from the first line of Python to an all-reduce of the newcomer", rota["back"])
    torch_ms, dynamo_ms = map(median, zip(*rota["import_torch_ms"], strict=True))
    run.console.print(
        f"of which a bare process that imports torch takes: p50 {torch_ms:.0f} ms, and with "
        f"torch._dynamo, as the first DistributedDataParallel does, {dynamo_ms:.0f} ms"
    )
    steps = {term: max(of_rank[term] for of_rank in rota["steps"]) for term in rota["steps"][0]}
    run.console.print(
        "ends of steps, the slowest rank: "
        + ", ".join(f"{term} {seconds * 1e3:.3f} ms" for term, seconds in steps.items())
    )
    pause_ms = rota["pause_ms"]
    run.console.print(
        f"the survivors' pause for the newcomer: p50 {median(pause_ms):.0f}, max "
        f"{max(pause_ms):.0f} ms"
    )
    copies = [terms["state: copy"] / 1e3 for terms in rota["back"]]
    fresh = [
        of_trial["fresh"] / copy for of_trial, copy in zip(rota["memcpy_s"], copies, strict=True)
    ]
    touched = [
        of_trial["touched"] / copy for of_trial, copy in zip(rota["memcpy_s"], copies, strict=True)
    ]
    run.console.print(
        f"the copy's part of memcpy's speed in one process, p50: {median(fresh):.2f} of one to "
        f"memory that was not touched before, as the newcomer's is; {median(touched):.2f} of one "
        f"to memory that was"
    )
    return {
        "benchmark": "recovery",
        "json": str(run.json_path),
        "recovered_ms": {"p50": median(trial["all"] for trial in rota["recovered"])},
        "gloo_recovered_ms": {"p50": median(gloo)},
        "pause_ms": {"p50": median(rota["pause_ms"])},
        "back_ms": {"p50": median(trial["all"] for trial in rota["back"])},
        "import_torch_ms": {"p50": torch_ms},
        "import_torch_dynamo_ms": {"p50": dynamo_ms},
        "step_ms": {term: seconds * 1e3 for term, seconds in steps.items()},
    }


def main() -> int:
    """Returns the exit status."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=parse_natural(2), default=3, help="default: %(default)s")
    add("--trials", type=parse_natural(1), default=100, help="default: %(default)s")
    add("--gloo-trials", type=parse_natural(1), default=10, help="default: %(default)s")
    add("--bytes", type=parse_size, default="1G", help="of state per rank, default: %(default)s")
    add("--json", type=Path, help="the record (default: in benchmarks/results)")
    return driver.exit_status(lambda: benchmark(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
