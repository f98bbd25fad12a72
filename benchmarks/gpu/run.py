"""Everything that a machine with an NVIDIA GPU is wanted for, in one command.

    make gpu
    make gpu STAGES="build bench" OUTPUT=folder
    PYTHONPATH=python:benchmarks python3 -m gpu.run --stages "build bench" --output folder

Builds rota in place for the GPU found, runs tests/gpu, the memory checker over every kernel, and
the benchmarks. Each step has a time limit, at which it is ended with all that it started; what a
step leaves of its limit goes to those behind it, and all end when --total-s is over. A step that
fails stops no other, except for a build that leaves nothing to run. After each step
<gpu>-<date>.json and .md are written anew, also when a signal ends the run; a run that is killed
leaves what the step had measured in <gpu>-<date>.rows.jsonl. The exit status is 0 if no step
failed. Needs Python 3.11.

A dry run (--dry-run) does the same on a machine without a GPU: it collects the tests, and runs the
benchmarks on stand-ins with made-up times; its record says so and goes to a temporary folder. With
--device cuda it takes the GPU that CUDA finds for a simulated one: tests and benchmarks run on it,
small, and without kernels of torch's unless --torch-kernels says that it has them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import machine
import report
from arguments import Parser, parse_list, parse_natural
from gpu import facts as gpu_facts
from gpu import figures, stages, summary
from gpu.stages import Budget, Outcome, Step

ROOT = machine.REPOSITORY
RESULTS = ROOT / "benchmarks" / "results"

# Machines are lent for calls of 10 minutes; the rest is for ending what hangs.
TOTAL_S = 570
BUILD_LIMIT_S = 240.0
# Local ranks run in pytest's own process, which a bad kernel may end: a step of their own.
LOCAL_TESTS = ("test_local_group.py", "test_gradient_bucket.py")
LOCAL_TEST_LIMIT_S = 90.0
PROCESS_TEST_LIMIT_S = 200.0  # about 105 ranks, each of which starts CUDA
STACKS_AFTER_S = 30  # of one test: longer than its ranks may take
MEMCHECK_LIMIT_S = 60.0
BENCH_LIMITS_S = {
    "copy_rate": 10.0,
    "pack_unpack": 40.0,
    "local_all_reduce": 40.0,
    "latency": 10.0,
    "mixed_precision": 40.0,
    "shared_gpu": 40.0,
}
# They need neither a network nor names.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# What a build leaves for this interpreter.
EXTENSION = ROOT / "python" / "rota" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"

STAGES = ("build", "test", "memcheck", "bench", "report")
MAX_JOBS = 16
SANITIZER_FOUND_ERRORS = 86


def parse_words(text: str) -> list[str]:
    """An argparse type: stages, separated by spaces or commas."""
    return parse_list(STAGES)(",".join(text.replace(",", " ").split()))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with one line when it makes no sense."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--stages", type=parse_words, default=list(STAGES), help=f"of {' '.join(STAGES)}")
    add(
        "--benchmarks",
        type=parse_list(list(BENCH_LIMITS_S)),
        default=list(BENCH_LIMITS_S),
        help=f"of {','.join(BENCH_LIMITS_S)}",
    )
    add(
        "--total-s",
        type=parse_natural(1),
        default=TOTAL_S,
        help="seconds that all may take together (default: %(default)s)",
    )
    add("--output", type=Path, help="where everything goes (default: benchmarks/results)")
    add("--commit", help="what is measured, where there is no git to ask")
    add("--dry-run", action="store_true", help="measure nothing; see above")
    add("--device", choices=("cuda", "cpu"), help="cpu, the default of a dry run: stand-ins")
    add("--torch-kernels", action="store_true", help="the simulated GPU computes for torch too")
    add("--sizes", help="of all benchmarks, instead of each one's own, such as 1K,64M")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cpu" if args.dry_run else "cuda")
    if args.device == "cpu" and not args.dry_run:
        parser.error("--device cpu measures nothing: it takes --dry-run")
    if args.output is None:
        args.output = Path(tempfile.mkdtemp(prefix="rota-gpu-dry-")) if args.dry_run else RESULTS
    elif args.dry_run and args.output.resolve() == RESULTS:
        parser.error("a dry run leaves nothing in benchmarks/results: choose another --output")
    return args


def steps_of(args: argparse.Namespace, arch: str | None, rows_path: Path) -> list[Step]:
    """What the stages that were asked for are made of."""
    makers = {"build": build_steps, "test": test_steps, "memcheck": memcheck_steps}
    steps = []
    for stage in STAGES:
        if stage in args.stages:
            if stage == "bench":
                steps += bench_steps(args, rows_path)
            elif stage in makers:
                steps += makers[stage](args, arch)
    return steps


def build_steps(args: argparse.Namespace, arch: str | None) -> list[Step]:
    """In place, for this GPU alone; a dry run only reads setup.py."""
    env = {"MAX_JOBS": str(min(MAX_JOBS, machine.num_cores())), "ROTA_CUDA": "1"}
    env["PYTHONPATH"] = _paths()
    # Last: for a ninja that came with torch's python, where there is no other.
    env["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    nvcc = gpu_facts.find_tool("nvcc")
    if nvcc is not None and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        env["CUDA_HOME"] = str(Path(nvcc).parents[1])  # setup.py looks on PATH alone
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    if args.dry_run:
        env["ROTA_CUDA"] = "0"
        command = [sys.executable, "setup.py", "--version"]
    if arch is not None:
        env["ROTA_CUDA_ARCHS"] = arch
    return [Step("build", "build", command, BUILD_LIMIT_S, env)]


def test_steps(args: argparse.Namespace, arch: str | None) -> list[Step]:
    """All tests that need a GPU; on a machine without one they are only collected."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    pytest += ["--continue-on-collection-errors", "-o", f"faulthandler_timeout={STACKS_AFTER_S}"]
    if args.device == "cpu":
        pytest += ["--collect-only", "-q"]
    elif args.dry_run and not args.torch_kernels:
        pytest += ["-m", "not torch_kernels"]
    else:
        pytest += ["--durations", "5"]
    local_files = [f"tests/gpu/{name}" for name in LOCAL_TESTS]
    others = ["tests/gpu", *(f"--ignore={file}" for file in local_files)]
    env = {"PYTHONPATH": _paths("python")}
    return [
        Step("test", "test local ranks", [*pytest, *local_files], LOCAL_TEST_LIMIT_S, env),
        Step("test", "test processes", [*pytest, *others], PROCESS_TEST_LIMIT_S, env),
    ]


def memcheck_steps(args: argparse.Namespace, arch: str | None) -> list[Step]:
    """The tour under the memory checker; a dry run makes the tour alone."""
    tour = [sys.executable, "-m", "gpu.tour", *_benchmark_options(args)]
    # torch's cache would hide what lies beyond a tensor's end.
    env = {"PYTHONPATH": _paths("python", "benchmarks"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    reason = None
    if not args.dry_run:
        sanitizer = gpu_facts.find_tool("compute-sanitizer")
        if sanitizer is None:
            reason = "compute-sanitizer is neither on PATH nor in a CUDA toolkit"
        else:
            options = ["--tool", "memcheck", "--error-exitcode", str(SANITIZER_FOUND_ERRORS)]
            tour = [sanitizer, *options, "--print-limit", "20", *tour]
    return [Step("memcheck", "memcheck", tour, MEMCHECK_LIMIT_S, env, reason)]


def bench_steps(args: argparse.Namespace, rows_path: Path) -> list[Step]:
    """A process for each benchmark: none can spoil another one's GPU."""
    steps = []
    for name in args.benchmarks:
        command = [sys.executable, "-m", f"gpu.{name}", *_benchmark_options(args)]
        command += ["--rows", str(rows_path)]
        if args.sizes is not None:
            command += ["--sizes", args.sizes]
        env = {"PYTHONPATH": _paths("python", "benchmarks"), **LOOPBACK}
        steps.append(Step("bench", name, command, BENCH_LIMITS_S[name], env))
    return steps


def _benchmark_options(args: argparse.Namespace) -> list[str]:
    dry = ["--dry-run"] if args.dry_run else []
    return ["--device", args.device, *dry, *(["--torch-kernels"] if args.torch_kernels else [])]


def _paths(*folders: str) -> str:
    """These of the repository, before those that are given and not of it: modules of benchmarks/
    and of tests/ share names."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in given if ROOT not in Path(path).resolve().parents]
    return os.pathsep.join([*(str(ROOT / folder) for folder in folders), *others])


class Record:
    """What is known of a run so far, and the files that say so."""

    def __init__(self, args: argparse.Namespace, facts: dict[str, str | None]) -> None:
        started = datetime.now(timezone.utc)
        self._started = started.isoformat(timespec="seconds")
        name = "dry" if args.dry_run else gpu_facts.slug(facts)
        stem = f"{name}-{started:%Y%m%dT%H%M%SZ}"
        self._args = args
        self._facts = facts
        args.output.mkdir(parents=True, exist_ok=True)
        self.json_path: Path = args.output / f"{stem}.json"
        self.summary_path: Path = args.output / f"{stem}.md"
        self.log_path: Path = args.output / f"{stem}.log"
        self.rows_path: Path = args.output / f"{stem}.rows.jsonl"
        self.outcomes: list[Outcome] = []

    def write(self) -> dict[str, Any]:
        """Writes both files anew; returns the record. What cannot be read or told is a note."""
        rows, notes = self._measured()
        try:
            found = figures.as_dicts(figures.figures(rows), self._args.dry_run)
        except Exception as error:
            found = []
            notes.append(f"no figures: {type(error).__name__}: {error}")
        arguments = {key: value for key, value in vars(self._args).items() if key != "output"}
        about = {key: value for key, value in self._facts.items() if key != "commit"}
        record: dict[str, Any] = {
            "benchmark": "gpu",
            "dry": self._args.dry_run,
            "started": self._started,
            "git_commit": self._facts["commit"],
            "machine": machine.describe() | about,
            "arguments": arguments,
            "notes": notes,
            "stages": [outcome.as_dict() for outcome in self.outcomes],
            "figures": found,
            "measurements": rows,
        }
        report.write_json(self.json_path, record)
        try:
            text = summary.markdown(record, gpu_facts.lines(self._facts))
        except Exception as error:
            text = f"No summary: {type(error).__name__}: {error}\n"
        report.write_whole(self.summary_path, text)
        return record

    def _measured(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows and notes of the benchmarks so far."""
        lines = self.rows_path.read_text().splitlines() if self.rows_path.exists() else []
        rows, notes = [], []
        for line in lines:
            try:
                entry = json.loads(line)
                benchmark = entry["benchmark"]
            except (ValueError, TypeError, KeyError):  # of a process that was ended as it wrote
                notes.append(f"not a row: {line[:100]}")
                continue
            if "note" in entry:
                notes.append(f"{benchmark}: {entry['note']}")
            else:
                rows.append(entry)
        return rows, notes


def run_steps(steps: Sequence[Step], budget: Budget, record: Record) -> None:
    """One after the other. An exception that ends the run, such as SystemExit, ends the step."""
    reason = None
    for step in steps:
        if reason is not None:
            step = replace(step, reason=reason)
        limit_s = budget.limit_s(step)
        try:
            outcome = stages.run(step, limit_s, record.log_path, ROOT)
        except BaseException:
            text = "the run itself was ended"
            record.outcomes.append(Outcome(step.stage, step.name, "stopped", 0.0, limit_s, text))
            raise
        record.outcomes.append(outcome)
        record.write()
        if step.stage != "build":  # what that leaves is not for the others
            budget.settle(step, outcome.seconds)
        elif outcome.is_failure and not EXTENSION.exists():
            reason = f"the build failed, and there is no {EXTENSION.name} of an earlier one"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if no step failed."""
    args = parse_arguments(arguments)
    budget = Budget(args.total_s)
    facts = gpu_facts.gather(args.commit or machine.git_commit())
    print("\n".join(gpu_facts.lines(facts)), flush=True)
    record = Record(args, facts)
    steps = steps_of(args, gpu_facts.arch(facts), record.rows_path)
    try:
        run_steps(steps, budget, record)
    finally:
        written = record.write()
        record.rows_path.unlink(missing_ok=True)
    print("\n" + "\n".join([*summary.stages(written["stages"]), ""]))
    print("\n".join([*summary.figures(written["figures"]), ""]))
    if args.dry_run:
        print("dry run: no number above is a measurement")
    print(f"{record.json_path}\n{record.summary_path}\n{record.log_path}")
    num_failed = sum(outcome.is_failure for outcome in record.outcomes)
    facts_of_end = {"benchmark": "gpu", "dry": args.dry_run, "json": str(record.json_path)}
    print(json.dumps({**facts_of_end, "num_failed": num_failed}))
    return 1 if num_failed else 0


def end_on_signals() -> None:
    """Makes the first request to end the process a SystemExit, and ignores later ones: what runs
    is to be ended, and the record written."""
    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for one in asking:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in asking:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
