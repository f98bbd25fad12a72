"""What `python -m rota doctor` reports about GPUs, for each kind of build and machine, and its test
of one GPU, here a simulated one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rota
import simulated_gpu
from rota import _C
from rota import __main__ as rota_main
from rota.doctor import gpu as doctor_gpu
from rota.doctor import report as doctor_report
from simulated_processes import Outcome, SimulatedProcesses


def gpus_line(capsys: pytest.CaptureFixture[str]) -> str:
    assert doctor_report.run() == 0
    return next(line for line in capsys.readouterr().out.splitlines() if "GPUs: " in line)


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips doctor's trial run: it would take seconds per test, and other tests cover it."""
    monkeypatch.setitem(doctor_report._CHECKS, "trial", lambda: "left out")


def pretend(monkeypatch: pytest.MonkeyPatch, archs: list[str], devices: list[str] | str) -> None:
    """Fakes a build for these architectures and a machine with these GPUs, or this error."""

    def cuda_devices() -> list[str]:
        if isinstance(devices, str):
            raise rota.TransportError(devices)
        return devices

    monkeypatch.setattr(_C, "cuda_archs", lambda: archs)
    monkeypatch.setattr(_C, "cuda_devices", cuda_devices)


ARCHS = ["sm_90", "compute_90"]
GPUS = ["NVIDIA H200 (sm_90)", "NVIDIA A100 (sm_80)"]


@pytest.mark.parametrize(
    ("archs", "devices", "said"),
    [
        ([], "must not be asked", "for the CPU.*ROTA_CUDA=1"),
        (ARCHS, "cudaGetDeviceCount failed", "none usable here: cudaGetDeviceCount failed"),
        (ARCHS, GPUS, r"2 found: NVIDIA H200 \(sm_90\), .*; NVIDIA A100 \(sm_80\), "),
    ],
    ids=["cpu-build", "no-gpu", "gpus"],
)
def test_doctor_says_what_the_build_and_the_machine_have(
    archs: list[str],
    devices: list[str] | str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, archs, devices)
    line = gpus_line(capsys)
    assert re.search(said, line) and "must not be asked" not in line
    assert ("CUDA kernels built for sm_90, compute_90" in line) == bool(archs)


def test_doctor_of_this_build_and_machine_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Uses the extension's own answers, in whichever kind of build the tests run with."""
    archs = _C.cuda_archs()
    line = gpus_line(capsys)
    if not archs:
        assert "for the CPU" in line
        with pytest.raises(rota.TransportError, match="for the CPU"):
            _C.cuda_devices()
        return
    assert torch.version.cuda is not None
    assert all(re.fullmatch(r"sm_\d+", arch) for arch in archs[:-1])
    assert archs[-1] == archs[-2].replace("sm", "compute")
    assert ", ".join(archs) in line
    if torch.cuda.is_available():
        assert f"{torch.cuda.device_count()} found" in line
        assert torch.cuda.get_device_name(0) in line
    else:
        assert re.search("none usable here: (no NVIDIA driver|cudaGetDeviceCount failed)", line)


# ---- doctor --gpu


def run_in_interpreter(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs doctor --gpu as a person would, on a simulated GPU."""
    return subprocess.run(
        [sys.executable, "-m", "rota", "doctor", "--gpu"],
        env={
            **os.environ,
            **simulated_gpu.environment(),
            "ROTA_CACHE_DIR": str(folder / "cache"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )


def run_in_fork(folder: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    """The exit status and standard output of doctor, without the seconds of loading torch."""
    os.chdir(folder)
    sys.argv = ["rota", "doctor", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = rota_main.main()
    return status, output.getvalue()


def gpus_in_fork() -> str:
    return doctor_report._CHECKS["GPUs"]()


class SimulatedGpu:
    """Runs doctor on a simulated GPU, where `folder` is the current one."""

    def __init__(self, processes: SimulatedProcesses, folder: Path) -> None:
        self._processes = processes
        self._folder = folder

    def doctor(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """The exit status, standard output and standard error."""
        outcome = self._run(run_in_fork, str(self._folder), arguments, **environment)
        return *outcome.value, outcome.stderr

    def gpus_line(self) -> str:
        line: str = self._run(gpus_in_fork).value
        return line

    def _run(self, function: Callable[..., Any], *args: Any, **environment: str) -> Outcome:
        environment = {"ROTA_CACHE_DIR": str(self._folder / "cache"), **environment}
        [outcome] = self._processes.outcomes([(function, args)], **environment)
        assert outcome.error is None, f"{outcome.error}\n{outcome.stderr}"
        return outcome


needs_kernels = pytest.mark.skipif(
    not _C.cuda_archs(), reason="needs a build of rota with CUDA kernels (ROTA_CUDA=1)"
)


@pytest.fixture
def gpu(processes: SimulatedProcesses, tmp_path: Path) -> SimulatedGpu:
    return SimulatedGpu(processes, tmp_path)


@pytest.fixture(scope="module")
def passed(
    processes: SimulatedProcesses, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run in which all went well, and its folder."""
    folder = tmp_path_factory.mktemp("passed")
    return run_in_interpreter(folder), folder


@needs_kernels
def test_doctor_gpu_tests_and_writes_a_record(
    passed: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = passed
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "simulated GPU, driver CUDA 13.2" in lines[0]
    assert sum(line.startswith("  ok    ") for line in lines) == 13
    [path] = folder.glob("gpu-simulated-gpu-20??-??-??.json")
    assert lines[-1] == f"the self-test passed; record: {path.name}"
    record = json.loads(path.read_text())
    assert record["format"] == 2 and record["gpu"] == "simulated GPU"
    assert record["build_id"] == _C.build_id() and record["archs"] == _C.cuda_archs()
    kernels = {kernel["kernel"]: kernel for kernel in record["self_test"]["kernels"]}
    assert kernels["two_shot"]["num_formats"] == 24 and kernels["pack"]["num_formats"] == 32
    assert "73696d756c61746564" not in path.read_text()  # the UUID


@needs_kernels
def test_doctor_says_how_the_self_test_on_record_ended(
    passed: tuple[subprocess.CompletedProcess[str], Path], gpu: SimulatedGpu, tmp_path: Path
) -> None:
    """Also if it failed; --gpu always runs it again."""
    assert "simulated GPU (sm_90), self-test not yet run" in gpu.gpus_line()
    shutil.copytree(passed[1] / "cache", tmp_path / "cache")
    assert "simulated GPU (sm_90), self-test passed;" in gpu.gpus_line()
    status, output, _ = gpu.doctor("--gpu", SIMULATED_GPU_FLIP_BIT="cuda::ring_kernel")
    assert status == 1
    assert "  FAIL  ring " in output and "ring of float16: element 0" in output
    assert "THE SELF-TEST FAILED" in output
    [path] = tmp_path.glob("gpu-*.json")
    record = json.loads(path.read_text())
    assert not record["self_test"]["passed"]
    assert (
        "self-test FAILED, so CUDA tensors go through the host: ring of float32: e"
        in gpu.gpus_line()
    )


@needs_kernels
def test_doctor_gpu_with_a_kernel_that_hangs_ends_and_names_it(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    """In an interpreter of its own, which the kernel must not keep from ending."""
    done = run_in_interpreter(tmp_path, SIMULATED_GPU_HANG="cuda::ring_kernel")
    assert done.returncode == 1
    assert "FAIL  rota: self-test of simulated GPU (driver CUDA 13.2): ring has not" in done.stdout
    [path] = tmp_path.glob("gpu-*.json")
    assert "ring has not come" in json.loads(path.read_text())["self_test"]["error"]


@needs_kernels
@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {"SIMULATED_GPUS": "0"}, "no GPU can be used: cudaGetDeviceCount failed: "),
        (
            [],
            {"SIMULATED_GPU_DRIVER_VERSION": "11080"},
            f"the NVIDIA driver here is older than CUDA {torch.version.cuda}, which ",
        ),
        (
            [],
            {"SIMULATED_GPU_MEMORY_MIB": "100"},
            "0.1 GB of the GPU's memory is free and 0.3 GB are needed; ",
        ),
        (["--output", "nowhere"], {}, "--output is nowhere, expected a folder that exists"),
    ],
    ids=["no-gpu", "old-driver", "no-memory", "no-folder"],
)
def test_doctor_gpu_that_has_nothing_to_test_says_why_in_one_line(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    gpu: SimulatedGpu,
    tmp_path: Path,
) -> None:
    status, output, errors = gpu.doctor("--gpu", *arguments, **environment)
    assert status == 2
    [line] = errors.splitlines()
    assert line.startswith(f"rota doctor --gpu: {said}")
    assert (output, list(tmp_path.glob("gpu-*"))) == ("", [])


@needs_kernels
def test_doctor_gpu_names_who_holds_the_memory(gpu: SimulatedGpu, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '4711, python, 9000'\necho '4712, a.out, 80'\n")
    tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    status, _, errors = gpu.doctor("--gpu", SIMULATED_GPU_MEMORY_MIB="100", PATH=path)
    assert status == 2
    assert errors.endswith(
        "; it is held by process 4711 (python, 9000 MiB), process 4712 (a.out, 80 MiB)\n"
    )


def test_doctor_gpu_of_a_cpu_build_says_how_to_get_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pretend(monkeypatch, [], "must not be asked")
    assert doctor_gpu.run(tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rota doctor --gpu: this build of rota is for the CPU; ")


def test_doctor_output_without_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rota", "doctor", "--output", "."])
    with pytest.raises(SystemExit, match="2"):
        rota_main.main()
    assert "--output is for --gpu" in capsys.readouterr().err
