"""The tables of csrc/README.md are what benchmarks/paper.py prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "csrc" / "README.md"
SCRIPT = ROOT / "benchmarks" / "paper.py"
TABLE = re.compile(r"(<!-- benchmarks/paper\.py [^\n]* -->\n).*?(<!-- end -->)", re.DOTALL)

pytest.importorskip("rich", reason="the benchmarks need rich")


def run_paper(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_readme_emptied_tables_update_restores_them(tmp_path: Path) -> None:
    emptied, num_tables = TABLE.subn(r"\1\2", README.read_text())
    assert num_tables >= 4
    copy = tmp_path / "README.md"
    copy.write_text(emptied)
    done = run_paper("--update", str(copy))
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == README.read_text(), (
        "stale: run python benchmarks/paper.py --update csrc/README.md"
    )


def test_two_shot_in_place_one_gpu_takes_tensors_over_copy_rate() -> None:
    done = run_paper(
        *("--tables", "bounds", "--system", "one-gpu", "--ranks", "8", "--sizes", "1G"),
        "--markdown",
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "two_shot_in_place" in line)
    tensors_us = 2 * 8 * 2**30 / 4.3e6
    assert row.split("|")[2].split()[0] == f"{2.5 + tensors_us:.0f}"  # one launch, no waits


def test_paper_table_without_end_is_one_line_of_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmarks/paper.py --tables systems -->\n")
    done = run_paper("--update", str(page))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
