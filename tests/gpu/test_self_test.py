"""The self-test on the GPU of this machine; tests/test_gpu_self_test.py tests failures."""

from __future__ import annotations

import os
import time
from pathlib import Path

from on_gpu import DEVICE
from rota import _C
from rota.doctor import gpu as doctor_gpu

LIMIT_S = 0.3


def test_self_test_passes_and_is_short() -> None:
    _C.gpu_self_test(DEVICE.index)  # starts CUDA and has all kernels loaded
    started = time.monotonic()
    reports = _C.gpu_self_test(DEVICE.index)
    seconds = time.monotonic() - started
    assert [finding for report in reports for finding in report.findings] == []
    assert sum(report.num_formats for report in reports) == 220
    assert _C.recorded_gpu_self_test(DEVICE.index) == []
    if "SIMULATED_GPUS" not in os.environ:
        assert seconds < LIMIT_S


def test_doctor_of_this_gpu_passes(tmp_path: Path) -> None:
    assert doctor_gpu.run(tmp_path) == 0
    assert len(list(tmp_path.glob("gpu-*.json"))) == 1
