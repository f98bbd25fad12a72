"""Every code block of README.md and docs/ must run unchanged; Python blocks run on two ranks."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from ranks import Rank, run_ranks

ROOT = Path(__file__).parents[1]
CONFORMANCE = ROOT / "tests" / "conformance"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "examples" / "ddp.py"
LIMIT_S = 300  # ends a hang; beside seven other tests on two cores, one took 120 s


class Block(NamedTuple):
    """A code block: the words of its info string, and the code."""

    language: str
    # "cuda"; "conformance": a list for this torch (tests/conformance); "recipe" for a part of a
    # recipe (test_trainers.py); or nothing
    needs: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    fences = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*fence) for fence in fences]


def cases(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}-{i}")
        for page in PAGES
        for i, block in enumerate(blocks_of(page))
        if block.language == language and block.needs != "recipe"
    ]


# Names that blocks use without defining them; each is made at its first use.
AT_HAND: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensor": lambda names: torch.ones(1000),
    "comm": lambda names: rota.Communicator(),
    "model": lambda names: torch.nn.Linear(8, 1),
    "ddp": lambda names: DistributedDataParallel(torch.nn.Linear(8, 1)),
    "optimizer": lambda names: torch.optim.AdamW(names["ddp"].parameters(), fused=True),
    "loader": lambda names: [(torch.ones(4, 8), torch.zeros(4, 1))] * 3,
    "loss_of": lambda names: torch.nn.functional.mse_loss,
}


def run_statements(code: str) -> None:
    names: dict[str, Any] = {"torch": torch, "dist": dist, "rota": rota}
    for statement in ast.parse(code).body:
        for node in ast.walk(statement):
            is_used = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            if is_used and node.id in AT_HAND and node.id not in names:
                names[node.id] = AT_HAND[node.id](names)
        exec(compile(ast.Module([statement], []), "block", "exec"), names)


def run_block(rank: Rank, code: str) -> None:
    if "init_process_group" in code:
        # The values that torchrun would pass through the environment.
        about = {"store": rank.make_store(), "rank": rank.rank, "world_size": rank.world_size}
        dist.init_process_group = functools.partial(dist.init_process_group, **about)
    else:
        rank.init("gloo")
    run_statements(code)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("block", cases("python"))
def test_python_block_runs(block: Block) -> None:
    if block.needs == "cuda" and not (rota._C.cuda_archs() and torch.cuda.is_available()):
        pytest.skip("needs a GPU and a build with CUDA kernels")
    run_ranks(2, run_block, block.code)


@pytest.mark.same_in_every_build
@pytest.mark.parametrize("block", cases("sh"))
def test_shell_block_runs(block: Block) -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    if block.needs == "conformance" and not (CONFORMANCE / f"torch-{version}.txt").exists():
        pytest.skip(f"there is no list for torch {version}")
    for line in block.code.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            command = ["make", "--dry-run", *arguments]
        elif program in ("python", "torchrun"):
            module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
            command = [sys.executable, *module, *arguments]
        elif program == "pip":
            continue  # `make venv` has already installed rota, in editable mode
        else:
            pytest.fail(f"nothing is known about running {program}")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr


def test_front_page_shows_the_example() -> None:
    assert EXAMPLE.read_text() in {block.code for block in blocks_of(PAGES[0])}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
