"""The recipes of docs/trainers.md, run with torchrun on rota and on Gloo: equal losses. So is what
trainers do besides training, where some of them ask for the backend's name: equal results.

`make trainers` installs the trainers; without them only the recipe of torch alone runs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.same_in_every_build

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "trainers"
EVALUATIONS = ROOT / "tests" / "trainers"
PAGE = ROOT / "docs" / "trainers.md"
# Each recipe with the package that it needs.
PACKAGES = {
    "plain": "torch",
    "lightning_ddp": "lightning",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "deepspeed_zero": "deepspeed",
}
EVALUATION_PACKAGES = {"lightning_validation": "lightning", "accelerate_evaluation": "accelerate"}
LIMIT_S = 300  # DeepSpeed compiles an operator of its own at its first use
# Now and then a process that has done its work on Gloo ends with this, more often on a busy
# machine: a thread of Gloo's drops the last Work, and a tensor of Python's with it, when the
# interpreter has begun to finalise and ends every thread that asks for its lock.
ABORT_OF_GLOO = "terminate called without an active exception"


@pytest.fixture(scope="module", autouse=True)
def own_operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What DeepSpeed compiles lies in a directory of this run.

    A run that is killed while it compiles leaves a lock behind, for which every later one with the
    same directory would wait without end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("operators")))
        yield


def reports_on(backend: str, script: Path, what: str) -> dict[int, str]:
    """What each rank reports, by rank: to a file of its own, since long lines mix in a pipe."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=1"]
    for _ in range(5):
        with tempfile.TemporaryDirectory() as logs:
            command = [*launcher, f"--log-dir={logs}", "--nproc-per-node=2", str(script), backend]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
            )
            text = "".join(path.read_text() for path in Path(logs).rglob("stdout.log"))
        if backend != "gloo" or ABORT_OF_GLOO not in done.stderr:
            break
    assert done.returncode == 0, text + done.stderr
    lines = re.findall(rf"^{backend} rank (\d) {what} \[(.+)\]$", text, re.MULTILINE)
    assert len(lines) == 2, text
    return {int(rank): report for rank, report in lines}


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make trainers` installs it")


@pytest.mark.parametrize("recipe", PACKAGES)
def test_recipe_on_rota_has_the_losses_of_gloo(recipe: str) -> None:
    skip_without(PACKAGES[recipe])
    script = RECIPES / f"{recipe}.py"
    on_rota = reports_on("rota", script, "losses")
    assert on_rota == reports_on("gloo", script, "losses")
    assert all(len(losses.split(",")) == 8 for losses in on_rota.values())


@pytest.mark.parametrize("name", EVALUATION_PACKAGES)
def test_evaluation_on_rota_has_the_results_of_gloo(name: str) -> None:
    skip_without(EVALUATION_PACKAGES[name])
    script = EVALUATIONS / f"{name}.py"
    assert reports_on("rota", script, "results") == reports_on("gloo", script, "results")


def test_page_quotes_every_recipe_and_each_is_tested() -> None:
    """A block that starts with the name of a recipe is made of lines of that recipe, in order."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```python recipe\n# (.+?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert {Path(name).stem for name, _ in blocks} == set(PACKAGES)
    assert {path.stem for path in RECIPES.glob("*.py")} - {"task"} == set(PACKAGES)
    for name, code in blocks:
        lines = iter((ROOT / name).read_text().splitlines())
        for line in code.splitlines():
            assert line in ("", "...") or line in lines, f"{name}: {line}"
