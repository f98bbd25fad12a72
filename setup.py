"""Builds the extension rota._C against the torch that is installed.

Environment:
    ROTA_CUDA        unset: with the CUDA kernels where torch is a CUDA build and its nvcc is found,
                     otherwise for the CPU alone. 0: for the CPU alone. 1: with the CUDA kernels, an
                     error where they cannot be built.
    ROTA_CUDA_ARCHS  GPU architectures to compile for, ascending; "80,90,100" where unset. All of
                     them take the PTX of the first, since no kernel uses what a later one adds:
                     the compiler's larger half runs once. It also serves all newer GPUs.
    CUDA_HOME        the CUDA toolkit, where it is not that of the nvcc on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

TORCH_VERSIONS = ((2, 11), (2, 15))
CUDA_ARCHS = "80,90,100"


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
    if not re.fullmatch(r"\d+(,\d+)*", cuda_archs()):
        stop(f"ROTA_CUDA_ARCHS is {cuda_archs()!r}, expected numbers such as {CUDA_ARCHS}")


def cuda_archs() -> str:
    return os.environ.get("ROTA_CUDA_ARCHS", CUDA_ARCHS)


class NoCudaBuild(Exception):
    """Why the CUDA kernels cannot be built, and what to do about it."""


def find_cuda_home() -> str:
    """The folder of a CUDA toolkit that fits torch; raises NoCudaBuild."""
    import torch

    if torch.version.cuda is None:
        raise NoCudaBuild(
            f"torch {torch.__version__} is a build for the CPU; install one for CUDA (on Linux a "
            f"plain `pip install torch`)"
        )
    wanted = torch.version.cuda.split(".")[0]
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=given and f"{given}/bin")
    if nvcc is None:
        where = f"in {given}/bin" if given else "on PATH"
        raise NoCudaBuild(
            f"there is no nvcc {where}; install the CUDA toolkit {wanted} or set CUDA_HOME to it"
        )
    # nvcc itself has to be asked where its toolkit is: the one on PATH may be a link or a script.
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    major = re.search(r"__CUDACC_VER_MAJOR__=(\d+)", dry_run)
    if top is None or major is None:
        raise NoCudaBuild(f"{nvcc} --dryrun does not tell its toolkit; set CUDA_HOME to one")
    if major[1] != wanted:
        raise NoCudaBuild(
            f"{nvcc} is of CUDA {major[1]} and torch {torch.__version__} of CUDA {wanted}; install "
            f"the CUDA toolkit {wanted} or set CUDA_HOME to it"
        )
    return os.path.realpath(top[1])


def is_cuda_build() -> bool:
    """Decides as ROTA_CUDA says, and lets torch know where the toolkit is."""
    wish = os.environ.get("ROTA_CUDA")
    if wish == "0":
        return False
    try:
        os.environ["CUDA_HOME"] = find_cuda_home()
    except NoCudaBuild as reason:
        if wish == "1":
            stop(f"ROTA_CUDA=1, but {reason}")
        print(f"rota: building for the CPU alone, since {reason}")
        return False
    return True


check_toolchain()
IS_CUDA_BUILD = is_cuda_build()

# Only now: torch looks for the toolkit while this is imported.
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

# -ffp-contract=off and -fwrapv belong to the numeric contract: the same bits on every machine.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # Python's own -g would take a third of the build's time
    "-ffp-contract=off",
    "-fwrapv",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initialisers leave defaults to the struct
    "-Wno-unused-parameter",  # in torch's headers
]


def nvcc_flags() -> list[str]:
    """As CXX_FLAGS, and the numeric contract for device code: one rounding for each operation."""
    archs = cuda_archs().split(",")
    ptx = f"compute_{archs[0]}"
    host_flags = [flag for flag in CXX_FLAGS if flag.startswith(("-f", "-W"))]
    return [
        "-std=c++20",
        "-O3",
        "--fmad=false",
        "-ftz=false",
        "-prec-div=true",
        "-prec-sqrt=true",
        *(f"-gencode=arch={ptx},code={code}" for code in (*(f"sm_{arch}" for arch in archs), ptx)),
        "-DROTA_CUDA_ARCHS=" + r"\,".join(archs),
        f"--threads={len(archs) + 1}",
        f"-Xcompiler={','.join(host_flags)}",
    ]


def sources(*suffixes: str, without: str | None = None) -> list[str]:
    return sorted(
        str(path)
        for suffix in suffixes
        for path in Path("csrc").rglob(f"*{suffix}")
        if without is None or not path.is_relative_to(without)
    )


INCLUDE_DIRS = [str(Path("csrc").resolve())]
if IS_CUDA_BUILD:
    extension = CUDAExtension(
        "rota._C",
        sources(".cpp", ".cu"),
        include_dirs=INCLUDE_DIRS,
        define_macros=[("ROTA_WITH_CUDA", None)],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": nvcc_flags()},
    )
else:
    extension = CppExtension(
        "rota._C",
        sources(".cpp", without="csrc/c10d/cuda"),
        include_dirs=INCLUDE_DIRS,
        extra_compile_args=CXX_FLAGS,
    )

setup(
    ext_modules=[extension],
    package_dir={"": "python"},
    cmdclass={"build_ext": BuildExtension},
    # Builds of the two kinds do not take each other's objects.
    options={"build": {"build_base": "build/cuda" if IS_CUDA_BUILD else "build"}},
)
