"""Builds the extension rota._C against the torch that is installed.

Environment:
    ROTA_CUDA        unset: with the CUDA kernels where torch is a CUDA build and its nvcc is found,
                     otherwise for the CPU alone. 0: for the CPU alone. 1: with the CUDA kernels, an
                     error where they cannot be built.
    ROTA_CUDA_ARCHS  GPU architectures to compile for; "80,90,100" where unset, which is what ships.
                     "shipped:8.9": of those, the one whose code a GPU of compute capability 8.9
                     runs. An architecture's machine code is the same, built alone or with others.
    CUDA_HOME        the CUDA toolkit, where it is not that of the nvcc on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

TORCH_VERSIONS = ((2, 11), (2, 15))
# The oldest setuptools that reads all of pyproject.toml and installs in editable mode.
SETUPTOOLS_VERSION = 64
# Shipped: machine code for each, and PTX of the last, which drivers compile for newer GPUs.
SHIPPED_ARCHS = [80, 90, 100]


def stop(what: str) -> NoReturn:
    """Ends the build with one sentence."""
    sys.exit(f"rota: {what}")


def check_toolchain() -> None:
    """Refuses what is known not to work, before a compiler prints pages about it."""
    try:
        import setuptools  # noqa: F401
    except ImportError:
        stop("setuptools is not installed; run `pip install setuptools` first")
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


def cuda_archs() -> list[int]:
    """What to compile for, ascending, as ROTA_CUDA_ARCHS says."""
    wish = os.environ.get("ROTA_CUDA_ARCHS")
    if wish is None:
        return SHIPPED_ARCHS
    if re.fullmatch(r"\d+(,\d+)*", wish):
        return sorted({int(arch) for arch in wish.split(",")})
    if match := re.fullmatch(r"shipped:(\d+)\.(\d)", wish):
        capability = int(match[1] + match[2])
        if capability < SHIPPED_ARCHS[0]:
            stop(
                f"ROTA_CUDA_ARCHS is {wish!r}, but what ships runs on no GPU older than sm_"
                f"{SHIPPED_ARCHS[0]}; use a newer GPU, or ROTA_CUDA=0 to build for the CPU alone"
            )
        return [shipped_arch(capability)]
    shipped = ",".join(map(str, SHIPPED_ARCHS))
    stop(f"ROTA_CUDA_ARCHS is {wish!r}, expected numbers such as {shipped} or shipped:9.0")


def shipped_arch(capability: int) -> int:
    """The shipped architecture whose code a GPU runs that has this compute capability (89 for 8.9).

    Machine code runs on later GPUs of its major version too (sm_80's on 8.9, sm_100's on 10.3), and
    of each major version we ship the first. GPUs of later major versions (12.0) take the last PTX.
    """
    return max(arch for arch in SHIPPED_ARCHS if arch <= capability)


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
    # Asks nvcc where its toolkit is, because the nvcc on PATH may be a link or a script.
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
ARCHS = cuda_archs()
IS_CUDA_BUILD = is_cuda_build()

# Imported late: setuptools may be missing, and torch looks for the toolkit during the import.
import setuptools  # noqa: E402
from setuptools.command.egg_info import egg_info  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

# -ffp-contract=off and -fwrapv belong to the numeric contract: the same bits on every machine.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # Python's own -g would take a third of the build time
    "-ffp-contract=off",
    "-fwrapv",
    "-fvisibility=hidden",
    # g++ inlines less in a large unit, by default, than it would in each file of it.
    "--param=inline-unit-growth=1000",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",  # designated initialisers leave defaults to the struct
    "-Wno-unused-parameter",  # in torch's headers
]


def gencode_flags() -> list[str]:
    """Each architecture comes from its own virtual one, never from another's PTX.

    So what ships to a GPU is what a build for this GPU alone has, which `make gpu` measures.
    """
    codes = [(arch, f"sm_{arch}") for arch in ARCHS] + [(ARCHS[-1], f"compute_{ARCHS[-1]}")]
    return [f"-gencode=arch=compute_{arch},code={code}" for arch, code in codes]


def nvcc_flags() -> list[str]:
    """As CXX_FLAGS, and the numeric contract for device code: one rounding for each operation."""
    host_flags = [flag for flag in CXX_FLAGS if flag.startswith(("-f", "-W"))]
    return [
        "-std=c++20",
        "-O3",
        "--fmad=false",
        "-ftz=false",
        "-prec-div=true",
        "-prec-sqrt=true",
        *gencode_flags(),
        "-DROTA_CUDA_ARCHS=" + r"\,".join(map(str, ARCHS)),
        f"--threads={len(ARCHS) + 1}",
        f"-Xcompiler={','.join(host_flags)}",
    ]


CSRC = Path("csrc")
# The folders whose .cpp files are compiled as one, by the unit's name, what takes longest first, to
# keep all cores busy. Reading torch's headers takes each run of the compiler 10 seconds, and their
# templates some more; all lines of tensor/ take it 15.
UNITS = {
    "python": (".", "c10d"),
    "tensor": ("tensor", "tensor/hosts"),
    "hosts": ("hosts",),
    "core": ("core",),
    "cpu": ("cpu",),
    "transport": ("base", "schedule", "transport", "cuda"),
}
CUDA_UNITS = {"tensor_cuda": ("tensor/cuda",), **UNITS}
# Files of these folders that are compiled alone: each instruction set has flags of its own, and one
# file of cuda/ differs between builds.
ALONE = ["cpu/element_loops_*.cpp", "cuda/without_cuda.cpp"]


def units() -> dict[Path, list[Path]]:
    """The file of each unit, and the sources that it includes."""
    alone = alone_sources()
    return {
        Path("build/units") / f"{name}.cpp": [
            path
            for folder in folders
            for path in sorted((CSRC / folder).glob("*.cpp"))
            if path not in alone
        ]
        for name, folders in (CUDA_UNITS if IS_CUDA_BUILD else UNITS).items()
    }


def alone_sources() -> list[Path]:
    return [path for pattern in ALONE for path in sorted(CSRC.glob(pattern))]


def sources() -> list[str]:
    """In the order in which they are compiled."""
    kernels = sorted(CSRC.rglob("*.cu")) if IS_CUDA_BUILD else []
    return [str(path) for path in (*kernels, *units(), *alone_sources())]


def write_units() -> None:
    """Leaves a file alone that is as it should be, so that its unit is not compiled anew."""
    for unit, parts in units().items():
        text = "".join(f'#include "{part.relative_to(CSRC)}"\n' for part in parts)
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)


class BuildUnits(BuildExtension):
    """Compiles what write_units() has written."""

    def run(self) -> None:
        write_units()
        print(f"rota: compiling what is new of {len(sources())} files", flush=True)
        super().run()


# The first identifies the build (csrc/base/build_id.h); not every linker adds it by default. The
# second is for compilers that link libstdc++ statically: mixed with that of torch, it crashes or
# hangs in the first stream or lock that is used.
LINK_FLAGS = ["-Wl,--build-id=sha1", "-Wl,--exclude-libs,libstdc++.a"]
INCLUDE_DIRS = [str(CSRC.resolve())]
if IS_CUDA_BUILD:
    extension = CUDAExtension(
        "rota._C",
        sources(),
        include_dirs=INCLUDE_DIRS,
        define_macros=[("ROTA_WITH_CUDA", None)],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": nvcc_flags()},
        extra_link_args=LINK_FLAGS,
    )
else:
    extension = CppExtension(
        "rota._C",
        sources(),
        include_dirs=INCLUDE_DIRS,
        extra_compile_args=CXX_FLAGS,
        extra_link_args=LINK_FLAGS,
    )


class EggInfo(egg_info):
    """Every way to install rota comes here for its name and version; a build in place does not."""

    def initialize_options(self) -> None:
        if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS_VERSION:
            # It would ignore pyproject.toml, or fail on it with pages of output.
            stop(
                f"setuptools is {setuptools.__version__}, expected {SETUPTOOLS_VERSION} or newer; "
                f"run `pip install --upgrade setuptools`"
            )
        super().initialize_options()


setuptools.setup(
    # Not in pyproject.toml, where no form suits all versions: setuptools refuses the string before
    # version 77, and will refuse the table from 2027 on.
    license="BSD-3-Clause",
    ext_modules=[extension],
    package_dir={"": "python"},
    cmdclass={"build_ext": BuildUnits, "egg_info": EggInfo},
    # CPU and CUDA builds must not use each other's object files.
    options={"build": {"build_base": "build/cuda" if IS_CUDA_BUILD else "build"}},
)
