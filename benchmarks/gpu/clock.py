"""What times are taken from: CUDA events on a GPU, the host's clock where nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

import torch


class Clock(Protocol):
    """Takes times of work that is queued on the current stream."""

    name: str

    def sample_us(self, body: Callable[[], object], num_samples: int) -> list[float]:
        """Runs `body` so many times, one after the other; the time of each in µs."""


class CudaEvents:
    """What the GPU says: from when it comes to `body`'s work to when that is done."""

    name = "CUDA events"

    def sample_us(self, body: Callable[[], object], num_samples: int) -> list[float]:
        """All samples are queued before the first is read, so that the GPU does not run dry."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(num_samples)
        ]
        for start, end in events:
            start.record()
            body()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


class HostClock:
    """For dry runs: fills the tables with numbers that say nothing of a GPU."""

    name = "host clock, no measurement"

    def sample_us(self, body: Callable[[], object], num_samples: int) -> list[float]:
        """The time that the calls took on the host."""
        times_us = []
        for _ in range(num_samples):
            start_ns = perf_counter_ns()
            body()
            times_us.append((perf_counter_ns() - start_ns) / 1e3)
        return times_us
