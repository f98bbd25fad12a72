"""benchmarks/pipeline_replay.py: what a pipeline's step takes when messages take no time."""

from __future__ import annotations

import pytest

from pipeline_replay import Computation, Step, seconds_without_communication


def step(*names: str, before: float = 0.0, after: float = 0.0) -> Step:
    """Makes a step of computations such as "F0": forward ones take 1 s, backward ones 2 s."""
    seconds = {"F": 1.0, "B": 2.0}
    computations = [Computation(n[0] == "F", int(n[1]), seconds[n[0]], before) for n in names]
    return Step(computations, after)


def test_step_takes_its_longest_chain_of_computations() -> None:
    first = step("F0", "F1", "B0", "B1")
    last = step("F0", "B0", "F1", "B1")
    # The last stage begins at 1 s and never waits; its last result comes at 7 s.
    assert seconds_without_communication([first, last]) == 9.0
    assert seconds_without_communication([first]) == 6.0


def test_other_code_runs_while_a_stage_waits_but_not_while_it_computes() -> None:
    first = step("F0", "B0")
    last = step("F0", "B0", before=0.5, after=0.25)
    # 1 s, then 1 s after a preparation that has run meanwhile, then 0.5 and 2 s, then 2 s.
    assert seconds_without_communication([first, last]) == 6.5
    assert seconds_without_communication([first, last._replace(after_seconds=4.0)]) == 8.5


def test_stages_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        seconds_without_communication([step("B0", "F0"), step("F0", "B0")])
