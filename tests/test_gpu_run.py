"""What `make gpu` must do when things go wrong, tested without a GPU.

`make gpu-dry` runs all of its lines; these tests cover failures that would waste time on a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need rich")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gpu import asked, clocks, extension, facts, run, soak
from gpu.bench import Bench
from gpu.facts import GIB
from gpu.record import Record
from gpu.run import Step
from gpu.timing import Job
from protocol import Entry
from simulated_processes import SimulatedProcesses

H200 = {
    "gpu": "NVIDIA H200",
    "capability": "9.0",
    "free_bytes": 139 * GIB,
    "total_bytes": 140 * GIB,
    "torch": "2.11.0+cu130",
    "torch_cuda": "13.0",
    "driver_cuda": "13.0",
}
ROW = {"label": "rota x", "op": "pack", "num_bytes": 8, "p50_us": 1.0, "min_us": 1, "p99_us": 1}


def step(code: str, name: str = "x", limit_s: float = 30.0, **more: Any) -> Step:
    return Step(more.pop("stage", "bench"), name, limit_s, [sys.executable, "-c", code], **more)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def write_row(rows_path: Path, text: str = json.dumps(ROW)) -> str:
    return f"open({str(rows_path)!r}, 'a').write({text!r} + chr(10));"


Run = Callable[[Callable[[Path], list[Step]]], tuple[int, dict[str, Any]]]


@pytest.fixture
def run_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs steps as if on an H200; returns the exit status and the record."""

    def run_them(steps: Callable[[Path], list[Step]]) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(facts, "gather", lambda: H200)
        monkeypatch.setattr(run, "make_steps", lambda args, facts, record: steps(record.rows_path))
        status = run.main(["--output", str(tmp_path), "--commit", "abc"])
        (record_path,) = tmp_path.glob("h200-*.json")
        (summary_path,) = tmp_path.glob("h200-*.md")
        assert "NVIDIA H200" in summary_path.read_text()
        assert not list(tmp_path.glob("*.rows.jsonl")), "the record has them"
        return status, json.loads(record_path.read_text())

    return run_them


def test_step_that_fails_stops_no_other_and_what_was_measured_is_kept(
    run_steps: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "EXTENSION", Path(__file__))  # as if built earlier

    def steps(rows: Path) -> list[Step]:
        return [
            step("raise SystemExit('no compiler')", "build", stage="build"),
            step("", "memcheck", reason="it is not there"),
            step("print('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)", is_optional=True),
            # Measures, then crashes while writing.
            step(f"import os; {write_row(rows)} {write_row(rows, json.dumps(ROW)[:9])} os.abort()"),
            step("print('fine')"),
        ]

    status, record = run_steps(steps)
    assert status == 1
    verdicts = [one["verdict"] for one in record["steps"]]
    assert verdicts == ["failed", "left out", "did not run", "failed", "passed"]
    texts = [one["text"] for one in record["steps"]]
    assert texts[0] == "exit status 1: no compiler" and "ERR_NVGPUCTRPERM" in texts[2]
    assert texts[4] == "fine"
    assert record["measurements"] == [ROW] and record["measured"] is True
    assert record["notes"] == ["not a row: " + json.dumps(ROW)[:9]]
    assert record["git_commit"] == "abc" and record["machine"]["gpu"] == "NVIDIA H200"


def test_build_that_leaves_nothing_to_run_ends_the_run(
    run_steps: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "EXTENSION", tmp_path / "_C.so")
    steps = [step("raise SystemExit(1)", "build", stage="build"), step("1")]
    status, record = run_steps(lambda rows: steps)
    assert status == 1
    assert [one["verdict"] for one in record["steps"]] == ["failed", "left out"]
    assert "no _C.so" in record["steps"][1]["text"]


def test_run_without_failures_is_recorded_after_each_step(run_steps: Run, tmp_path: Path) -> None:
    look = f"import glob; print('first' in open(glob.glob({str(tmp_path / '*.json')!r})[0]).read())"
    steps = [step("print('first')"), step("raise SystemExit(1)", is_optional=True), step(look)]
    status, record = run_steps(lambda rows: steps)
    assert status == 0
    assert record["steps"][2]["text"] == "True"


def test_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """The step's child ignores signals; the step itself ends at the first one, like pytest."""
    child = ["sh", "-c", "trap '' INT TERM; echo ready; exec sleep 600"]
    code = (
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"child = subprocess.Popen({child!r}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "try:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('two tests failed, child', child.pid)"
    )
    limit_s = 4.0  # enough to start all that on a busy machine
    started = time.monotonic()
    outcome = run.run_step(step(code), limit_s, tmp_path / "log")
    assert time.monotonic() - started < limit_s + 3 * run.GRACE_S
    assert outcome["verdict"] == "stopped"
    assert "not done within 4 s; the last line: two tests failed" in outcome["text"]
    assert not is_alive(int(outcome["text"].split()[-1]))


def test_step_that_leaves_a_child_behind_ends_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    outcome = run.run_step(step(code), 30.0, tmp_path / "log")
    assert outcome["verdict"] == "passed"
    assert not is_alive(int(outcome["text"]))


def test_step_without_time_is_not_started_and_counts_as_stopped(tmp_path: Path) -> None:
    outcome = run.run_step(step("print('ran')"), 0.0, tmp_path / "log")
    assert outcome["verdict"] == "stopped" and "not started" in outcome["text"]


def test_run_that_is_asked_to_end_ends_and_is_recorded(run_steps: Run, tmp_path: Path) -> None:
    """The step asks for it."""
    handlers = {
        one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }

    def steps(rows: Path) -> list[Step]:
        write_pid = (
            f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        )
        return [step(f"{write_pid} {write_row(rows)} os.kill(os.getppid(), 15); time.sleep(600)")]

    run.end_on_signals()
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            run_steps(steps)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    (record_path,) = tmp_path.glob("*.json")
    record = json.loads(record_path.read_text())
    assert record["measurements"] == [ROW]
    (stopped,) = record["steps"]
    assert (stopped["verdict"], stopped["text"]) == ("stopped", "the run itself was ended")


@pytest.mark.parametrize(
    ("change", "stages", "sentence"),
    [
        ({"gpu": None, "why": "No CUDA GPUs are available"}, "", "no usable GPU (No CUDA GPUs"),
        (
            {"gpu": None, "driver_cuda": "12.4"},
            "",
            "supports CUDA up to 12.4 and torch 2.11.0+cu130",
        ),
        ({"free_bytes": 5 * GIB}, "", "5.0 of 140.0 GiB free and the run needs 16.0"),
        ({"torch_cuda": None}, "", "a build for the CPU"),
        ({}, "biuld", "biuld"),
    ],
)
def test_run_that_cannot_be_says_why_before_any_step(
    change: dict[str, Any],
    stages: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(facts, "gather", lambda: H200 | change)
    assert run.main(["--output", str(tmp_path / "none"), "--stages", stages]) == 2
    text = capsys.readouterr().err
    assert sentence in text and text.count("\n") == 1
    assert stages or not (tmp_path / "none").exists()


def rows_of(
    op: str, *values: tuple[str, float], num_bytes: int = 64 << 20, **more: Any
) -> list[Any]:
    row = {"backend": "rota", "api": "", "op": op, "num_bytes": num_bytes, "p50_us": 1.0, **more}
    return [{**row, "label": label, "of_copy": of_copy} for label, of_copy in values]


def test_figures_take_the_worst_row_that_is_right() -> None:
    turns = {"rota pack, unpack": 10.0, "torch hook, unscale, clip": 40.0}
    after = "all_reduce, one after another"
    rows = [
        *rows_of("pack", ("a", 0.95), ("b", 0.93), shape="1 tensor"),
        *rows_of("pack", ("short", 0.1), num_bytes=8, shape="1 tensor"),
        *rows_of("pack", ("wrong", 0.5), shape="1 tensor", num_wrong=1),
        *(rows_of("fused turn", (name, 1), p50_us=us)[0] for name, us in turns.items()),
        *rows_of(after, ("ll", 0), num_bytes=8, p50_us=4.0, ranks=2, algorithm="low_latency"),
        *rows_of(after, ("ll", 0), num_bytes=8192, p50_us=7.0, ranks=2, algorithm="low_latency"),
        *rows_of(after, ("ring", 0), num_bytes=8192, p50_us=70.0, ranks=2, algorithm="ring"),
    ]
    got = {one["what"]: (one["got"], one["met"]) for one in asked.asked(rows)}
    assert got["pack, 1 tensor, 64 MiB and more, of a copy's rate, the worst format"] == (
        "0.93",
        True,
    )
    assert got["low_latency to 8 KiB of 2 local ranks in a CUDA graph, µs"] == ("7", False)
    assert got["rota pack, unpack: times faster than torch hook, unscale, clip"] == ("4", True)
    assert got["low_latency to 8 KiB of 4 local ranks in a CUDA graph, µs"] == (
        "not measured",
        None,
    )


def test_stage_first_takes_at_most_four_minutes(tmp_path: Path) -> None:
    args = run.parse_arguments(["--output", str(tmp_path), "--commit", "abc"])
    record = Record(tmp_path, H200, "abc", is_small=False)
    first = [one for one in run.make_steps(args, H200, record) if one.stage == "first"]
    assert sum(one.limit_s for one in first) <= 240
    assert "-m order" in " ".join(first[1].command)


def test_pack_is_taken_if_it_fits_and_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken, init = tmp_path / "python" / "rota" / "_C.so", tmp_path / "python/rota/__init__.py"
    monkeypatch.setattr(extension, "ROOT", tmp_path)
    monkeypatch.setattr(extension, "PACK", tmp_path / "pack")
    monkeypatch.setattr(extension, "EXTENSION", taken)
    for folder in ("csrc", "pack", "python/rota"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (tmp_path / "csrc" / "a.cpp").write_text("int a;")
    (tmp_path / "pack" / "_C.so").write_text("an extension")
    about_path, about = extension.PACK / extension.ABOUT, extension.needs("shipped:9.0")

    def take(wanted: str = "shipped:9.0", **changes: str) -> str:
        about_path.write_text(json.dumps(about | changes))
        return str(extension.take_pack(wanted))

    for name in about:
        assert take(**{name: "other"}) == f"the pack's {name} is other, here {about[name]}"
    assert "archs is shipped:9.0, here shipped:8.0" in take("shipped:8.0")
    init.write_text("raise ImportError('GLIBC_2.38 not found')")
    assert "GLIBC_2.38 not found" in take()
    assert not taken.exists()
    init.write_text("assert True")
    assert take() == "None" and taken.read_text() == "an extension"
    (tmp_path / "csrc" / "a.cpp").write_text("int b;")
    assert "the pack's sources is" in take()
    about_path.unlink()
    assert extension.take_pack("shipped:9.0") == "there is no pack"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_soak_sees_one_wrong_bit_of_one_call(num_ranks: int) -> None:
    class Group:
        world_size = num_ranks
        wrong_bit = 0

        def all_reduce(self, tensors: list[torch.Tensor], *_args: Any, **_options: Any) -> None:
            total = sum(tensors[1:], tensors[0])
            for tensor in tensors:
                tensor.copy_(total)
            tensors[-1][5] ^= self.wrong_bit

    start = torch.arange(-5, 100, dtype=torch.int32)
    group: Any = Group()
    chain = soak.Chain(group, "ring", start, [start.clone() for _ in range(num_ranks)])
    for _ in range(50):
        chain.call()
    assert chain.num_wrong(50) == 0
    assert chain.num_wrong(49) == num_ranks * len(start)
    group.wrong_bit = 1 << 30
    chain.call()
    group.wrong_bit = 0
    assert chain.num_wrong(51) == 1
    for _ in range(100):
        chain.call()
    assert chain.num_wrong(151) == num_ranks


READINGS = [(1980.0, 3201.0, 350.5, 40.0, 0x1), (1500.0, 3201.0, 700.0, 80.0, 0x4)]


def test_clocks_are_read_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["1980, 3201, 350.5, 40, 0x0000000000000001", "1500, 3201, 700, 80, 0x0000000000000004"]
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert list(clocks._from_smi("GPU-x")) == READINGS


def test_row_that_was_measured_while_the_gpu_was_throttled_is_marked() -> None:
    """If a reading during it, or the next one before or after it, shows throttling."""
    watched = clocks.Clocks.__new__(clocks.Clocks)
    watched._readings = list(
        zip([1.0, 2.0, 3.0, 4.0], [READINGS[i] for i in (0, 0, 1, 0)], strict=True)
    )
    assert "throttled" not in watched.during([(0.5, 0.9), (1.2, 1.8)])
    for span in [(2.2, 2.8), (2.5, 3.5), (3.2, 3.3)]:
        told = watched.during([span])
        assert told["throttled"] == ["software power cap"] and told["max_power_w"] == 700.0
        assert told["sm_mhz"] == [1500.0, 1980.0]
    watched._readings = []
    assert watched.during([(1, 2)]) == {}


def measure_jobs_that_fail(rows: Path) -> int:
    """Some fail when made, checked, timed, or checked again at the end; returns how many."""
    bench = Bench("x", [4096], True, rows)
    gone = RuntimeError("the GPU is gone")

    def fail_from(number: int, error: Exception) -> Callable[[], int]:
        calls = itertools.count(1)

        def call() -> int:
            if next(calls) >= number:
                raise error
            return 0

        return call

    def job(
        label: str,
        call: Callable[[], object] = lambda: None,
        check: Callable[[], int] = lambda: 0,
        **more: Any,
    ) -> Job:
        return Job(Entry(label, "rota", "api"), [call], 4096, check, **more)

    jobs = [
        bench.copy_job(4096),
        job("fine"),
        job("wrong", check=lambda: 2),
        job("refused", fail_from(1, ValueError("too long")), may_be_refused=True),
        job("broken", fail_from(1, gone)),
        job("checked", check=fail_from(2, gone)),
        job("on the stream", fail_from(4, gone), in_graph=False),
    ]
    bench.measure(jobs, "op", 4096, ranks=2)
    return bench.num_failed


def test_job_that_fails_costs_one_job(processes: SimulatedProcesses, tmp_path: Path) -> None:
    rows_path = tmp_path / "rows"
    failed = processes.run(measure_jobs_that_fail, rows_path, SIMULATED_GPU_TORCH_OPERATORS="1")
    assert failed == 3
    written = [json.loads(line) for line in rows_path.read_text().splitlines()]
    rows = {one["label"]: one for one in written if "label" in one}
    copy = "copy of as many bytes"
    assert list(rows) == [copy, f"{copy}, again", "fine", "wrong"]
    assert rows["wrong"]["num_wrong"] == 4, "checked before and after"
    assert rows[f"{copy}, again"]["noise"] > 0 and rows["fine"]["of_copy"] > 0
    notes = [one["note"] for one in written if "note" in one]
    assert [note.split(",")[0] for note in notes] == [
        "refused: refused",
        "failed: broken",
        "failed: on the stream",
        "failed: checked",
    ]
