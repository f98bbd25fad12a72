"""A build that cannot work says so in one sentence, before a compiler prints pages.

setup.py runs with a torch and an nvcc that are only a few lines of text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_extension

ROOT = Path(__file__).resolve().parents[1]

# Says which kind of extension was asked for, and with what.
CPP_EXTENSION = """
import os
from setuptools import Extension
from setuptools.command.build_ext import build_ext as BuildExtension

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
    """An nvcc that says this on standard error."""
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{output}\nEND\n")
    nvcc.chmod(0o755)
    return nvcc


def dry_run(top: Path, major: int) -> str:
    """The lines of `nvcc --dryrun` that count, among others."""
    return (
        f"#$ _HERE_={top}/bin\n#$ TOP={top}/bin/..\n"
        f"#$ gcc -D__CUDACC__ -D__CUDACC_VER_MAJOR__={major} -D__CUDACC_VER_MINOR__=0 x.cu"
    )


def run_setup(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.py, far enough to see what it would build."""
    ours = ("CXX", "CUDA_HOME", "CUDA_PATH", "ROTA_CUDA", "ROTA_CUDA_ARCHS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    # Neither a compiler nor an nvcc of this machine.
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, target in (("g++", "/bin/true"), ("cat", "/bin/cat")):
        if not (tmp_path / "bin" / name).exists():
            (tmp_path / "bin" / name).symlink_to(target)
    env |= {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path)} | environment
    return subprocess.run(
        [sys.executable, "setup.py", "--name"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """The only line of a build that failed."""
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("rota: ")
    return lines[0]


def asked_for(result: subprocess.CompletedProcess[str]) -> str:
    """What a build that goes on asks torch for."""
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(("for", "with")))
    return line


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


@pytest.mark.parametrize("archs", ["", "sm_90", "80;90", "80,"])
def test_build_unreadable_archs_shows_readable_ones(archs: str, tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    sentence = sentence_of(run_setup(tmp_path, ROTA_CUDA="1", ROTA_CUDA_ARCHS=archs))
    assert repr(archs) in sentence and "80,90,100" in sentence


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
    """nvcc on PATH is a script in a folder that is no toolkit."""
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    line = asked_for(run_setup(tmp_path, **({"ROTA_CUDA": wish} if wish else {})))
    assert line.startswith(f"with CUDA kernels: {tmp_path}/toolkit ")
    assert "csrc/cuda/device_info.cu" in line
    for arch in ("80", "90", "100"):
        assert f"-gencode=arch=compute_80,code=sm_{arch}" in line
    assert line.count("code=compute_") == line.count("code=compute_80") == 1


def test_build_cuda_home_comes_before_path(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "other", 13))
    home = tmp_path / "toolkit"
    make_nvcc(home / "bin", dry_run(home, 13))
    line = asked_for(run_setup(tmp_path, CUDA_HOME=str(home)))
    assert line.startswith(f"with CUDA kernels: {home} ")


def test_build_cuda_for_one_arch_takes_its_ptx(tmp_path: Path) -> None:
    make_torch(tmp_path, CUDA_TORCH)
    make_nvcc(tmp_path / "bin", dry_run(tmp_path / "toolkit", 13))
    line = asked_for(run_setup(tmp_path, ROTA_CUDA_ARCHS="90"))
    assert line.count("-gencode") == 2
    assert "arch=compute_90,code=sm_90" in line and "arch=compute_90,code=compute_90" in line


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
