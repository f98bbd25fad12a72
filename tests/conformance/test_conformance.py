"""The part of the conformance run that fits CI's time, and the run's own rules.

`make conformance` runs everything; see run.py.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

import expected
import run
from expected import Expectation
from suite import Result

LIST = expected.list_path(metadata.version("torch"))

pytestmark = pytest.mark.skipif(not LIST.exists(), reason=f"there is no {LIST.name}")


def test_suite_two_ranks_matches_the_list(tmp_path: Path) -> None:
    results = run.run_suite("rota", 2, num_jobs=1, timeout_s=60, logs=tmp_path)
    counts = expected.counts_of(LIST)
    differences = list(run.compare(expected.read(LIST), counts, "rota", 2, results))
    assert not differences, "\n".join(differences)


def test_list_what_gloo_passes_rota_passes_or_torch_excludes() -> None:
    lagging = [name for name, entry in expected.read(LIST).items() if entry.lags()]
    assert lagging == []


def test_list_all_tests_have_run_and_what_does_not_pass_has_a_reason() -> None:
    for name, entry in expected.read(LIST).items():
        assert expected.NOT_RUN not in "".join(entry.outcomes.values()), name
        assert entry.reason or set(entry.outcomes["rota"]) == {"p"}, name


OTHERS = {"p": 1, "s": 0}


@pytest.mark.parametrize(
    ("results", "difference"),
    [
        ({"test_b": Result("pass")}, "test_a: in the list, but not in the suite"),
        ({"test_b": Result("fail")}, "test_b: rota at 3 ranks: expected p or s, got f "),
        ({"test_b": Result("skip", "file:1")}, "rota at 3 ranks: {'p': 0, 's': 1} not listed"),
        ({"test_a": Result("fail", error="E")}, "test_a: rota at 3 ranks: expected p, got f E"),
        ({"test_a": Result("skip", "file:1")}, "test_a: rota at 3 ranks: expected p, got s file:1"),
        ({"test_a": Result("pass")}, None),
    ],
    ids=["vanished", "new", "skipped-now", "failed", "skipped", "none"],
)
def test_compare_difference_is_named(results: run.Results, difference: str | None) -> None:
    expectations = {"test_a": Expectation({"gloo": "pppp", "rota": "fpff"})}
    found = list(run.compare(expectations, OTHERS, "rota", 3, {"test_b": None} | results))
    expected_lines = [line for line in found if difference and line.startswith(difference)]
    assert expected_lines if difference else not found


def test_compare_unexpected_pass_is_named() -> None:
    expectations = {"test_a": Expectation({"gloo": "pppp", "rota": "fpff"})}
    results: run.Results = {"test_a": Result("pass"), "test_b": None}
    assert len(list(run.compare(expectations, OTHERS, "rota", 2, results))) == 1


def test_list_written_and_read_is_the_same(tmp_path: Path) -> None:
    entries = {
        "test_a": Expectation(),
        "test_b": Expectation({"gloo": "pppp", "rota": "plsf"}, "x y"),
    }
    entries["test_a"].enter("rota", 3, Result("skip", "file:1 why"))
    passed = {f"test_{i}": Expectation({"gloo": "pppp", "rota": "pppp"}) for i in range(3)}
    expected.write(tmp_path / "list", entries | passed)
    assert expected.read(tmp_path / "list") == entries
    assert expected.counts_of(tmp_path / "list") == {"p": 3, "s": 0}
    assert entries["test_a"] == Expectation({"gloo": "????", "rota": "?s??"}, "file:1 why")
