"""Runs everything that needs a machine with an NVIDIA GPU, in one command.

    make gpu
    make gpu STAGES="build first" OUTPUT=folder COMMIT=name

Stages, most important first:

    build    puts rota in place: from a pack that fits (make gpu-pack), else built for this GPU
    first    in at most 240 s: whether it works, the order of work on streams, a few rates, the
             fused hook's kernels, the latency of a hop, a million all-reduces
    several  on two or more GPUs: every collective beside NCCL
    second   what limits the kernels, other tunings, GPT-2 under DDP, ranks that train on one GPU,
             and all tests with processes
    rest     every wire format, all other tests, the memory checker, NCCL as an engine

Each step has a time limit, at which it is ended with all its processes; none starts after the
whole run's limit. A failed step does not stop the others, except for a build that leaves nothing to
run. <gpu>-<date>.json and .md are written after each step, and when a signal ends the run; the
measurements of a killed run are in <gpu>-<date>.rows.jsonl. The exit status is 0 if no step failed,
and 2 if no run is possible here. Needs Python 3.11.

--small runs every line on few bytes with the installed rota and measures nothing: for a simulated
GPU (make gpu-dry).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

try:
    from rich.console import Console
except ModuleNotFoundError:
    sys.exit("rota: no run on a GPU: this python3 lacks rich; install it, or use one that has it")

import machine
from arguments import Parser
from gpu import facts as gpu_facts
from gpu.extension import EXTENSION
from gpu.facts import GIB, Facts
from gpu.record import Record

ROOT = machine.REPOSITORY
RESULTS = ROOT / "benchmarks" / "results"

# Fits into 10 minutes, with time left to end hanging processes.
TOTAL_S = 570
GRACE_S = 3.0  # from one signal to the next
STACKS_AFTER_S = 30  # per test; longer than the time limit of its ranks
NEEDED_BYTES = 16 * GIB  # two GPT-2s with the states of their optimizers, and activations
# Local ranks run in pytest's own process, which a bad kernel may kill, so they are a separate step.
LOCAL_TESTS = ("test_local_group.py", "test_gradient_bucket.py")
# Those with an engine between hosts (tests/gpu/device_engines.py).
NCCL_TESTS = ("test_cuda_several_hosts.py", "test_cuda_several_hosts_failures.py")
TRAINING_TESTS = "tests/gpu/test_cuda_training.py"
# Tests for the memory checker: every kernel, most dtypes, and misaligned tensors.
CHECKED = "misaligned or hierarchical or copying or mixed_sizes or (ws3 and reduce_scatter)"
CHECKED += " or (ws2 and every_size and (float64 or bfloat16))"
CHECKER = ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=86", "--print-limit=20"]
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
# The section adds the stalls of warps, by reason. The profiler must not change the clocks, as the
# machine may be shared.
PROFILER = ["ncu", "--csv", "--page=raw", "--clock-control=none", "--section=WarpStateStats"]
PROFILER += [f"--metrics={','.join(METRICS)}", "--kernel-name=regex:pack|two_shot|ring"]
FAILURES = ("failed", "stopped")


@dataclass(frozen=True)
class Step:
    """A command.

    Args:
        env: variables in addition to this process's environment.
        is_optional: its failure is reported, but does not fail the run.
        reason: why it is skipped; None if it is not.
    """

    stage: str
    name: str
    limit_s: float
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    is_optional: bool = False
    reason: str | None = None


def make_steps(args: argparse.Namespace, facts: Facts, record: Record) -> list[Step]:
    own = [] if args.small else ["python"]
    env = {"PYTHONPATH": _paths(*own, "benchmarks")}
    for_tests = {"PYTHONPATH": _paths(*own)}
    for_nccl = {**for_tests, "ROTA_TEST_NCCL": "1"}
    # torch's caching allocator would hide accesses beyond a tensor's end.
    uncached = {**for_tests, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    small = ["--small"] if args.small else []
    slowness = 3 if args.small else 1  # a simulated GPU is slower
    pytest = ["pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    pytest += ["-o", f"faulthandler_timeout={STACKS_AFTER_S}"]
    pytest += ["--collect-only", "-q"] if args.small else ["--durations", "5"]

    def step(stage: str, name: str, limit_s: float, *command: str, **more: Any) -> Step:
        return Step(stage, name, slowness * limit_s, _module(*command), **{"env": env, **more})

    def bench(stage: str, name: str, limit_s: float, **more: Any) -> Step:
        rows = ["--rows", str(record.rows_path)]
        return step(stage, name, limit_s, f"gpu.{name}", *small, *rows, **more)

    def tests(stage: str, name: str, limit_s: float, *chosen: str, **more: Any) -> Step:
        return step(stage, name, limit_s, *pytest, *chosen, **{"env": for_tests, **more})

    local = [f"tests/gpu/{name}" for name in LOCAL_TESTS]
    others = ["tests/gpu", *(f"--ignore={file}" for file in (*local, TRAINING_TESTS))]
    over_nccl = [f"tests/gpu/{name}" for name in NCCL_TESTS]
    folder, counters = str(args.output), str(record.json_path.with_suffix(".ncu.csv"))
    ncu = step("second", "ncu", 40, "gpu.profiled", *small, is_optional=True)
    memcheck = tests("rest", "memcheck", 75, *local, "-k", CHECKED, env=uncached)
    one_gpu = "this machine has one GPU" if facts.get("num_gpus", 1) < 2 else None
    return [
        _build_step(args, facts),
        step("first", "doctor", 15, "rota", "doctor", "--gpu", "--output", folder),
        tests("first", "order", 60, "tests/gpu", "-m", "order"),
        bench("first", "smoke", 15),
        bench("first", "fused_turn", 60),
        bench("first", "hops", 40),
        bench("first", "soak", 50),
        bench("several", "beside_nccl", 180, reason=one_gpu),
        ncu if args.small else _under([*PROFILER, "--log-file", counters], ncu),
        bench("second", "sweep", 60),
        bench("second", "gpt2", 90),
        tests("second", "training", 90, TRAINING_TESTS),
        tests("second", "process_tests", 200, *others, "-m", "not order"),
        bench("rest", "pack_unpack", 45),
        tests("rest", "local_tests", 90, *local),
        memcheck if args.small else _under(CHECKER, memcheck),
        tests("rest", "nccl_tests", 200, *over_nccl, env=for_nccl),
    ]


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _paths(*folders: str) -> str:
    """PYTHONPATH of these folders of the repository, plus the given one without benchmarks/, since
    modules of benchmarks/ and tests/ share names."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in given if Path(path).resolve() != ROOT / "benchmarks"]
    return os.pathsep.join([*(str(ROOT / folder) for folder in folders), *others])


def _build_step(args: argparse.Namespace, facts: Facts) -> Step:
    """Puts the extension in place, for this GPU only."""
    command = _module("gpu.extension", "--archs", gpu_facts.arch(facts))
    reason = "--small takes the rota that is installed" if args.small else None
    return Step("build", "build", 240, command, {"PYTHONPATH": _paths("benchmarks")}, reason=reason)


def _under(tool: Sequence[str], step: Step) -> Step:
    """The step's command under a tool of the CUDA toolkit."""
    found = gpu_facts.find_tool(tool[0])
    if found is None:
        return replace(step, reason=f"{tool[0]} is neither on PATH nor in a CUDA toolkit")
    return replace(step, command=[found, *tool[1:], *step.command])


def run_step(step: Step, limit_s: float, log_path: Path) -> dict[str, Any]:
    """Runs a step with its output in the log; leaves none of its processes behind, even if an
    exception such as SystemExit ends the wait."""
    if step.reason is not None:
        return {"verdict": "left out", "text": step.reason}
    if limit_s <= 0:
        return {"verdict": "stopped", "text": "not started: the time of the whole run is over"}
    started = time.monotonic()
    with log_path.open("a") as log:
        log.write(f"\n=== {step.name}, at most {limit_s:.0f} s: {' '.join(step.command)}\n")
        log.flush()
        begin = log.tell()
        # A process group of its own, so that its children end with it; in this process's session,
        # so that ending the session leaves nothing on the GPU.
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
            | {**step.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    verdict, signals = "passed", []
    try:
        if process.wait(limit_s) != 0:
            verdict = "failed"
    except subprocess.TimeoutExpired:
        # On SIGINT, pytest reports the failures so far.
        verdict, signals = "stopped", [signal.SIGINT, signal.SIGTERM]
    finally:
        end_group(process, signals)
    with log_path.open(errors="replace") as log:
        log.seek(begin)
        lines = [line.strip()[:300] for line in log if line.strip()] or ["no output"]
    errors = [line for line in lines if line.startswith("==ERROR==")]  # of NVIDIA's tools
    if step.is_optional and verdict != "passed":
        verdict = "did not run"
    elif verdict != "passed":
        print("\n".join(lines[-15:]), flush=True)
    text = (errors or lines[-1:])[0]
    if verdict == "stopped":
        text = f"not done within {limit_s:.0f} s; the last line: {text}"
    elif process.returncode:
        text = f"exit status {process.returncode}: {text}"
    seconds = round(time.monotonic() - started, 1)
    return {"verdict": verdict, "seconds": seconds, "text": text}


def end_group(process: subprocess.Popen[bytes], signals: Sequence[signal.Signals]) -> None:
    """Asks all processes of the step to end, by one signal after another, then kills them."""
    for number in signals:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S  # the driver may delay even killed processes
    while _group_lives(process) and time.monotonic() < deadline:
        time.sleep(0.02)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group still runs; zombies do not count."""
    process.poll()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                return True
    return False


def run_steps(steps: Sequence[Step], record: Record, end: float) -> None:
    """Runs steps one after another until `end`, by time.monotonic(). An exception that ends the
    run, such as SystemExit, also ends the current step."""
    reason = None
    for step in steps:
        if reason is not None:
            step = replace(step, reason=reason)
        print(f"{step.name} ...", flush=True)
        outcome = {"stage": step.stage, "name": step.name, "verdict": "stopped", "seconds": 0.0}
        record.steps.append(outcome | {"text": "the run itself was ended"})
        limit_s = min(step.limit_s, end - time.monotonic())
        outcome = record.steps[-1] = outcome | run_step(step, limit_s, record.log_path)
        record.write()
        print(f"{outcome['verdict']} after {outcome['seconds']} s: {outcome['text']}", flush=True)
        if step.stage == "build" and outcome["verdict"] in FAILURES and not EXTENSION.exists():
            reason = f"the build failed, and there is no {EXTENSION.name} of an earlier one"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--stages", default="", help="stages or steps, separated by spaces (default: all)")
    add("--output", type=Path, help="where everything goes (default: benchmarks/results)")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--small", action="store_true", help="measure nothing; see above")
    args = parser.parse_args(arguments)
    if args.output is None:
        args.output = Path(tempfile.mkdtemp(prefix="rota-gpu-dry-")) if args.small else RESULTS
    args.output = args.output.resolve()  # steps run in the repository
    args.commit = args.commit or machine.git_commit()
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    end = time.monotonic() + TOTAL_S
    facts = gpu_facts.gather()
    reason = gpu_facts.refusal(facts, GIB // 4 if args.small else NEEDED_BYTES)
    if reason is not None:
        print(f"rota: no run on a GPU: {reason}", file=sys.stderr)
        return 2
    record = Record(args.output, facts, args.commit, args.small)
    steps = make_steps(args, facts, record)
    known = dict.fromkeys(word for step in steps for word in (step.stage, step.name))
    chosen = args.stages.replace(",", " ").split() or list(known)
    if not set(chosen) <= set(known):
        print(
            f"rota: stages are {args.stages}, expected some of {', '.join(known)}", file=sys.stderr
        )
        return 2
    steps = [step for step in steps if step.stage in chosen or step.name in chosen]
    try:
        run_steps(steps, record, end)
    finally:
        record.write()
        record.rows_path.unlink(missing_ok=True)
    record.show(Console(width=200, highlight=False))
    print(f"{record.json_path}\n{record.summary_path}\n{record.log_path}")
    return 1 if any(one["verdict"] in FAILURES for one in record.steps) else 0


def end_on_signals() -> None:
    """Turns the first signal to end the process into SystemExit and ignores later ones, so that the
    current step is ended and the record written."""
    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in asking:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in asking:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
