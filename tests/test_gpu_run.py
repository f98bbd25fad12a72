"""What `make gpu` must do when things go wrong, tried where there is no GPU.

`make gpu-dry` runs the whole of it; here are the ways in which a minute on a GPU could be lost.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the benchmarks need rich")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gpu import facts, figures, frame, gradients, local_all_reduce, run, stages, summary, tour
from gpu.dry import HostGroup, HostTarget
from gpu.frame import COPY, Bench, Job
from gpu.stages import Step
from protocol import Entry

FACTS = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_mib": "143771",
    "driver": "580.1",
    "torch": "2.11.0",
    "nvcc": None,
    "commit": "abc",
}


def python_step(code: str, limit_s: float = 30.0, stage: str = "bench", name: str = "x") -> Step:
    return Step(stage, name, [sys.executable, "-c", code], limit_s, {})


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"


# ---- steps


def test_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Its child ignores the requests to end, and holds the pipe open."""
    child = (
        "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
        "time.sleep(600)"
    )
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(0.5); print(child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    started = time.monotonic()
    outcome = stages.run(python_step(code), 2.0, log, tmp_path)
    assert time.monotonic() - started < 2.0 + 5 * stages.GRACE_S
    assert outcome.verdict == "stopped" and outcome.is_failure
    pid = int(outcome.text.split()[-1])
    assert "not done within 2 s" in outcome.text
    assert not is_alive(pid)
    assert str(pid) in log.read_text(), "its output is kept"


def test_step_that_leaves_a_child_behind_ends_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)"
    )
    outcome = stages.run(python_step(code), 30.0, tmp_path / "log", tmp_path)
    assert outcome.verdict == "passed"
    assert not is_alive(int(outcome.text))


def test_step_is_not_held_up_by_what_has_ended_and_was_not_waited_for(tmp_path: Path) -> None:
    """A process that the step's own end does not reach leaves a zombie in the step's group."""
    code = (
        "import os, time\n"
        "step = os.getpgrp()\n"
        "if (holder := os.fork()) == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    if os.fork() == 0:\n"
        "        os.setpgid(0, step)\n"
        "        os._exit(0)\n"
        "    os.close(1), os.close(2)\n"
        "    time.sleep(600)\n"
        "time.sleep(0.5); print(holder)"
    )
    started = time.monotonic()
    outcome = stages.run(python_step(code), 30.0, tmp_path / "log", tmp_path)
    os.kill(int(outcome.text), signal.SIGKILL)
    assert outcome.verdict == "passed"
    assert time.monotonic() - started < stages.GRACE_S


def test_step_that_is_stopped_can_tell_what_it_knows(tmp_path: Path) -> None:
    """As pytest does on SIGINT."""
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('two tests failed')"
    )
    log = tmp_path / "log"
    outcome = stages.run(python_step(code), 1.0, log, tmp_path)
    assert outcome.verdict == "stopped" and "no output" in outcome.text, "before it was stopped"
    assert "two tests failed" in log.read_text()


def test_failure_is_told_although_a_later_test_hangs(tmp_path: Path) -> None:
    """As one does that waits for a GPU: neither it nor pytest hears SIGINT."""
    conftest = run.ROOT / "tests" / "gpu" / "conftest.py"
    (tmp_path / "conftest.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('of_gpu', {str(conftest)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "pytest_runtest_logreport = module.pytest_runtest_logreport\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import signal, time\n"
        "def test_a():\n    assert 6 * 7 == 41\n"
        "def test_b():\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=0.5", "test_it.py"]
    log = tmp_path / "log"
    outcome = stages.run(Step("test", "x", command, 30.0, {}), 15.0, log, tmp_path)
    assert outcome.verdict == "stopped"
    assert "assert (6 * 7) == 41" in log.read_text()
    assert "in test_b" in log.read_text(), "the stack of what hangs"


def test_step_without_time_is_not_started_and_counts_as_stopped(tmp_path: Path) -> None:
    outcome = stages.run(python_step("print('ran')"), 0.0, tmp_path / "log", tmp_path)
    assert outcome.verdict == "stopped" and "not started" in outcome.text


def test_budget_gives_what_is_spare_but_not_all_to_one_step() -> None:
    budget, step = stages.Budget(1000.0), python_step("", limit_s=50.0)
    assert budget.limit_s(step) == 50.0
    budget.settle(step, 30.0)
    assert budget.limit_s(step) == 70.0
    budget.settle(step, 70.0)
    assert budget.limit_s(step) == 50.0
    for _ in range(3):
        budget.settle(step, 0.0)
    assert budget.limit_s(step) == 100.0
    assert 39.0 < stages.Budget(40.0).limit_s(step) <= 40.0, "no later than the whole run"


def test_step_that_fails_tells_its_status_and_last_line(tmp_path: Path) -> None:
    step = python_step("import sys; print('why'); print(); sys.exit(3)")
    outcome = stages.run(step, 30.0, tmp_path / "log", tmp_path)
    assert (outcome.verdict, outcome.text) == ("failed", "exit status 3: why")
    step = Step("bench", "x", ["/no/such/program"], 1.0, {})
    assert stages.run(step, 1.0, tmp_path / "log", tmp_path).verdict == "failed"


ROW = {"benchmark": "b", "label": "rota x", "op": "pack", "num_bytes": 8, "p50_us": 1.0} | {
    "min_us": 1.0,
    "p99_us": 1.0,
}


def run_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: Callable[[Path], list[Step]]
) -> tuple[int, dict[str, Any]]:
    """The exit status, and the record."""
    monkeypatch.setattr(run, "steps_of", lambda args, arch, rows_path: steps(rows_path))
    monkeypatch.setattr(facts, "gather", lambda commit: FACTS | {"commit": commit})
    status = run.main(["--output", str(tmp_path), "--commit", "abc"])
    (record_path,) = tmp_path.glob("h200-*.json")
    assert not list(tmp_path.glob("*.rows.jsonl")), "the record has them"
    (summary_path,) = tmp_path.glob("h200-*.md")
    assert "NVIDIA H200" in summary_path.read_text()
    record: dict[str, Any] = json.loads(record_path.read_text())
    return status, record


def test_run_goes_on_after_failures_and_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "EXTENSION", Path(__file__))  # of an earlier build

    def steps(rows_path: Path) -> list[Step]:
        write = f"open({str(rows_path)!r}, 'a').write({json.dumps(ROW)!r} + chr(10))"
        write_half = f"open({str(rows_path)!r}, 'a').write({json.dumps(ROW)[:20]!r})"
        return [
            python_step("raise SystemExit('no compiler')", stage="build", name="build"),
            python_step("raise SystemExit(1)", stage="test", name="test"),
            Step("memcheck", "memcheck", [], 1.0, {}, reason="it is not there"),
            # Measures, then crashes as it writes.
            python_step(f"import os; {write}; {write_half}; os.abort()", name="b"),
            python_step("print('fine')", name="c"),
        ]

    status, record = run_steps(monkeypatch, tmp_path, steps)
    assert status == 1
    verdicts = [one["verdict"] for one in record["stages"]]
    assert verdicts == ["failed", "failed", "left out", "failed", "passed"]
    assert "no compiler" in record["stages"][0]["text"]
    assert record["measurements"] == [ROW]
    assert record["notes"] == ["not a row: " + json.dumps(ROW)[:20]]
    assert record["git_commit"] == "abc" and record["dry"] is False
    assert record["machine"]["gpu"] == "NVIDIA H200"


def test_rows_that_cannot_be_told_cost_no_more_than_the_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"benchmark": "b", "op": "pack", "backend": "rota", "shape": "1 tensor"}

    def steps(rows_path: Path) -> list[Step]:
        return [python_step(f"open({str(rows_path)!r}, 'a').write({json.dumps(row)!r} + chr(10))")]

    monkeypatch.setattr(facts, "gather", lambda commit: FACTS | {"commit": commit})
    monkeypatch.setattr(run, "steps_of", lambda args, arch, rows_path: steps(rows_path))
    assert run.main(["--output", str(tmp_path)]) == 0
    (record_path,) = tmp_path.glob("*.json")
    record = json.loads(record_path.read_text())
    assert record["measurements"] == [row] and record["figures"] == []
    assert "no figures: KeyError" in record["notes"][0]
    (summary_path,) = tmp_path.glob("*.md")
    assert summary_path.read_text().startswith("No summary: KeyError")


def test_run_leaves_out_what_a_failed_build_left_nothing_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "EXTENSION", tmp_path / "_C.so")
    steps = [python_step("raise SystemExit(1)", stage="build", name="build"), python_step("1")]
    status, record = run_steps(monkeypatch, tmp_path, lambda rows: steps)
    assert status == 1
    assert [one["verdict"] for one in record["stages"]] == ["failed", "left out"]
    assert "no _C.so" in record["stages"][1]["text"]


def test_run_that_is_asked_to_end_ends_its_step_and_is_recorded(tmp_path: Path) -> None:
    """With the benchmark's rows so far."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gpu import run\n"
        "from gpu.stages import Step\n"
        "code = sys.argv[1]\n"
        "def steps_of(args, arch, rows_path):\n"
        "    step = [sys.executable, '-c', code, str(rows_path)]\n"
        "    return [Step('bench', 'x', step, 100.0, {})]\n"
        "run.steps_of = steps_of\n"
        "run.end_on_signals()\n"
        "run.main(['--output', sys.argv[2], '--commit', 'abc'])\n"
    )
    step = (
        "import os, sys, time\n"
        f"open(sys.argv[1], 'a').write({json.dumps(ROW)!r} + chr(10))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, step, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(run.ROOT / "benchmarks")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid "))
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not is_alive(pid)
    (record_path,) = tmp_path.glob("*.json")
    record = json.loads(record_path.read_text())
    assert record["measurements"] == [ROW]
    (stage,) = record["stages"]
    assert (stage["verdict"], stage["text"]) == ("stopped", "the run itself was ended")


def test_run_without_failures_has_status_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left_out = Step("memcheck", "memcheck", [], 1.0, {}, reason="it is not there")
    status, _ = run_steps(monkeypatch, tmp_path, lambda rows: [python_step("1"), left_out])
    assert status == 0


def test_run_is_recorded_after_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that is taken away in the middle leaves what was done until then."""
    look = f"import glob; print(open(glob.glob({str(tmp_path / '*.json')!r})[0]).read())"
    steps = [python_step("print('first')", name="a"), python_step(look, name="b")]
    status, _ = run_steps(monkeypatch, tmp_path, lambda rows: steps)
    assert status == 0
    (log,) = tmp_path.glob("*.log")
    assert '"text": "first"' in log.read_text()


# ---- the command line


def limits_of(arguments: list[str]) -> dict[str, float]:
    steps = run.steps_of(run.parse_arguments(arguments), "90", Path("rows"))
    return {step.name: step.limit_s for step in steps}


def test_half_of_the_time_of_a_call_is_enough_for_the_benchmarks_and_the_checker() -> None:
    """What comes late has its time if builds and tests take no more than they should."""
    limits = limits_of([])
    late = [name for name in limits if name in run.BENCH_LIMITS_S or name == "memcheck"]
    assert sum(limits[name] for name in late) <= 240
    assert max(limits.values()) <= 240
    most_to_end_a_step_s = 600 - run.TOTAL_S
    assert len(stages.STOPPING) * stages.GRACE_S < most_to_end_a_step_s


def test_stages_and_benchmarks_can_be_chosen() -> None:
    chosen = limits_of(["--stages", "build bench", "--benchmarks", "latency,copy_rate"])
    assert list(chosen) == ["build", "latency", "copy_rate"]
    assert list(limits_of(["--stages", "test"])) == ["test local ranks", "test processes"]


def test_every_file_of_gpu_tests_is_in_one_step() -> None:
    steps = run.test_steps(run.parse_arguments([]), "90")
    tests = Path(run.ROOT) / "tests" / "gpu"
    assert all((tests / name).exists() for name in run.LOCAL_TESTS)
    assert [f"tests/gpu/{name}" for name in run.LOCAL_TESTS] == list(steps[0].command[-2:])
    assert "tests/gpu" in steps[1].command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stages", "biuld"], "biuld"),
        (["--benchmarks", "speed"], "speed"),
        (["--device", "cpu"], "--dry-run"),
        (["--dry-run", "--output", str(run.RESULTS)], "another --output"),
    ],
)
def test_bad_command_line_is_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run.parse_arguments(arguments)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert complaint in text and text.count("\n") == 1


def test_build_is_for_the_gpu_that_is_there() -> None:
    (step,) = run.build_steps(run.parse_arguments([]), facts.arch(FACTS))
    assert step.env["ROTA_CUDA"] == "1" and step.env["ROTA_CUDA_ARCHS"] == "90"
    assert list(step.command[1:]) == ["setup.py", "build_ext", "--inplace"]


def test_build_takes_the_toolkit_that_was_found_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "find_tool", lambda name: f"/usr/local/cuda/bin/{name}")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (step,) = run.build_steps(run.parse_arguments([]), None)
    assert step.env["CUDA_HOME"] == "/usr/local/cuda"
    assert step.env["PATH"].split(os.pathsep)[-1] == str(Path(sys.executable).parent)
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda")
    (step,) = run.build_steps(run.parse_arguments([]), None)
    assert "CUDA_HOME" not in step.env


def test_facts_of_a_machine_without_a_gpu_say_so() -> None:
    nothing = dict.fromkeys(FACTS) | {"commit": "abc"}
    lines = facts.lines(nothing)
    assert len(lines) == 5 and "none that nvidia-smi can see" in lines[0]
    assert facts.slug(FACTS) == "h200" and facts.arch(nothing) is None


# ---- one benchmark


def make_bench(rows_path: Path | None = None) -> Bench:
    argv, sys.argv = sys.argv, ["x", "--dry-run", "--device", "cpu", "--sizes", "4K"]
    try:
        args = frame.parse_arguments("doc", "1M", "1K")
    finally:
        sys.argv = argv
    args.rows = rows_path
    return Bench("x", args, HostTarget())


def job(label: str, call: Callable[[], object], **options: Any) -> Job:
    return Job(Entry(label, "rota", "api"), [call], 1000, **options)


def refuse() -> object:
    raise ValueError("too long\nsecond line")


def test_bench_keeps_what_works_and_notes_the_rest(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "rows")
    jobs = [
        bench.copy_job(4096),
        job("fine", lambda: None, check=lambda: 0, more={"extra": 1}),
        job("wrong", lambda: None, check=lambda: 2),
        job("refused", refuse, may_be_refused=True),
        job("broken", refuse),
    ]
    bench.measure(jobs, "op", 4096, ranks=2)
    assert [row["label"] for row in bench.rows] == [COPY, "fine", "wrong"]
    assert bench.num_failed == 1
    assert [note.count("too long") for note in bench.notes] == [1, 1]
    summary_of_bench = bench.summary()
    assert summary_of_bench["num_wrong"] == 4, "checked before and after"
    assert summary_of_bench["dry"] is True
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row for row in written if "note" not in row] == [
        {"benchmark": "x", **row} for row in bench.rows
    ]
    assert bench.rows[1]["extra"] == 1 and bench.rows[1]["of_copy"] > 0


def fail_at(number: int) -> Callable[[], int]:
    """A call, or a check, that fails the `number`th time and ever after."""
    calls = itertools.count(1)

    def call() -> int:
        if next(calls) >= number:
            raise RuntimeError("the GPU is gone")
        return 0

    return call


def test_bench_drops_a_job_that_fails_late_and_goes_on_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its first turn, or in the check after its last one."""
    bench = make_bench()
    bench.large_copy_rate()
    warmed_up = fail_at(1 + bench.plan.num_warmups)
    bodies = iter([lambda: None, warmed_up, lambda: None, lambda: None])
    monkeypatch.setattr(bench.target, "capture", lambda body: next(bodies))
    jobs = [
        bench.copy_job(4096),
        job("first turn", lambda: None),
        job("last check", lambda: None, check=fail_at(2)),
        job("fine", lambda: None, check=lambda: 0),
    ]
    bench.measure(jobs, "op", 4096)
    assert [row["label"] for row in bench.rows] == [COPY, "fine"]
    assert bench.num_failed == 2
    assert [note.split(",")[0] for note in bench.notes] == ["first turn", "last check"]


def test_bench_times_on_the_stream_what_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench()

    def capture(body: object) -> object:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(bench.target, "capture", capture)
    bench.measure([job("fine", lambda: None)], "op", 4096)
    assert bench.rows[0]["timed"] == "stream"
    assert any("not while capturing" in note for note in bench.notes)


class Hanging(HostGroup):
    """Times out in its ordered ring, and is of no use from then on, as rota.LocalGroup."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._has_timed_out = False

    def all_reduce(
        self, tensors: Any, op: str = "sum", algorithm: str = "auto", *more: Any, **named: Any
    ) -> None:
        self._has_timed_out |= algorithm == "ordered_ring"
        if self._has_timed_out:
            raise TimeoutError("make a new group")
        super().all_reduce(tensors, op, algorithm, *more, **named)


def test_local_group_that_times_out_costs_its_algorithm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench()
    monkeypatch.setattr(bench.target, "local_group", Hanging)
    local_all_reduce.measure(bench, 4, 4096)
    algorithms = [row["algorithm"] for row in bench.rows if row["backend"] == "rota"]
    assert algorithms == [name for name in local_all_reduce.ALGORITHMS if name != "ordered_ring"]


def test_tour_goes_on_with_a_new_group_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = HostTarget()
    monkeypatch.setattr(target, "local_group", lambda world_size, timeout_s: Hanging(world_size))
    monkeypatch.setattr(tour, "open_target", lambda args: target)
    monkeypatch.setattr(tour, "buckets", lambda target: [])
    monkeypatch.setattr(sys, "argv", ["tour", "--dry-run", "--device", "cpu"])
    assert tour.main() == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == len(tour.RANKS) * len(tour.DTYPES)
    assert all("ordered_ring" in line for line in failed)


@pytest.mark.parametrize("num_elems", [4096, 16_384, 67_108_864])
def test_mixed_sizes_are_mixed_and_complete(num_elems: int) -> None:
    sizes = gradients.mixed_sizes(num_elems, 300)
    assert len(sizes) == 300 and sum(sizes) == num_elems and min(sizes) >= 1
    if num_elems > 1 << 20:
        assert max(sizes) > 1000 * min(sizes)
        assert any(size % 4 for size in sizes)
    with pytest.raises(ValueError, match="too few"):
        gradients.mixed_sizes(300, 300)


# ---- asked and got


def row_of(op: str, label: str, num_bytes: int, p50_us: float, **more: Any) -> dict[str, Any]:
    return {
        "backend": "rota",
        "op": op,
        "label": label,
        "num_bytes": num_bytes,
        "p50_us": p50_us,
    } | more


LARGE = 64 << 20
ROWS = [
    row_of("pack", "a", LARGE, 10.0, shape="1 tensor", of_copy=0.95),
    row_of("pack", "b", LARGE, 10.0, shape="1 tensor", of_copy=0.93),
    row_of("pack", "small", 1 << 20, 10.0, shape="1 tensor", of_copy=0.1),
    row_of("unpack", "a", LARGE, 10.0, shape="1 tensor", of_copy=0.91),
    row_of("pack", "a", LARGE, 10.0, shape="300 tensors", launches=1),
    row_of("unpack", "a", LARGE, 10.0, shape="300 tensors", launches=2),
    row_of("mixed precision", "rota pack, unpack", LARGE, 10.0, shape="1 tensor"),
    row_of("mixed precision", COPY, LARGE, 5.0, shape="1 tensor", backend="torch"),
    row_of("mixed precision", "torch", LARGE, 35.0, shape="1 tensor", backend="torch"),
    row_of("all_reduce", "rota one_shot", LARGE, 9.0, ranks=2, of_copy=0.5),
    row_of("all_reduce", "rota two_shot", LARGE, 9.0, ranks=2, of_copy=0.9),
    row_of("all_reduce", "rota two_shot", LARGE, 9.0, ranks=4, of_copy=0.9, num_wrong=1),
    row_of("all_reduce, one after another", "rota auto", 8, 4.0, ranks=2),
    row_of("all_reduce, one after another", "rota auto", 8192, 9.0, ranks=2),
    row_of("all_reduce, one after another", "rota ll", 8192, 5.5, ranks=2),
    row_of("all_reduce, one after another", "rota auto", 65536, 50.0, ranks=2),
]  # fmt: skip


def test_figures_take_the_worst_size_of_the_best_algorithm() -> None:
    got = {figure.what.split(":")[0]: figure for figure in figures.figures(ROWS)}
    expected = {
        "pack, 1 tensor, 64 MiB and more": ("93.0%", True),
        "unpack, 1 tensor, 64 MiB and more": ("91.0%", False),
        "unpack, 300 tensors, 64 MiB and more": ("not measured", None),
        "pack of 300 tensors of mixed sizes": ("1", True),
        "unpack of 300 tensors of mixed sizes": ("2", False),
        "rota pack, unpack": ("3.50", True),
        "rota pack, unpack, clip in place": ("not measured", None),
        "local-rank all-reduce, 2 ranks, 64 MiB each": ("90.0%", True),
        "all-reduce to 8 KiB, 2 local ranks, in a CUDA graph": ("5.50 µs", True),
        "all-reduce to 8 KiB, 4 local ranks, in a CUDA graph": ("not measured", None),
        # What is wrong was not measured, however quick it was.
        "local-rank all-reduce, 4 ranks, 64 MiB each": ("not measured", None),
    }
    for what, (value, is_met) in expected.items():
        assert (got[what].got, got[what].is_met) == (value, is_met), what
    for one in figures.as_dicts(figures.figures(ROWS), is_dry=True):
        assert one["is_met"] is None
        assert one["got"] == "not measured" or one["got"].startswith("made up: ")


def test_summary_of_a_dry_run_says_so() -> None:
    record = {
        "dry": True,
        "started": "today",
        "stages": [],
        "figures": figures.as_dicts(figures.figures(ROWS), is_dry=True),
        "notes": ["x: y"],
        "measurements": [],
    }
    text = summary.markdown(record, facts.lines(FACTS))
    assert "No number below is a measurement" in text and "- x: y" in text
    assert "made up" in text
