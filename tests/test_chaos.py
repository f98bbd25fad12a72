"""The first programs of `make chaos`."""

from __future__ import annotations

import pytest

import chaos

TRIALS_OF_A_TEST = 20


@pytest.mark.parametrize("first_seed", range(1, 81, TRIALS_OF_A_TEST))
def test_random_programs_end_right_or_with_an_error(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + TRIALS_OF_A_TEST):
        chaos.run_trial(seed)
