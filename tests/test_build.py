"""A build that cannot work fails with one sentence before any compiler output.

setup.py runs with a fake torch and a fake nvcc of a few lines each.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

pytestmark = pytest.mark.no_extension

ROOT = Path(__file__).resolve().parents[1]

# Prints which kind of extension setup.py requests, and its arguments.
CPP_EXTENSION = """
import os
from setuptools import Extension
from setuptools.command.build_ext import build_ext

class BuildExtension(build_ext):
    def run(self):
        print("builds in place" if self.inplace else "builds")

def CppExtension(name, sources, **options):
    print("for the CPU:", *sources, options)
    return Extension(name, sources)

def CUDAExtension(name, sources, **options):
    print("with CUDA kernels:", os.environ["CUDA_HOME"], *sources, options)
    return Extension(name, sources)
"""

CPU_TORCH = "2.13.0+cpu"
CUDA_TORCH = "2.13.0+cu130"


def make_torch(folder: Path, version: str) -> None:
    cuda = "13.0" if "+cu" in version else None
    (folder / "torch" / "utils").mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
    )
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(CPP_EXTENSION)


def make_nvcc(folder: Path, toolkit: Path, answer: int | str) -> None:
    """A fake nvcc of a toolkit, of a major version or with another answer on standard error."""
    if isinstance(answer, int):  # the lines of `nvcc --dryrun` that setup.py reads, and others
        answer = (
            f"#$ _HERE_={toolkit}/bin\n#$ TOP={toolkit}/bin/..\n"
            f"#$ gcc -D__CUDACC__ -D__CUDACC_VER_MAJOR__={answer} -D__CUDACC_VER_MINOR__=0 x.cu"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvcc").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{answer}\nEND\n")
    (folder / "nvcc").chmod(0o755)


def run_setup(
    tmp_path: Path,
    torch: str | None = None,
    nvcc: int | str | None = None,
    command: str = "--name",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs setup.py far enough to see what it would build, with these fakes."""
    if torch is not None:
        make_torch(tmp_path, torch)
    if nvcc is not None:
        make_nvcc(tmp_path / "bin", tmp_path / "toolkit", nvcc)
    ours = ("CXX", "CUDA_HOME", "CUDA_PATH", "ROTA_CUDA", "ROTA_CUDA_ARCHS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    # Hides the compiler and nvcc of this machine.
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, target in (("g++", "/bin/true"), ("cat", "/bin/cat")):
        if not (tmp_path / "bin" / name).exists():
            (tmp_path / "bin" / name).symlink_to(target)
    env |= {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)} | environment
    return subprocess.run(
        [sys.executable, "setup.py", *command.split()],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def asked_for(result: subprocess.CompletedProcess[str]) -> str:
    """The extension that a successful build requests from torch."""
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(("for", "with")))
    return line


def compiled_files(line: str) -> list[str]:
    """In the order in which the compiler gets them."""
    return re.findall(r"(?:csrc|build/units)/\S+\.\w+", line)


def compile_args(tmp_path: Path, **environment: str) -> Any:
    """The flags of a build beside a toolkit of CUDA 13."""
    line = asked_for(run_setup(tmp_path, CUDA_TORCH, 13, **environment))
    return ast.literal_eval(line[line.index("{") :])["extra_compile_args"]


def nvcc_flags(tmp_path: Path, archs: str | None = None) -> list[str]:
    """nvcc's flags in a build with these ROTA_CUDA_ARCHS."""
    environment = {} if archs is None else {"ROTA_CUDA_ARCHS": archs}
    flags: list[str] = compile_args(tmp_path, **environment)["nvcc"]
    return flags


def targets(flags: list[str]) -> list[str]:
    return [flag.removeprefix("-gencode=") for flag in flags if flag.startswith("-gencode=")]


# ---- what is refused

CUDA = {"ROTA_CUDA": "1"}
BAD_VERSIONS = ("2.9.0", "2.10.1+cu128", "2.16.0", "3.0.0a0+git12ab34")
BAD_ARCHS = ("", "sm_90", "80;90", "80,", "shipped:90", "native")
INSTALL = "install the CUDA toolkit 13 .*CUDA_HOME"
OF_OTHERS = rf"bin/nvcc is of CUDA 12 and torch {re.escape(CUDA_TORCH)} of CUDA 13; {INSTALL}"


def of_archs(archs: str) -> dict[str, str]:
    return CUDA | {"ROTA_CUDA_ARCHS": archs}


# torch, nvcc, the environment, and what is said.
REFUSED: list[tuple[str, int | str | None, dict[str, str], str]] = [
    *((v, None, {}, f"{re.escape(v)}, expected 2.11 to 2.15; install") for v in BAD_VERSIONS),
    (CPU_TORCH, None, {"CXX": "no-such-compiler"}, "no-such-compiler .*install g.*CXX"),
    (CPU_TORCH, None, {"CXX": "/no/such/g++ -O2"}, r"/no/such/g\+\+ .*install g.*CXX"),
    (CPU_TORCH, None, {"ROTA_CUDA": "2"}, "ROTA_CUDA is '2', expected 0 or 1"),
    *((CUDA_TORCH, None, of_archs(a), f"{a!r}, .*80,90,100 or shipped:9.0") for a in BAD_ARCHS),
    (CUDA_TORCH, None, of_archs("shipped:7.5"), "'shipped:7.5'.*older than sm_80.*newer GPU"),
    (CPU_TORCH, None, CUDA, f"ROTA_CUDA=1.*{re.escape(CPU_TORCH)}.*pip install torch"),
    (CUDA_TORCH, None, CUDA, f"no nvcc on PATH; {INSTALL}"),
    (CUDA_TORCH, None, CUDA | {"CUDA_HOME": "/no/cuda"}, f"no nvcc in /no/cuda/bin; {INSTALL}"),
    (CUDA_TORCH, 12, CUDA, OF_OTHERS),
    (CUDA_TORCH, "nvcc: no such toolkit", CUDA, "bin/nvcc .*CUDA_HOME"),
]


@pytest.mark.parametrize(("torch", "nvcc", "environment", "said"), REFUSED)
def test_build_that_cannot_work_says_why_in_one_line(
    torch: str, nvcc: int | str | None, environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    check_refused(run_setup(tmp_path, torch, nvcc, **environment), said)


@pytest.mark.parametrize("package", ["torch", "setuptools"])
def test_build_without_a_package_says_how_to_get_it(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError('No module')")
    said = f"{package} is not installed; run `pip install {package}` first"
    said += ".*--no-build-isolation" if package == "torch" else ""
    check_refused(run_setup(tmp_path), said)


def check_refused(result: subprocess.CompletedProcess[str], said: str) -> None:
    assert result.returncode != 0 and result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("rota: ") and re.search(said, sentence), sentence


# ---- setuptools

# GPU machines often have their distribution's setuptools: 59.6 on Ubuntu 22.04, 68.1 on 24.04.


def run_with_setuptools(
    version: str, command: str, tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(
        f"import setuptools\nsetuptools.__version__ = {version!r}\n"
    )
    return run_setup(tmp_path, CPU_TORCH, command=command)


@pytest.mark.parametrize("version", ["59.6.0", "68.1.2"])
def test_build_in_place_takes_any_setuptools(version: str, tmp_path: Path) -> None:
    result = run_with_setuptools(version, "build_ext --inplace", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "builds in place" in result.stdout


# pip runs the first for a wheel's metadata; old versions of pip run the second.
@pytest.mark.parametrize("command", ["dist_info --output-dir", "egg_info --egg-base"])
def test_build_for_pip_with_old_setuptools_names_versions(command: str, tmp_path: Path) -> None:
    result = run_with_setuptools("59.6.0", f"{command} {tmp_path}", tmp_path)
    assert result.returncode != 0
    (sentence,) = result.stderr.splitlines()
    assert "setuptools is 59.6.0, expected 64 or newer" in sentence
    assert "pip install --upgrade setuptools" in sentence


def test_pyproject_has_nothing_that_setuptools_64_refuses() -> None:
    """setuptools 64 rejects unknown keys in [project], and a licence that is not a table."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "setuptools>=64" in pyproject["build-system"]["requires"]
    known = "name version description readme dynamic requires-python dependencies"
    known += " optional-dependencies entry-points"
    assert pyproject["project"].keys() <= set(known.split())
    assert pyproject["project"]["dynamic"] == ["license"]


# ---- CUDA


@pytest.mark.parametrize(
    ("version", "nvcc", "environment", "why"),
    [
        (CPU_TORCH, 13, {}, "a build for the CPU"),
        ("2.11.0", None, {}, "a build for the CPU"),
        (CUDA_TORCH, 12, {}, "CUDA 12"),
        ("2.15.0.dev20261101+cu130", None, {}, "nvcc"),
        (CUDA_TORCH, 13, {"ROTA_CUDA": "0"}, ""),
    ],
    ids=["cpu-torch", "oldest", "other-nvcc", "newest-and-no-nvcc", "switched-off"],
)
def test_build_where_cuda_is_impossible_is_for_the_cpu_and_says_why(
    version: str, nvcc: int | None, environment: dict[str, str], why: str, tmp_path: Path
) -> None:
    result = run_setup(tmp_path, version, nvcc, **environment)
    line = asked_for(result)
    assert line.startswith("for the CPU") and ".cu" not in line.replace("without_cuda.cpp", "")
    assert why in result.stdout
    assert ("rota: building for the CPU alone" in result.stdout) == bool(why)


@pytest.mark.parametrize("environment", [{}, CUDA], ids=str)
def test_build_cuda_takes_the_toolkit_of_nvcc(environment: dict[str, str], tmp_path: Path) -> None:
    """nvcc on PATH is a script outside of the toolkit's folder."""
    line = asked_for(run_setup(tmp_path, CUDA_TORCH, 13, **environment))
    assert line.startswith(f"with CUDA kernels: {tmp_path}/toolkit ")
    suffixes = [Path(file).suffix for file in compiled_files(line)]
    assert suffixes == sorted(suffixes, key=[".cu", ".cpp"].index), "the slowest come first"
    assert "csrc/cuda/device_info.cu" in line


def test_build_cuda_home_comes_before_path(tmp_path: Path) -> None:
    home = tmp_path / "home"
    make_nvcc(home / "bin", home, 13)
    line = asked_for(run_setup(tmp_path, CUDA_TORCH, 13, CUDA_HOME=str(home)))
    assert line.startswith(f"with CUDA kernels: {home} ")


@pytest.mark.parametrize(
    ("archs", "compiled"),
    [
        (None, "80 90 100"),
        *((f"shipped:8.{minor}", "80") for minor in (0, 6, 9)),
        ("shipped:9.0", "90"),
        *((f"shipped:{newer}", "100") for newer in ("10.0", "10.3", "11.0", "12.1")),
    ],
)
def test_build_cuda_compiles_each_arch_alone(
    archs: str | None, compiled: str, tmp_path: Path
) -> None:
    """The arch that is shipped for a GPU is the one whose code it runs."""
    *_, last = numbers = compiled.split()
    assert targets(nvcc_flags(tmp_path, archs)) == [
        *(f"arch=compute_{number},code=sm_{number}" for number in numbers),
        f"arch=compute_{last},code=compute_{last}",
    ]


def test_build_cuda_takes_archs_in_any_order(tmp_path: Path) -> None:
    assert nvcc_flags(tmp_path, "100,90,100") == nvcc_flags(tmp_path, "90,100")


@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_build_cuda_for_one_arch_compiles_it_as_what_ships(arch: str, tmp_path: Path) -> None:
    def without_archs(flags: list[str]) -> list[str]:
        return [f for f in flags if not re.match("-gencode|-DROTA_CUDA_ARCHS|--threads", f)]

    alone, shipped = nvcc_flags(tmp_path, arch), nvcc_flags(tmp_path)
    machine_code, _ = targets(alone)
    assert machine_code in targets(shipped)
    assert without_archs(alone) == without_archs(shipped)


def test_build_cuda_has_the_cxx_flags_of_a_build_for_the_cpu(tmp_path: Path) -> None:
    """`make test-oldest` therefore does without the tests marked same_in_every_build."""
    of_cpu = compile_args(tmp_path, ROTA_CUDA="0")
    assert compile_args(tmp_path, ROTA_CUDA="1")["cxx"] == of_cpu != []


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_build_compiles_every_source_once(cuda: str, tmp_path: Path) -> None:
    result = run_setup(tmp_path, CUDA_TORCH, 13, "build_ext --inplace", ROTA_CUDA=cuda)
    compiled = []
    for file in compiled_files(asked_for(result)):
        if file.startswith("build/units/"):  # written by this run, and by real builds
            compiled += re.findall(r'#include "(.+)"', (ROOT / file).read_text())
        else:
            compiled.append(file.removeprefix("csrc/"))
    csrc = ROOT / "csrc"
    sources = [path.relative_to(csrc).as_posix() for path in csrc.rglob("*.c[pu]*")]
    gpus = re.compile(r"tensor/cuda/|\.cu$")
    expected = [name for name in sources if cuda == "1" or not gpus.search(name)]
    assert sorted(compiled) == sorted(name for name in expected if not name.endswith(".cuh"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_build_cuda_machine_code_is_the_same_alone_and_in_what_ships(tmp_path: Path) -> None:
    """Compares nvcc's output byte for byte, for the .cu file that compiles fastest."""

    def machine_code(archs: str | None) -> bytes:
        folder = tmp_path / (archs or "shipped")
        folder.mkdir()
        flags = nvcc_flags(tmp_path, archs)
        command = ["nvcc", "-fatbin", "csrc/cuda/copy_kernels.cu", "-Icsrc", *flags]
        command += ["-o", str(folder / "fatbin"), "--keep", "--keep-dir", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        (cubin,) = folder.glob("*_90.cubin")
        return cubin.read_bytes()

    assert machine_code("90") == machine_code(None)
