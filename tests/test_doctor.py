"""What `python -m rota doctor` says about GPUs, for each kind of build and machine."""

from __future__ import annotations

import re

import pytest
import torch

import rota
from rota import _C, doctor


def gpus_line(capsys: pytest.CaptureFixture[str]) -> str:
    assert doctor.run() == 0
    return next(line for line in capsys.readouterr().out.splitlines() if "GPUs: " in line)


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes each time would take seconds; other tests are all about them."""
    monkeypatch.setitem(doctor._CHECKS, "trial", lambda: "left out")


def pretend(monkeypatch: pytest.MonkeyPatch, archs: list[str], devices: list[str] | str) -> None:
    """A build for these architectures and a machine with these GPUs, or with this error."""

    def cuda_devices() -> list[str]:
        if isinstance(devices, str):
            raise rota.TransportError(devices)
        return devices

    monkeypatch.setattr(_C, "cuda_archs", lambda: archs)
    monkeypatch.setattr(_C, "cuda_devices", cuda_devices)


def test_doctor_cpu_build_says_how_to_get_a_cuda_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, [], "must not be asked")
    line = gpus_line(capsys)
    assert "for the CPU" in line and "ROTA_CUDA=1" in line
    assert "must not be asked" not in line


def test_doctor_cuda_build_without_gpu_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, ["sm_90", "compute_90"], "cudaGetDeviceCount failed: no driver")
    line = gpus_line(capsys)
    assert "none usable here: cudaGetDeviceCount failed: no driver" in line
    assert "CUDA kernels built for sm_90, compute_90" in line


def test_doctor_cuda_build_with_gpus_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, ["sm_90", "compute_90"], ["NVIDIA H200 (sm_90)", "NVIDIA A100 (sm_80)"])
    line = gpus_line(capsys)
    assert "2 found: NVIDIA H200 (sm_90), NVIDIA A100 (sm_80)" in line
    assert "CUDA kernels built for sm_90, compute_90" in line


def test_doctor_of_this_build_and_machine_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """The extension's own answers, in whichever kind of build the tests run with."""
    archs = _C.cuda_archs()
    line = gpus_line(capsys)
    if not archs:
        assert "for the CPU" in line
        with pytest.raises(rota.TransportError, match="for the CPU"):
            _C.cuda_devices()
        return
    assert torch.version.cuda is not None
    assert all(re.fullmatch(r"sm_\d+", arch) for arch in archs[:-1])
    assert archs[-1] == archs[0].replace("sm", "compute")
    assert ", ".join(archs) in line
    if torch.cuda.is_available():
        assert f"{torch.cuda.device_count()} found" in line
        assert torch.cuda.get_device_name(0) in line
    else:
        assert re.search("none usable here: (no NVIDIA driver|cudaGetDeviceCount failed)", line)
