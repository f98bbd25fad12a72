"""Builds the extension rota._C against the torch that is installed.

Environment:
    ROTA_CUDA  unset or 0: build for the CPU. 1: ask for the CUDA kernels, an error where they
               cannot be built.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

TORCH_VERSIONS = ((2, 11), (2, 15))


def stop(what: str) -> None:
    """Ends the build with one sentence."""
    sys.exit(f"rota: {what}")


def check_toolchain() -> None:
    """Refuses what is known not to work, before a compiler prints pages about it."""
    try:
        import torch
    except ImportError:
        stop("torch is not installed; run `pip install torch` first, then "
             "`pip install --no-build-isolation .`")  # fmt: skip
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = TORCH_VERSIONS
    if not low <= version <= high:
        stop(
            f"torch is {torch.__version__}, expected {low[0]}.{low[1]} to {high[0]}.{high[1]}; "
            f"install one of these"
        )
    if not sys.platform.startswith("linux"):
        stop(f"this is {sys.platform}, expected Linux")
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        stop(
            f"the compiler {compiler} is not found; install g++ 11 or newer (Debian: apt-get "
            f"install g++) or set CXX"
        )
    if os.environ.get("ROTA_CUDA", "0") not in ("0", "1"):
        stop(f"ROTA_CUDA is {os.environ['ROTA_CUDA']!r}, expected 0 or 1")
    if os.environ.get("ROTA_CUDA") == "1":
        stop("ROTA_CUDA=1, but this version has no CUDA kernels yet; unset ROTA_CUDA")


check_toolchain()

from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
# -ffp-contract=off and -fwrapv belong to the numeric contract: the same bits on every machine.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fwrapv",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initialisers leave defaults to the struct
    "-Wno-unused-parameter",  # in torch's headers
]

setup(
    ext_modules=[
        CppExtension(
            "rota._C",
            SOURCES,
            include_dirs=[str(Path("csrc").resolve())],
            extra_compile_args=CXX_FLAGS,
        )
    ],
    package_dir={"": "python"},
    cmdclass={"build_ext": BuildExtension},
)
