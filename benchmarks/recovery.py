"""How soon training goes on after a rank is killed, and how soon a new one is back.

    python benchmarks/recovery.py --trials 30

Ranks hold a state of --bytes each: parameters and the two moments of Adam. In each trial one is
killed. "recovered" is the time from the kill until the slower survivor has made a correct
all-reduce, in a new generation and with the model wrapped anew. Then a new process starts: "back"
is the time from its first line of Python until it has made a correct all-reduce, and "pause" how
long the survivors' training stands meanwhile. Terms are those of one rank, the slowest. "ends of
steps" are what commit() and is_over() take while nothing happens. After each newcomer a bare
process imports torch, and what DDP does of it, which is not rota's to shorten. Beside it, Gloo's
ranks make a new group after a kill, told by the parent how many are left, and copy no state.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from arguments import Parser, parse_natural, parse_size
from record import Run
from report import print_table
from workers import Workers

WORKER = Path(__file__).with_name("recovery_worker.py")
# Long enough for the ranks to fall asleep, the case with the highest latency.
SETTLE_S = 0.3
Facts = dict[str, Any]
IMPORTS = """
import time
begin = time.monotonic()
import torch
print(time.monotonic() - begin)
import torch._dynamo
print(time.monotonic() - begin)
"""


class Job(Workers):
    """The processes of one backend, each with a Python of its own."""

    def __init__(self, backend: str, args: argparse.Namespace) -> None:
        super().__init__(timeout_s=300)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = [sys.executable, str(WORKER), "--port", str(self._store.port)]
        self._command += ["--backend", backend, "--bytes", str(args.bytes)]
        for rank in range(args.ranks):
            self.start(rank, args.ranks)

    def start(self, rank: int, num_ranks: int) -> None:
        self.launch([*self._command, "--rank", str(rank), "--ranks", str(num_ranks)])

    def hear(self) -> list[Facts]:
        """The next facts of each process, in the order of their starts."""
        return list(self.recv_all().values())


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
        "open the membership": milliseconds(facts["imported"], facts["opened"]),
        "make the model": milliseconds(facts["opened"], facts["made"]),
        "wait for the reservation": milliseconds(facts["made"], facts["begin"]),
    }
    terms |= {term: seconds * 1e3 for term, seconds in facts["terms"].items()}
    terms["all"] = milliseconds(facts["started"], facts["done"])
    return terms


def slowest(terms: Iterable[dict[str, float]]) -> dict[str, float]:
    return max(terms, key=lambda of_rank: of_rank["all"])


def import_torch_ms() -> list[float]:
    """From the first line of Python until torch is imported, and until torch._dynamo is, too."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, check=True)
    return [float(seconds) * 1e3 for seconds in done.stdout.split()]


def measure_rota(args: argparse.Namespace) -> dict[str, list[Any]]:
    names = ("steps", "recovered", "back", "pause_ms", "memcpy_s", "import_torch_ms")
    results: dict[str, list[Any]] = {name: [] for name in names}
    with Job("rota", args) as job:
        results["steps"] = [facts["step_s"] for facts in job.hear()]
        for trial in range(args.trials):
            time.sleep(SETTLE_S)
            killed = job.kill(job.ranks[trial % args.ranks])
            results["recovered"].append(slowest(recovered(facts, killed) for facts in job.hear()))
            job.start(args.ranks - 1, 1)
            *survivors, newcomer = job.hear()
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
        with Job("gloo", args) as job:
            job.hear()
            time.sleep(SETTLE_S)
            killed = job.kill(args.ranks - 1)
            times.append(max(milliseconds(killed, facts["done"]) for facts in job.hear()))
    return times


def print_terms(run: Run, title: str, trials: list[dict[str, float]]) -> None:
    lines = []
    for term in trials[0]:
        values = sorted(trial.get(term, 0.0) for trial in trials)
        chosen = (values[0], median(values), values[(len(values) - 1) * 9 // 10], values[-1])
        lines.append((term, *(f"{value:.1f}" for value in chosen)))
    headings = ("term", "min", "p50", "p90", "max")
    print_table(run.console, f"{title}, milliseconds, {len(trials)} trials", headings, lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add("--ranks", type=parse_natural(2), default=3)
    parser.add("--trials", type=parse_natural(1), default=100)
    parser.add("--gloo-trials", type=parse_natural(1), default=10)
    parser.add("--bytes", type=parse_size, default="1G", help="of state per rank")
    parser.add_json()
    args = parser.parse_args()

    with Run("recovery", args.ranks, args) as run:
        rota = measure_rota(args)
        gloo = measure_gloo(args)
        title = "from the first line of Python to an all-reduce of the newcomer"
        print_terms(run, "from the kill to an all-reduce of the survivors", rota["recovered"])
        print_terms(run, title, rota["back"])
        torch_ms, dynamo_ms = map(median, zip(*rota["import_torch_ms"], strict=True))
        steps = {term: max(rank[term] for rank in rota["steps"]) * 1e3 for term in rota["steps"][0]}
        pause_ms = rota["pause_ms"]
        part = {
            kind: median(
                memcpy_s[kind] / (terms["state: copy"] / 1e3)
                for memcpy_s, terms in zip(rota["memcpy_s"], rota["back"], strict=True)
            )
            for kind in ("fresh", "touched")
        }
        for line in (
            f"Gloo, a new group of the survivors: p50 {median(gloo):.0f}, max {max(gloo):.0f} ms "
            f"({len(gloo)} trials)",
            f"of which a bare process that imports torch takes: p50 {torch_ms:.0f} ms, and with "
            f"torch._dynamo, as the first DistributedDataParallel does, {dynamo_ms:.0f} ms",
            "ends of steps, the slowest rank: "
            + ", ".join(f"{term} {ms:.3f} ms" for term, ms in steps.items()),
            f"the survivors' pause for the newcomer: p50 {median(pause_ms):.0f}, max "
            f"{max(pause_ms):.0f} ms",
            f"the copy's part of memcpy's speed in one process, p50: {part['fresh']:.2f} of one to "
            f"memory that was not touched before, as the newcomer's is; {part['touched']:.2f} of "
            "one to memory that was",
        ):
            run.console.print(line)
        run.finish(
            rota | {"gloo_recovered_ms": gloo},
            recovered_ms={"p50": median(trial["all"] for trial in rota["recovered"])},
            gloo_recovered_ms={"p50": median(gloo)},
            pause_ms={"p50": median(pause_ms)},
            back_ms={"p50": median(trial["all"] for trial in rota["back"])},
            import_torch_ms={"p50": torch_ms},
            import_torch_dynamo_ms={"p50": dynamo_ms},
            step_ms=steps,
        )


if __name__ == "__main__":
    main()
