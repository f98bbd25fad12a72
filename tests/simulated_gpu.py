"""A simulated GPU, to test rota's whole CUDA path, from torch tensors to kernels, without a GPU.

`environment()` returns the variables that a process needs, such as LD_PRELOAD; from a shell:

    python tests/simulated_gpu.py [--gpus 2] [--torch-operators] python -m pytest tests/test_cuda.py

The preloaded library (tests/simulated_gpu/) replaces the functions of the CUDA runtime that torch's
CUDA build and rota._C call. What is simulated:

  memory     device memory is host memory, filled with 0xff (NaN) and fenced: writes outside an
             allocation fault or are reported when it is freed, and so are accesses by other
             processes to memory that its owner has freed. torch's caching allocator puts many
             tensors into one allocation; PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each its own.
  streams    threads that run concurrently and nap at random, so that work runs late or early unless
             an event orders it. Also events, host functions and the rules of the default stream.
             With CUDA_DEVICE_MAX_CONNECTIONS set they share as many hardware queues, in which what
             waits for its stream or for an event holds up what other streams queue behind it.
  kernels    rota's, from .cu files compiled by g++ (instead/cuda/device_block.h), with all blocks
             but few threads per block. As many blocks are resident as on an H100: those of an
             ordinary launch start one by one as there is room, those of a cooperative launch all at
             once. Of torch's kernels, only fill_() of contiguous tensors; any other launch fails
             and names the kernel.
  operators  torch's, on request: CPU kernels run in their place, on the stream and in graphs
             (torch/operators.cpp), which is enough to train a model. Without them, make data on
             the CPU and copy it.
  loading    a kernel's first use, like cudaFree, waits for the whole device.
  graphs     capture, with CUDA's rules on what is forbidden, and launch; only edges order nodes.
  processes  device memory that several processes map (cudaIpcOpenMemHandle) and, in processes
             with SIMULATED_GPU_SYMMETRIC_MEMORY=1, torch's symmetric memory built on it
             (torch/symmetric_memory.cpp).
  devices    several, with the properties of an H100.
  faults     kernels that compute wrong results or never end, and old drivers, as set in the
             environment (kernel_faults.h, settings.h).

Not simulated: time, caches, weak memory order (the host's is stronger; ThreadSanitizer checks that
in tests/cpp/), residency shared between processes (each has the whole device), clusters, memory
pools, virtual memory management, inter-process events, NCCL, cuBLAS, and any other library that
launches kernels without the CUDA runtime that torch links.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cpp_program import BUILD, CSRC, CXX, CXX_FLAGS, ROOT, compile_object, digest, make_file

SOURCES = ROOT / "tests" / "simulated_gpu"
RUNTIME_LIBRARY = "libsimulated_cudart.so"
# The same names as in kernel_launch.h and devices.cpp.
KERNELS_LIBRARY = "librota_kernels.so"
OPERATORS_LIBRARY = "libtorch_operators.so"
SYMMETRIC_MEMORY_LIBRARY = "libtorch_symmetric_memory.so"

# Faster than the programs of tests/cpp/, because torch runs on it.
FLAGS = (*CXX_FLAGS, "-O1", "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
# Sources of the library with rota's kernels; all others belong to the runtime library.
KERNELS_SOURCES = ("block", "rota_kernels")
# Sources in torch/, each built into its own library.
TORCH_SOURCES = ("operators", "symmetric_memory")


class NotAvailable(Exception):
    """The reason why simulation is impossible here."""


def check_available() -> None:
    """Raises NotAvailable if simulation is impossible here."""
    import torch

    if torch.version.cuda is None:
        raise NotAvailable(f"torch {torch.__version__} is a build for the CPU")
    _cuda_headers()


def environment() -> dict[str, str]:
    """The environment variables with which a process sees a simulated GPU; settings.h has more."""
    return {"LD_PRELOAD": str(build()), "SIMULATED_GPUS": "1"}


@functools.cache
def build() -> Path:
    """Returns the library to preload, after compiling what has changed."""
    import torch

    BUILD.mkdir(parents=True, exist_ok=True)
    include_dirs = [SOURCES / "instead", ROOT / "tests", CSRC]
    headers = ("-isystem", str(_cuda_headers()))
    kernels = [
        path
        for path in sorted((CSRC / "cuda").glob("*.cu"))
        if '"cuda/device_block.h"' in path.read_text()
    ]
    runtime_sources = sorted(set(SOURCES.glob("*.cpp")) - set(map(_source, KERNELS_SOURCES)))

    torch_sources = [SOURCES / "torch" / f"{name}.cpp" for name in TORCH_SOURCES]
    torch_home = Path(torch.__file__).parent
    torch_headers = [
        flag
        for folder in ("include", "include/torch/csrc/api/include")
        for flag in ("-isystem", str(torch_home / folder))
    ]

    def compile_one(source: Path) -> Path:
        if source.suffix == ".cu":
            return compile_object(source, [*FLAGS, "-x", "c++"], include_dirs)
        if source in torch_sources:
            version = f'-DFOR_TORCH="{torch.__version__}"'  # recompiles it for another torch
            return compile_object(source, [*FLAGS, version, *torch_headers, *headers], include_dirs)
        return compile_object(source, [*FLAGS, *headers], include_dirs)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        kernel_objects = pool.map(compile_one, [*kernels, *map(_source, KERNELS_SOURCES)])
        torch_objects = pool.map(compile_one, torch_sources)
        runtime_objects = pool.map(compile_one, runtime_sources)
    exports = SOURCES / "exports.map"
    operators, symmetric_memory = map(str, torch_objects)
    torch_libraries = [f"-L{torch_home / 'lib'}", *("-lc10", "-lc10_cuda", "-ltorch_cpu")]
    return _link(
        {
            KERNELS_LIBRARY: [*map(str, kernel_objects), "-Wl,-Bsymbolic"],
            OPERATORS_LIBRARY: [operators, *torch_libraries],
            SYMMETRIC_MEMORY_LIBRARY: [
                symmetric_memory,
                *torch_libraries,
                # Loaders that look for NVML find this library.
                "-Wl,-soname,libnvidia-ml.so.1",
            ],
            RUNTIME_LIBRARY: [
                *map(str, runtime_objects),
                f"-Wl,--version-script={exports}",
                # Libraries that are linked to the driver find this library.
                "-Wl,-soname,libcuda.so.1",
            ],
        },
        exports.read_text(),
    )


def _source(name: str) -> Path:
    return SOURCES / f"{name}.cpp"


def _link(libraries: dict[str, list[str]], exports: str) -> Path:
    """Links the libraries into one directory; returns the path of the one to preload."""
    inputs = [word for arguments in libraries.values() for word in arguments]
    directory = BUILD / f"simulated_gpu-{digest(exports, *inputs)}"
    directory.mkdir(exist_ok=True)
    for name, arguments in libraries.items():
        library = directory / name
        if not library.exists():
            make_file(library, [*CXX, "-shared", *arguments, "-lpthread", "-ldl"])
        for word in arguments:
            if word.endswith(".o"):
                Path(word).touch()  # still in use, so it must not be removed as stale
    return directory / RUNTIME_LIBRARY


@functools.cache
def _cuda_headers() -> Path:
    """The headers of the CUDA toolkit that setup.py would use."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=home and f"{home}/bin")
    if nvcc is None:
        raise NotAvailable(f"there is no nvcc {f'in {home}/bin' if home else 'on PATH'}")
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    headers = Path(top[1] if top else "", "include")
    if not (headers / "cuda_runtime_api.h").exists():
        raise NotAvailable(f"{nvcc} does not tell where its headers are")
    return headers


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a command that sees simulated GPUs.")
    parser.add_argument("--gpus", default="1")
    parser.add_argument("--torch-operators", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        variables = environment() | {
            "SIMULATED_GPUS": options.gpus,
            "SIMULATED_GPU_TORCH_OPERATORS": str(int(options.torch_operators)),
        }
    except NotAvailable as reason:
        sys.exit(f"simulated_gpu: {reason}")
    if not options.command:
        parser.error("which command?")
    os.execvpe(options.command[0], options.command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
