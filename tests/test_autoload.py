"""The backend "rota" in programs that do not import rota: torch finds it by entry points."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib
import torch.distributed as dist

from programs import ROOT, run_python

ENTRY_POINTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "project"
]["entry-points"]

REGISTERS = """
import sys
import torch
import torch.distributed as dist

assert dist.Backend.ROTA == "rota"
assert not any(name.split(".")[0] == "rota" for name in sys.modules), "rota was imported"

dist.init_process_group("rota", store=dist.HashStore(), rank=0, world_size=1)
assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "rota"
dist.all_reduce(torch.ones(3))
import rota
assert rota.backend.create is not None
dist.destroy_process_group()
"""


def test_rota_imports_nothing_of_torch_that_takes_long() -> None:
    long = (
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    )
    program = f"import sys, rota, rota.elastic; print(*(set({long}) & set(sys.modules)))"
    assert run_python("-c", program).stdout.split() == []


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With rota's entry points as pip installs them, before those of another installed rota."""
    about = tmp_path / "rota-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rota\nVersion: 0.1.0\n")
    lines = []
    for group, entries in ENTRY_POINTS.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines))
    import rota_autoload

    folders = [str(tmp_path), str(Path(rota_autoload.__file__).parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def test_init_process_group_finds_rota_without_its_import(environment: dict[str, str]) -> None:
    """Also where torch is told to use torchcomms, which is not installed here."""
    run_python("-c", REGISTERS, env=environment | {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"})


def test_rota_imported_before_torch_imports_both(environment: dict[str, str]) -> None:
    """torch then runs the entry point while `import rota` has not ended."""
    run_python("-c", "import rota, torch; torch.distributed.Backend.ROTA", env=environment)


def test_entry_point_of_newer_torch_loads_what_registers() -> None:
    """Newer torch calls what it loads for the name of the backend (pytorch#187388)."""
    import rota_autoload

    group = "torch.distributed.backends"
    (entry,) = (EntryPoint(name, value, group) for name, value in ENTRY_POINTS[group].items())
    assert entry.name == "rota"
    assert entry.load() is rota_autoload.register
    entry.load()()  # a second time does nothing
    assert "rota" in dist.Backend.backend_list
