"""A build that cannot work says so in one sentence, before a compiler prints pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_setup(
    tmp_path: Path, torch_module: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs setup.py far enough to check the toolchain, with a torch that is only this text."""
    (tmp_path / "torch.py").write_text(torch_module)
    env = {name: value for name, value in os.environ.items() if name not in ("CXX", "ROTA_CUDA")}
    env.update(environment, PYTHONPATH=str(tmp_path))
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


@pytest.mark.parametrize("version", ["2.9.0", "2.10.1+cu128", "2.16.0", "3.0.0a0+git12ab34"])
def test_build_torch_out_of_range_names_both_versions(version: str, tmp_path: Path) -> None:
    sentence = sentence_of(run_setup(tmp_path, f"__version__ = {version!r}"))
    assert version in sentence
    assert "2.11 to 2.15" in sentence
    assert "install" in sentence


def test_build_without_torch_says_how_to_get_it(tmp_path: Path) -> None:
    sentence = sentence_of(run_setup(tmp_path, "raise ModuleNotFoundError('No module torch')"))
    assert "torch is not installed" in sentence
    assert "pip install torch" in sentence and "--no-build-isolation" in sentence


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/no/such/g++ -O2"])
def test_build_without_compiler_names_it(compiler: str, tmp_path: Path) -> None:
    sentence = sentence_of(run_setup(tmp_path, "__version__ = '2.13.0'", CXX=compiler))
    assert compiler.split()[0] in sentence
    assert "install g++" in sentence and "CXX" in sentence


def test_build_unknown_cuda_setting_names_the_known_ones(tmp_path: Path) -> None:
    sentence = sentence_of(run_setup(tmp_path, "__version__ = '2.13.0'", ROTA_CUDA="2"))
    assert "ROTA_CUDA" in sentence and "'2'" in sentence and "0 or 1" in sentence


def test_build_cuda_kernels_that_do_not_exist_yet_are_refused(tmp_path: Path) -> None:
    sentence = sentence_of(run_setup(tmp_path, "__version__ = '2.13.0'", ROTA_CUDA="1"))
    assert "ROTA_CUDA=1" in sentence and "unset" in sentence


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.15.0.dev20261101+cu130"])
def test_build_torch_in_range_passes_the_check(version: str, tmp_path: Path) -> None:
    """It then fails at what this torch does not have, which is not rota's to say."""
    result = run_setup(tmp_path, f"__version__ = {version!r}")
    assert "torch.utils" in result.stderr
    assert "rota: " not in result.stderr
