"""benchmarks/pipeline_replay.py: what a pipeline's step takes when messages take no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from pipeline_replay import Computation, seconds_without_communication


def computations(*named: str) -> list[Computation]:
    """From names such as "F0": forward computations take 1 s, backward ones 2 s."""
    return [Computation(n[0] == "F", int(n[1]), 1.0 if n[0] == "F" else 2.0) for n in named]


def test_step_takes_its_longest_chain_of_computations() -> None:
    first = computations("F0", "F1", "B0", "B1")
    last = computations("F0", "B0", "F1", "B1")
    # The last stage begins at 1 s and never waits; its last result comes at 7 s.
    assert seconds_without_communication([first, last]) == 9.0
    assert seconds_without_communication([first]) == 6.0


def test_stages_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        seconds_without_communication([computations("B0", "F0"), computations("F0", "B0")])
