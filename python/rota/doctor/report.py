"""`python -m rota doctor`: checks whether rota works here and, if not, says what to do."""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing

import rota
from rota import _C

_TRIAL_TIMEOUT = timedelta(seconds=20)


def _versions() -> str:
    return (
        f"rota {rota.__version__} in {os.path.dirname(rota.__file__)}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, Linux {platform.release()} {platform.machine()}"
    )


def _element_loops() -> str:
    forced = os.environ.get("ROTA_ISA")
    return f"{_C.isa()}" + (f" (asked for by ROTA_ISA={forced})" if forced else "")


def _cores() -> str:
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"{num_cores} usable; with more ranks than that, waiting ranks yield their core and "
        f"latencies grow"
    )


def _host() -> str:
    forced = " (from ROTA_HOST_ID)" if "ROTA_HOST_ID" in os.environ else ""
    return f"{_C.host_id()}{forced}; ranks that print the same can share memory"


def _numa_node() -> str:
    node = _C.numa_node()
    forced = " (from ROTA_NUMA_NODE)" if "ROTA_NUMA_NODE" in os.environ else ""
    if node is None:
        return "this process is not bound to one of several; nodes are then no level of sums"
    return f"{node}{forced}; ranks in equal numbers on each node can sum within nodes first"


def _gpus() -> str:
    archs = _C.cuda_archs()
    if not archs:
        return (
            "not used by this build, which is for the CPU; one with CUDA kernels needs a CUDA "
            "build of torch, nvcc, and `ROTA_CUDA=1 pip install --no-build-isolation .`"
        )
    built = f"CUDA kernels built for {', '.join(archs)}"
    try:
        devices = _C.cuda_devices()
    except rota.TransportError as error:
        return f"none usable here: {error}; {built}"
    tested = [f"{name}, {_self_test(device)}" for device, name in enumerate(devices)]
    return f"{len(devices)} found: {'; '.join(tested)}; {built}"


def _self_test(device: int) -> str:
    try:
        findings = _C.recorded_gpu_self_test(device)
    except rota.TransportError as error:
        return f"whose driver cannot be asked: {error}"
    if findings is None:
        return "self-test not yet run (its first use runs it, or `python -m rota doctor --gpu`)"
    if not findings:
        return "self-test passed"
    return f"self-test FAILED, so CUDA tensors go through the host: {'; '.join(findings)}"


def _trial_rank(rank: int, store_path: str) -> None:
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("rota", store=store, rank=rank, world_size=2, timeout=_TRIAL_TIMEOUT)
    tensor = torch.full((100_000,), float(rank + 1), dtype=torch.float32, device="cpu")
    dist.all_reduce(tensor)
    if not bool((tensor == 3.0).all()):
        raise RuntimeError(f"all_reduce of 1 and 2 gave {tensor.unique().tolist()}, expected 3")
    dist.destroy_process_group()


def _trial() -> str:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_trial_rank, args=(os.path.join(folder, "store"),), nprocs=2)
    return "two processes connected through shared memory and summed 100,000 floats correctly"


_CHECKS: dict[str, Callable[[], str]] = {
    "versions": _versions,
    "element loops": _element_loops,
    "cores": _cores,
    "host": _host,
    "NUMA node": _numa_node,
    "GPUs": _gpus,
    "trial": _trial,
}


def run() -> int:
    """Prints a line for each check; returns the exit status."""
    print(f"rota doctor on {socket.gethostname()}")
    num_failed = 0
    for what, check in _CHECKS.items():
        try:
            print(f"  ok    {what}: {check()}")
        except Exception as error:  # the user wants to read every kind of error
            num_failed += 1
            print(f"  FAIL  {what}: {error}")
        sys.stdout.flush()
    print("rota works here" if num_failed == 0 else f"{num_failed} of {len(_CHECKS)} checks failed")
    return 1 if num_failed else 0
