"""`python -m rota doctor --gpu`: checks that this GPU computes correctly.

It compares every kernel's results with the CPU's bits, prints a table, and writes a record that is
safe to send in: it identifies neither the individual GPU nor its owner.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import rota
from rota import _C
from rota.gpu import CPU_BUILD

_FORMAT_VERSION = 2
_FACTS_OF_KERNEL = ("kernel", "num_formats", "milliseconds", "findings")
_NEEDED_BYTES = 256 << 20  # the kernels and the self-test's tensors, with room for allocators
# nvidia-smi's query fields, and their names in the record.
_GPU_STATE = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "clocks_throttle_reasons.active": "throttle_reasons",
}


class CannotTest(Exception):
    """Why nothing can be tested, and what to do about it: one sentence."""


def run(output: Path) -> int:
    """Tests the current GPU; writes a record to the folder `output`.

    Returns:
        The exit status: 0 if the self-test passed, 1 if not, 2 if nothing could be tested.
    """
    try:
        device = _find_gpu()
        _check_memory(device)
        if not output.is_dir():
            raise CannotTest(f"--output is {output}, expected a folder that exists")
        if not os.access(output, os.W_OK):
            raise CannotTest(f"--output is {output}, where this user may not write")
    except CannotTest as problem:
        print(f"rota doctor --gpu: {problem}", file=sys.stderr)
        return 2
    record = _facts(device)
    print(f"rota doctor --gpu on {record['gpu']}, driver {record['driver']}")
    self_test = _self_test(device)
    passed: bool = self_test["passed"]
    record["self_test"] = self_test
    record["gpu_state"] = _gpu_state(device)
    slug = re.sub(r"[^a-z0-9]+", "-", record["gpu"].lower()).strip("-")
    path = output / f"gpu-{slug}-{record['date']}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{'the self-test passed' if passed else 'THE SELF-TEST FAILED'}; record: {path}")
    if "error" in self_test:
        # A kernel may still be running, and CUDA would wait for it at exit.
        sys.stdout.flush()
        os._exit(1)
    return 0 if passed else 1


def _find_gpu() -> torch.device:
    if not _C.cuda_archs():
        raise CannotTest(CPU_BUILD)
    try:
        _C.cuda_devices()
    except rota.TransportError as error:
        if "cudaErrorInsufficientDriver" not in str(error):
            raise CannotTest(f"no GPU can be used: {error}") from error
        raise CannotTest(
            f"the NVIDIA driver here is older than CUDA {torch.version.cuda}, which torch and rota "
            f"were built for (cudaErrorInsufficientDriver); update the driver, or install a build "
            f"of torch for an older CUDA and build rota anew"
        ) from error
    return torch.device("cuda", torch.cuda.current_device())


def _check_memory(device: torch.device) -> None:
    needed = f"{_NEEDED_BYTES / 1e9:.1f} GB"
    try:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        free = f"{free_bytes / 1e9:.1f} GB"
    except RuntimeError as error:  # not even enough memory for CUDA itself
        if "out of memory" not in str(error):
            raise
        free_bytes, free = 0, "nothing"
    if free_bytes >= _NEEDED_BYTES:
        return
    holders = _memory_holders()
    raise CannotTest(
        f"{free} of the GPU's memory is free and {needed} are needed; "
        + (f"it is held by {holders}" if holders else "end the processes that hold it")
    )


def _facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "format": _FORMAT_VERSION,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": _C.gpu_driver(device.index),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rota": rota.__version__,
        "build_id": _C.build_id(),
        "archs": _C.cuda_archs(),
    }


def _self_test(device: torch.device) -> dict[str, Any]:
    """Runs the self-test and prints a line for each kernel."""
    started = time.monotonic()
    try:
        reports = _C.gpu_self_test(device.index)
    except rota.TransportError as error:
        print(f"  FAIL  {error}")
        return {"passed": False, "error": str(error)}
    for report in reports:
        verdict = "FAIL" if report.findings else "ok  "
        print(
            f"  {verdict}  {report.kernel:<18}{report.num_formats:>3} formats"
            f"{report.milliseconds:>9.1f} ms"
        )
        for finding in report.findings:
            print(f"          {finding}")
    return {
        "passed": not any(report.findings for report in reports),
        "milliseconds": (time.monotonic() - started) * 1e3,
        "kernels": [
            {fact: getattr(report, fact) for fact in _FACTS_OF_KERNEL} for report in reports
        ],
    }


def _nvidia_smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):  # it is not installed, or does not answer
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _memory_holders() -> str | None:
    """Lists the processes on all GPUs, as "process 123 (python, 9000 MiB), ..."."""
    answer = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory")
    if not answer:
        return None
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    return ", ".join(f"process {row[0]} ({row[1]}, {row[-1]} MiB)" for row in rows if len(row) >= 3)


def _gpu_state(device: torch.device) -> dict[str, str] | None:
    """Clocks, power and temperature; None without nvidia-smi. Call it right after kernels ran."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    answer = _nvidia_smi(f"--query-gpu={','.join(_GPU_STATE)}", f"--id=GPU-{uuid}")
    if answer is None:
        return None
    values = [word.strip() for word in answer.splitlines()[0].split(",")]
    return dict(zip(_GPU_STATE.values(), values, strict=False))
