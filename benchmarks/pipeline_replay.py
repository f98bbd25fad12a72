"""Replays a pipeline's step from the times of its computations, with messages that take no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Computation(NamedTuple):
    """One computation of a stage, and the code before it that neither computes nor communicates."""

    is_forward: bool
    microbatch: int
    seconds: float
    before_seconds: float = 0.0


class Step(NamedTuple):
    """One stage's step: its computations in the order in which it runs them, and what follows."""

    computations: Sequence[Computation]
    after_seconds: float = 0.0


def seconds_without_communication(stages: Sequence[Step]) -> float:
    """How long a step takes if messages take no time.

    A forward computation needs that of the stage before, a backward one that of the stage after.
    """
    ended: dict[tuple[int, bool, int], float] = {}
    remaining = [deque(step.computations) for step in stages]
    free_at = [0.0] * len(stages)
    while any(remaining):
        num_before = len(ended)
        for stage, computations in enumerate(remaining):
            while computations:
                is_forward, microbatch, seconds, before_seconds = computations[0]
                source = stage - 1 if is_forward else stage + 1
                needed = (source, is_forward, microbatch)
                if 0 <= source < len(stages) and needed not in ended:
                    break
                ready_at = free_at[stage] + before_seconds
                free_at[stage] = max(ready_at, ended.get(needed, 0.0)) + seconds
                ended[stage, is_forward, microbatch] = free_at[stage]
                computations.popleft()
        if len(ended) == num_before:
            raise ValueError(f"stages wait for each other: {stages}")
    return max(free + step.after_seconds for free, step in zip(free_at, stages, strict=True))
