"""Facts about the GPU, driver, torch and nvcc, and whether a run is possible with them."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 90.0  # to import torch and start CUDA
GIB = 1 << 30

Facts = dict[str, Any]


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, in CUDA_HOME, or where toolkits usually are."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    return shutil.which(name, path=os.pathsep.join(folders))


def gather() -> Facts:
    """Gathers the facts. A separate process queries torch, so that the GPU is released again."""
    try:
        command = [sys.executable, "-m", "gpu.facts"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        facts: Facts = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        facts = {"why": f"torch did not start CUDA within {LIMIT_S:.0f} s"}
    except (ValueError, IndexError):
        facts = {"why": (asked.stderr.strip().splitlines() or ["no output"])[-1]}
    nvcc = find_tool("nvcc")
    if nvcc is not None:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release [\d.]+, V([\d.]+)", text)
        facts["nvcc"] = release[1] if release else None
    return facts


def refusal(facts: Facts, needed_bytes: int) -> str | None:
    """Why a run is impossible and what to do, in one sentence; None if it is possible."""
    torch, built_for = facts.get("torch"), facts.get("torch_cuda")
    if torch is not None and built_for is None:
        return f"torch {torch} is a build for the CPU; use a python3 with a CUDA build of torch"
    driver = facts.get("driver_cuda")
    if built_for and driver and int(driver.split(".")[0]) < int(built_for.split(".")[0]):
        return (
            f"the driver supports CUDA up to {driver} and torch {torch} is built for CUDA "
            f"{built_for}; install a newer driver, or a torch built for the driver's CUDA"
        )
    if facts.get("gpu") is None:
        return f"torch finds no usable GPU ({facts.get('why')}); check nvidia-smi, or make gpu-dry"
    if facts["free_bytes"] < needed_bytes:
        free, total = facts["free_bytes"] / GIB, facts["total_bytes"] / GIB
        return (
            f"{facts['gpu']} has {free:.1f} of {total:.1f} GiB free and the run needs "
            f"{needed_bytes / GIB:.1f}; end the process that holds the rest, which nvidia-smi names"
        )
    return None


def arch(facts: Facts) -> str:
    """ROTA_CUDA_ARCHS for this GPU, chosen so that the measured code is what is shipped."""
    return f"shipped:{facts['capability']}"


def slug(facts: Facts) -> str:
    """The GPU's name in letters, digits and hyphens, for file names."""
    words = re.findall(r"[a-z0-9]+", str(facts.get("gpu")).lower())
    return "-".join(word for word in words if word != "nvidia")


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver supports."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _probe() -> Facts:
    import torch

    facts: Facts = {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    facts["driver_cuda"] = _driver_cuda()
    try:
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["num_gpus"] = torch.cuda.device_count()
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["l2_bytes"] = properties.L2_cache_size
        facts["total_bytes"] = properties.total_memory
        facts["free_bytes"] = 0  # possibly too little memory to start CUDA
        facts["free_bytes"] = torch.cuda.mem_get_info(0)[0]
    except Exception as error:
        facts["why"] = str(error).splitlines()[0]
    return facts


if __name__ == "__main__":
    print(json.dumps(_probe()))
