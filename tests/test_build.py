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
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
    )
    (folder / "torch" / "utils" / "cpp_extension.py").write_text(CPP_EXTENSION)


def make_nvcc(folder: Path, output: str) -> Path:
    """A fake nvcc that prints `output` to standard error."""
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{output}\nEND\n")
    nvcc.chmod(0o755)
    return nvcc


def dry_run(top: Path, major: int) -> str:
    """The lines of `nvcc --dryrun` that setup.py reads, and some others."""
    return (
        f"#$ _HERE_={top}/bin\n#$ TOP={top}/bin/..\n"
        f"#$ gcc -D__CUDACC__ -D__CUDACC_VER_MAJOR__={major} -D__CUDACC_VER_MINOR__=0 x.cu"
    )


def run_setup(
    tmp_path: Path, command: str = "--name", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs setup.py far enough to see what it would build."""
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


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """The single error line of a failed build."""
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("rota: ")
    return lines[0]


def asked_for(result: subprocess.CompletedProcess[str]) -> str:
    """The extension that a successful build requests from torch."""
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(("for", "with")))
    return line


def compiled_files(result: subprocess.CompletedProcess[str]) -> list[str]:
    """In the order in which the compiler gets them."""
    return re.findall(r"(?:csrc|build/units)/\S+\.\w+", asked_for(result))


def nvcc_flags(tmp_path: Path, archs: str | None = None) -> list[str]:
    """nvcc's flags in a build with these ROTA_CUDA_ARCHS."""
    if not (tmp_path / "torch").exists():
        make_torch(tmp_path, CUDA_TORCH)
        make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    environment = {} if archs is None else {"ROTA_CUDA_ARCHS": archs}
    line = asked_for(run_setup(tmp_path, **environment))
    return ast.literal_eval(line[line.index("{") :])["extra_compile_args"]["nvcc"]


def targets(flags: list[str]) -> list[str]:
    return [flag.removeprefix("-gencode=") for flag in flags if flag.startswith("-gencode=")]


# ---- setuptools ----------------------------------------------------------------------------------

# GPU machines often have their distribution's setuptools: 59.6 on Ubuntu 22.04, 68.1 on 24.04.


def pretend_setuptools(folder: Path, version: str) -> None:
    (folder / "sitecustomize.py").write_text(
        f"import setuptools\nsetuptools.__version__ = {version!r}\n"
    )


@pytest.mark.parametrize("version", ["59.6.0", "68.1.2"])
def test_build_in_place_takes_any_setuptools(version: str, tmp_path: Path) -> None:
    make_torch(tmp_path, CPU_TORCH)
    pretend_setuptools(tmp_path, version)
    result = run_setup(tmp_path, "build_ext --inplace")
    assert result.returncode == 0, result.stderr
    assert "builds in place" in result.stdout


# pip runs the first for a wheel's metadata; old versions of pip run the second.
@pytest.mark.parametrize("command", ["dist_info --output-dir", "egg_info --egg-base"])
def test_build_for_pip_with_old_setuptools_names_both_versions(
    command: str, tmp_path: Path
) -> None:
    make_torch(tmp_path, CPU_TORCH)
    pretend_setuptools(tmp_path, "59.6.0")
    result = run_setup(tmp_path, f"{command} {tmp_path}")
    assert result.returncode != 0
    (sentence,) = result.stderr.splitlines()
    assert "setuptools is 59.6.0, expected 64 or newer" in sentence
    assert "pip install --upgrade setuptools" in sentence


def test_build_without_setuptools_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text("raise ModuleNotFoundError('No module setuptools')")
    sentence = sentence_of(run_setup(tmp_path))
    assert "setuptools is not installed" in sentence and "pip install setuptools" in sentence


def test_pyproject_has_nothing_that_setuptools_64_refuses() -> None:
    """setuptools 64 rejects unknown keys in [project], and a licence that is not a table."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "setuptools>=64" in pyproject["build-system"]["requires"]
    assert pyproject["project"].keys() <= {
        "name",
        "version",
        "description",
        "readme",
        "dynamic",
        "requires-python",
        "dependencies",
        "optional-dependencies",
        "entry-points",
    }
    assert pyproject["project"]["dynamic"] == ["license"]


# ---- torch and the compiler ----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.9.0", "2.10.1+cu128", "2.16.0", "3.0.0a0+git12ab34"])
def test_build_torch_out_of_range_names_both_versions(version: str, tmp_path: Path) -> None:
    make_torch(tmp_path, version)
    sentence = sentence_of(run_setup(tmp_path))
    assert version in sentence
    assert "2.11 to 2.15" in sentence
    assert "install" in sentence


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.15.0.dev20261101+cu130"])
def test_build_torch_in_range_goes_on(version: str, tmp_path: Path) -> None:
    make_torch(tmp_path, version)
    assert asked_for(run_setup(tmp_path)).startswith("for the CPU")


def test_build_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module torch')")
    sentence = sentence_of(run_setup(tmp_path))
    assert "torch is not installed" in sentence
    assert "pip install torch" in sentence and "--no-build-isolation" in sentence


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/no/such/g++ -O2"])
def test_build_without_compiler_names_it(compiler: str, tmp_path: Path) -> None:
    make_torch(tmp_path, CPU_TORCH)
    sentence = sentence_of(run_setup(tmp_path, CXX=compiler))
    assert compiler.split()[0] in sentence
    assert "install g++" in sentence and "CXX" in sentence


# ---- CUDA ----------------------------------------------------------------------------------------


def test_build_unknown_cuda_setting_names_the_known_ones(tmp_path: Path) -> None:
    make_torch(tmp_path, CPU_TORCH)
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="2"))
    assert "ROTA_CUDA" in sentence and "'2'" in sentence and "0 or 1" in sentence


@pytest.mark.parametrize("archs", ["", "sm_90", "80;90", "80,", "shipped:90", "native"])
def test_build_unreadable_archs_shows_readable_ones(archs: str, tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1", ROTA_CUDA_ARCHS=archs))
    assert repr(archs) in sentence and "80,90,100 or shipped:9.0" in sentence


def test_build_for_gpu_older_than_what_ships_says_so(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1", ROTA_CUDA_ARCHS="shipped:7.5"))
    assert "'shipped:7.5'" in sentence and "older than sm_80" in sentence
    assert "newer GPU" in sentence


def test_build_cuda_with_cpu_torch_says_how_to_get_another(tmp_path: Path) -> None:
    make_torch(tmp_path, CPU_TORCH)
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1"))
    assert "ROTA_CUDA=1" in sentence and CPU_TORCH in sentence
    assert "pip install torch" in sentence


@pytest.mark.parametrize("home", [None, "/no/such/toolkit"])
def test_build_cuda_without_nvcc_says_where_it_looked(home: str | None, tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    environment = {"CUDA_HOME": home} if home else {}
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1", **environment))
    assert f"no nvcc {f'in {home}/bin' if home else 'on PATH'}" in sentence
    assert "install the CUDA toolkit 13" in sentence and "CUDA_HOME" in sentence


def test_build_cuda_with_nvcc_of_other_major_version_names_both(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    nvcc = make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 12))
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1"))
    assert f"{nvcc} is of CUDA 12" in sentence and f"torch {CUDA_TORCH} of CUDA 13" in sentence
    assert "install the CUDA toolkit 13" in sentence


def test_build_cuda_with_nvcc_that_answers_something_else_says_so(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    nvcc = make_nvcc(tmp_path / "bin", "nvcc: no such toolkit")
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1"))
    assert str(nvcc) in sentence and "CUDA_HOME" in sentence


@pytest.mark.parametrize("wish", [None, "1"])
def test_build_cuda_takes_the_toolkit_of_nvcc_wherever_nvcc_is(
    wish: str | None, tmp_path: Path
) -> None:
    """nvcc on PATH is a script outside of the toolkit's folder."""
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    line = asked_for(run_setup(tmp_path, **({"ROTA_CUDA": wish} if wish else {})))
    assert line.startswith(f"with CUDA kernels: {tmp_path}/toolkit ")
    assert "csrc/cuda/device_info.cu" in line


def test_build_cuda_home_comes_before_path(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "other", 13))
    home = tmp_path / "toolkit"
    make_nvcc(home / "bin", dry_run(home, 13))
    line = asked_for(run_setup(tmp_path, CUDA_HOME=str(home)))
    assert line.startswith(f"with CUDA kernels: {home} ")


def test_build_cuda_ships_each_arch_by_itself_and_ptx_of_the_last(tmp_path: Path) -> None:
    assert targets(nvcc_flags(tmp_path)) == [
        "arch=compute_80,code=sm_80",
        "arch=compute_90,code=sm_90",
        "arch=compute_100,code=sm_100",
        "arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_build_cuda_for_one_arch_compiles_it_as_what_ships(arch: str, tmp_path: Path) -> None:
    def without_archs(flags: list[str]) -> list[str]:
        return [f for f in flags if not re.match("-gencode|-DROTA_CUDA_ARCHS|--threads", f)]

    alone = nvcc_flags(tmp_path, arch)
    shipped = nvcc_flags(tmp_path)
    machine_code, ptx = targets(alone)
    assert machine_code == f"arch=compute_{arch},code=sm_{arch}"
    assert machine_code in targets(shipped)
    assert ptx == f"arch=compute_{arch},code=compute_{arch}"
    assert without_archs(alone) == without_archs(shipped)


def test_build_cuda_compiles_cpp_files_with_the_flags_of_a_build_for_the_cpu(
    tmp_path: Path,
) -> None:
    """`make test-oldest` therefore does without the tests marked same_in_every_build."""

    def cxx_flags(build: str) -> list[str]:
        line = asked_for(run_setup(tmp_path, ROTA_CUDA=build))
        flags = ast.literal_eval(line[line.index("{") :])["extra_compile_args"]
        return flags["cxx"] if build == "1" else flags

    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    assert cxx_flags("1") == cxx_flags("0") != []


def test_build_cuda_starts_with_the_files_that_take_longest(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    suffixes = [Path(file).suffix for file in compiled_files(run_setup(tmp_path))]
    assert suffixes == sorted(suffixes, key=[".cu", ".cpp"].index)


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_build_compiles_every_source_once(cuda: str, tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    compiled = []
    for file in compiled_files(run_setup(tmp_path, "build_ext --inplace", ROTA_CUDA=cuda)):
        if file.startswith("build/units/"):  # written by this run, and by real builds
            compiled += re.findall(r'#include "(.+)"', (ROOT / file).read_text())
        else:
            compiled.append(file.removeprefix("csrc/"))
    csrc = ROOT / "csrc"
    sources = [path.relative_to(csrc).as_posix() for path in csrc.rglob("*.c[pu]*")]
    gpus = re.compile(r"tensor/cuda/|\.cu$")
    expected = [name for name in sources if cuda == "1" or not gpus.search(name)]
    assert sorted(compiled) == sorted(name for name in expected if not name.endswith(".cuh"))


def test_build_cuda_takes_archs_in_any_order(tmp_path: Path) -> None:
    flags = nvcc_flags(tmp_path, "100,90,100")
    assert flags == nvcc_flags(tmp_path, "90,100")
    assert targets(flags)[-1] == "arch=compute_100,code=compute_100"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ("8.0", "80"),
        ("8.6", "80"),
        ("8.9", "80"),
        ("9.0", "90"),
        ("10.0", "100"),
        ("10.3", "100"),
        ("11.0", "100"),
        ("12.1", "100"),
    ],
)
def test_build_cuda_for_gpu_compiles_the_shipped_code_that_it_runs(
    capability: str, arch: str, tmp_path: Path
) -> None:
    assert targets(nvcc_flags(tmp_path, f"shipped:{capability}")) == [
        f"arch=compute_{arch},code=sm_{arch}",
        f"arch=compute_{arch},code=compute_{arch}",
    ]


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


@pytest.mark.parametrize(
    ("version", "major", "why"),
    [(CPU_TORCH, 13, "a build for the CPU"), (CUDA_TORCH, 12, "CUDA 12"), (CUDA_TORCH, 0, "nvcc")],
    ids=["cpu-torch", "other-nvcc", "no-nvcc"],
)
def test_build_where_cuda_is_impossible_is_for_the_cpu_and_says_why(
    version: str, major: int, why: str, tmp_path: Path
) -> None:
    make_torch(tmp_path, version)
    if major:
        make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", major))
    result = run_setup(tmp_path)
    line = asked_for(result)
    assert line.startswith("for the CPU") and ".cu" not in line.replace("without_cuda.cpp", "")
    assert "rota: building for the CPU alone" in result.stdout and why in result.stdout


def test_build_cuda_switched_off_is_for_the_cpu(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    assert asked_for(run_setup(tmp_path, ROTA_CUDA="0")).startswith("for the CPU")
