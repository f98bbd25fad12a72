"""A GPU for machines that have none: rota's whole CUDA path, from torch tensors to its kernels.

`environment()` gives what a process needs to see it, LD_PRELOAD among it; from a shell:

    python tests/simulated_gpu.py [--gpus 2] [--torch-operators] python -m pytest tests/test_cuda.py

The library that it loads (tests/simulated_gpu/) stands in for those functions of the CUDA runtime
that torch's CUDA build and rota._C call. What is simulated:

  memory     device memory is host memory, filled with 0xff (NaN) and fenced: writes outside an
             allocation fault or are reported when it is freed, and so is what other processes do
             with memory that its owner has freed. torch's caching allocator puts many tensors into
             one; PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives each its own.
  streams    threads, which run beside each other and nap at random, so that work is late, or early,
             where no event orders it. Events, host functions, the default stream's own rules.
  kernels    rota's: their .cu files compiled by g++ (instead/cuda/device_block.h), with few threads
             in a block but all blocks, for which a device has room as an H100 has for rota's: an
             ordinary launch's start one by one where there is room, a cooperative launch's all at
             once. Of torch's own, only fill_() of contiguous tensors; any
             other launch fails and names the kernel.
  operators  torch's, if asked for: the CPU's kernels run instead, on the stream and in graphs
             (torch/operators.cpp), which is enough to train a model. Otherwise, make data on the
             CPU, and copy it.
  loading    a kernel's first use, like cudaFree, waits for the whole device.
  graphs     captures with CUDA's rules on what they forbid, and launches in which nodes are ordered
             by nothing but their edges.
  processes  device memory that several processes map (cudaIpcOpenMemHandle), and, in processes
             with SIMULATED_GPU_SYMMETRIC_MEMORY=1, torch's symmetric memory by the same means
             (torch/symmetric_memory.cpp).
  devices    several; H100s by their properties.
  faults     kernels that compute something else, or never end, and old drivers, as the environment
             asks for them (kernel_faults.h, settings.h).

What is not: time, caches, weak memory order (the host's own is stronger; tests/cpp/ has
ThreadSanitizer look at that), processes that share a device's room (each has all of it), clusters,
memory pools, virtual memory management, events of several processes, NCCL, cuBLAS and whatever
else brings kernels without the CUDA runtime that torch links.
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
# As kernel_launch.h and devices.cpp have them.
KERNELS_LIBRARY = "librota_kernels.so"
OPERATORS_LIBRARY = "libtorch_operators.so"
SYMMETRIC_MEMORY_LIBRARY = "libtorch_symmetric_memory.so"

FLAGS = (*CXX_FLAGS, "-fPIC", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
# Of the library that has rota's kernels; all others make up the runtime.
KERNELS_SOURCES = ("block", "kernel_faults", "rota_kernels")
# Of torch/: a library each.
TORCH_SOURCES = ("operators", "symmetric_memory")


class NotAvailable(Exception):
    """Why nothing can be simulated here."""


def check_available() -> None:
    """Raises NotAvailable."""
    import torch

    if torch.version.cuda is None:
        raise NotAvailable(f"torch {torch.__version__} is a build for the CPU")
    _cuda_headers()


def environment(
    num_gpus: int = 1,
    *,
    seed: int = 0,
    max_nap_us: int | None = None,
    has_torch_operators: bool = False,
) -> dict[str, str]:
    """What a process is to find in its environment to see simulated GPUs.

    Args:
        seed: Of the naps that streams and blocks take, and of the order in which threads run.
        max_nap_us: How long they may be; 0 for none, None for the default.
        has_torch_operators: Whether torch's own operators work, too.
    """
    variables = {
        "LD_PRELOAD": str(build()),
        "SIMULATED_GPUS": str(num_gpus),
        "SIMULATED_GPU_SEED": str(seed),
        "SIMULATED_GPU_TORCH_OPERATORS": str(int(has_torch_operators)),
    }
    if max_nap_us is not None:
        variables["SIMULATED_GPU_NAP_US"] = str(max_nap_us)
    return variables


@functools.cache
def build() -> Path:
    """The library to load first; compiles what has changed since it was last made."""
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
            version = f'-DFOR_TORCH="{torch.__version__}"'  # so that another one compiles it anew
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
                # So that whoever looks for NVML finds it here.
                "-Wl,-soname,libnvidia-ml.so.1",
            ],
            RUNTIME_LIBRARY: [
                *map(str, runtime_objects),
                f"-Wl,--version-script={exports}",
                # So that whoever is linked to the driver finds it here.
                "-Wl,-soname,libcuda.so.1",
            ],
        },
        exports.read_text(),
    )


def _source(name: str) -> Path:
    return SOURCES / f"{name}.cpp"


def _link(libraries: dict[str, list[str]], exports: str) -> Path:
    """Makes the libraries, side by side; returns the path of the one to load first."""
    inputs = [word for arguments in libraries.values() for word in arguments]
    directory = BUILD / f"simulated_gpu-{digest(exports, *inputs)}"
    directory.mkdir(exist_ok=True)
    for name, arguments in libraries.items():
        library = directory / name
        if not library.exists():
            make_file(library, [*CXX, "-shared", *arguments, "-lpthread", "-ldl"])
        for word in arguments:
            if word.endswith(".o"):
                Path(word).touch()  # still in use: not to be removed as stale
    return directory / RUNTIME_LIBRARY


@functools.cache
def _cuda_headers() -> Path:
    """Of the toolkit whose nvcc is found as setup.py finds it."""
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
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-nap-us", type=int)
    parser.add_argument("--torch-operators", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        variables = environment(
            options.gpus,
            seed=options.seed,
            max_nap_us=options.max_nap_us,
            has_torch_operators=options.torch_operators,
        )
    except NotAvailable as reason:
        sys.exit(f"simulated_gpu: {reason}")
    if not options.command:
        parser.error("which command?")
    os.execvpe(options.command[0], options.command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
