"""Times calls on a GPU: CUDA graphs over rotating buffers, replayed between events.

Not a library's, since torch.utils.benchmark reads the host's clock, and
triton.testing.do_bench_cudagraph repeats a call on one set of buffers, which stays in the L2 cache
if it fits, and captures it again each time, so entries cannot take turns to share clock changes.
Here a sample replays a graph of many calls on sets of buffers that together exceed the L2 cache
four times. Calls that cannot be captured run on the stream; `timed` says which was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from arguments import FLOAT32_BYTES
from interleave import Measurement
from protocol import Entry

Body = Callable[[], object]

# Shortest sample: events resolve 0.5 µs, and a graph takes several µs to start.
MIN_SAMPLE_US = 2000.0
MAX_CALLS = 256  # in one graph
MAX_SETS = 64  # of buffers, in rotation
L2_TIMES = 4  # all sets together exceed the L2 cache this many times
MAX_TURN_US = 3e5


@dataclass(frozen=True)
class Job:
    """One entry at one size.

    Args:
        calls: one call for each set of buffers.
        moved_bytes: bytes that one call reads and writes, calculated; 0 where they do not matter.
        check: runs the call on known data, restores the set, and returns the wrong elements.
        in_graph: False to time the calls on the stream.
        may_be_refused: whether a ValueError means that rota does not support this size.
    """

    entry: Entry
    calls: Sequence[Body]
    moved_bytes: int = 0
    check: Callable[[], int] | None = None
    in_graph: bool = True
    may_be_refused: bool = False


def num_sets(touched_bytes: int, is_small: bool) -> int:
    """Sets of buffers to rotate through, for a call that touches `touched_bytes`."""
    l2_bytes = 0 if is_small else torch.cuda.get_device_properties().L2_cache_size
    return min(max(2, -(-L2_TIMES * l2_bytes // max(touched_bytes, 1))), MAX_SETS)


def capture(body: Body) -> Body:
    """Records `body` as a graph and returns its replay."""
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process, such as NCCL's, may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    replay: Body = graph.replay
    return replay


def sample_us(body: Body, num_samples: int) -> list[float]:
    """Queues every sample before it reads the first, so that the GPU does not run dry."""
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


class Sampler:
    """A job that has been checked, warmed up and captured, and its measurements."""

    def __init__(self, job: Job, op: str, num_bytes: int, is_small: bool) -> None:
        self.job = job
        self.timed = "stream"
        self.spans: list[tuple[float, float]] = []  # when it ran, by time.monotonic()
        self._is_small = is_small
        num_wrong = job.check() if job.check is not None else None

        def rotate() -> None:
            for call in job.calls:
                call()

        rotate()
        torch.cuda.synchronize()
        trial_us = max(min(sample_us(rotate, 1 if is_small else 3)), 0.1)
        num_rotations = 1 if is_small else math.ceil(MIN_SAMPLE_US / trial_us)
        num_rotations = max(1, min(num_rotations, MAX_CALLS // len(job.calls)))

        def sample() -> None:
            for _ in range(num_rotations):
                rotate()

        self._run: Body = sample
        if job.in_graph:
            try:
                self._run = capture(sample)
                self.timed = "graph"
            except Exception as error:
                self.timed = f"stream: {type(error).__name__} in a capture"
                torch.cuda.synchronize()
        self._run()
        torch.cuda.synchronize()
        self._max_samples = max(2, int(MAX_TURN_US / (trial_us * num_rotations)))
        self.measurement = Measurement(
            job.entry,
            op,
            num_bytes // FLOAT32_BYTES,
            num_bytes,
            batch=num_rotations * len(job.calls),
            num_wrong=num_wrong,
        )

    def take_turn(self) -> None:
        begin = monotonic()
        times_us = sample_us(self._run, min(2 if self._is_small else 10, self._max_samples))
        self.spans.append((begin, monotonic()))
        self.measurement.times_us += [time_us / self.measurement.batch for time_us in times_us]

    def check_again(self) -> None:
        """Checks again after all turns, since replays must not have broken anything."""
        if self.job.check is not None:
            self.measurement.num_wrong = (self.measurement.num_wrong or 0) + self.job.check()
