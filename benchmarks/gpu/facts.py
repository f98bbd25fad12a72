"""What a run on a GPU has to be judged by: GPU, driver, torch, nvcc, commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, in CUDA_HOME, or where toolkits usually are."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    return shutil.which(name, path=os.pathsep.join(folders))


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _query(field: str) -> str | None:
    """What nvidia-smi says of the first GPU."""
    answer = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    return answer.splitlines()[0].strip() if answer else None


def gather(commit: str) -> dict[str, str | None]:
    """By name; None where it could not be found out."""
    nvcc = find_tool("nvcc")
    release = re.search(
        r"release [\d.]+, V([\d.]+)", _output(nvcc, "--version") or "" if nvcc else ""
    )
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {
        "gpu": _query("name"),
        "compute_capability": _query("compute_cap"),
        "memory_mib": _query("memory.total"),
        "driver": _query("driver_version"),
        "torch": torch,
        "nvcc": release[1] if release else None,
        "commit": commit,
    }


def lines(facts: dict[str, str | None]) -> list[str]:
    """One for each of what decides whether a run makes sense."""
    gpu = "none that nvidia-smi can see"
    if facts["gpu"] is not None:
        capability, memory = facts["compute_capability"], facts["memory_mib"]
        gpu = f"{facts['gpu']}, compute capability {capability}, {memory} MiB"
    named = {"GPU": gpu} | {
        key: facts[key] or "none" for key in ("driver", "torch", "nvcc", "commit")
    }
    return [f"{name + ':':8} {value}" for name, value in named.items()]


def arch(facts: dict[str, str | None]) -> str | None:
    """The GPU's architecture as ROTA_CUDA_ARCHS takes it: "90"."""
    capability = facts["compute_capability"]
    return capability.replace(".", "") if capability else None


def slug(facts: dict[str, str | None]) -> str:
    """The GPU's name in letters, digits and hyphens, for file names."""
    words = re.findall(r"[a-z0-9]+", (facts["gpu"] or "no gpu").lower())
    return "-".join(word for word in words if word != "nvidia") or "gpu"
