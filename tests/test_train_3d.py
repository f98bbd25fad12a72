"""examples/train_3d.py: the same losses, norms and skipped steps on 8 ranks as on one."""

from __future__ import annotations

import pytest
import torch
import train_3d

from programs import run_python

pytestmark = pytest.mark.same_in_every_build


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ("--steps 2", "skipped steps: none"),
        ("--steps 2 --float16 --inf-step 0 --inf-in embedding --overlap", "skipped steps: [0]"),
    ],
    ids=["float32", "float16-inf"],
)
def test_train_3d_equals_one_rank(options: str, skipped: str) -> None:
    done = run_python("examples/train_3d.py", "--context", "8", *options.split())
    for fact in (skipped, "of the pipeline's time", "memory of a rank"):
        assert fact in done.stdout


def report(**changes: list[float] | list[bool]) -> train_3d.Report:
    same = {"losses": [3.0, 2.0], "norms": [1.0, 0.5], "skipped": [False, False]}
    return train_3d.Report(**(same | changes))


@pytest.mark.parametrize(
    ("rank", "problem"),
    [
        (report(), None),
        (report(losses=[3.0, 2.0 + 5e-5]), "losses"),
        (report(losses=[3.0, torch.nan]), "losses"),
        (report(norms=[1.0, 0.501]), "norms differ"),
        (report(skipped=[False, True]), "skipped other steps"),
    ],
    ids=["none", "loss", "nan", "norm", "skipped"],
)
def test_train_3d_finds_a_difference(rank: train_3d.Report, problem: str | None) -> None:
    problems = train_3d.problems_of(report(), [rank, rank], train_3d.FLOAT32)
    assert [problem is not None and problem in text for text in problems] == [True] * bool(problem)


def test_train_3d_finds_ranks_with_different_norms() -> None:
    ranks = [report(), report(norms=[1.0, 0.5 + 1e-7])]
    assert train_3d.problems_of(report(), ranks, train_3d.FLOAT32) == ["ranks have different norms"]
