"""Small all-reduces in a CUDA graph: from the launch of one to its completion.

    PYTHONPATH=python:benchmarks python3 -m gpu.latency --sizes 8,8K

A graph holds many, each of which starts when the one before it is complete, on the same tensors; a
time is that of a replay over their number. The entry "fork and join" is what a graph needs to start
a copy of a few bytes on each of as many streams and to wait for all, which every all-reduce between
local ranks does too. The last line of the output is JSON.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from arguments import FLOAT32_BYTES
from gpu import frame
from gpu.frame import Bench, Job
from gpu.local_all_reduce import groups, make_job
from protocol import Entry

ALGORITHMS = ("auto", "low_latency", "one_shot")


def benchmark(bench: Bench) -> None:
    """Every number of ranks, every size."""
    for num_ranks, group in groups(bench):
        for num_bytes in bench.sizes:
            num_elems = max(1, num_bytes // FLOAT32_BYTES)
            tensors = [bench.random(num_elems, rank) for rank in range(num_ranks)]
            jobs = [fork_and_join(bench, num_ranks)]
            for algorithm in ALGORITHMS:
                jobs.append(make_job(bench, group, algorithm, [tensors], moved_bytes=0))
            bench.measure(jobs, "all_reduce, one after another", num_bytes, ranks=num_ranks)


def fork_and_join(bench: Bench, num_ranks: int) -> Job:
    """A copy of 16 bytes on each of `num_ranks` streams, started and awaited by the current one."""
    pairs = [(bench.random(4, rank), bench.random(4, rank + 50)) for rank in range(num_ranks)]
    is_cuda = bench.target.device.type == "cuda"
    streams = [torch.cuda.Stream() for _ in pairs] if is_cuda else []

    def on_streams() -> None:
        current = torch.cuda.current_stream()
        for stream, (source, copied) in zip(streams, pairs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                copied.copy_(source)
        for stream in streams:
            current.wait_stream(stream)

    def in_turn() -> None:
        for source, copied in pairs:
            copied.copy_(source)

    call = partial(on_streams if is_cuda else in_turn)
    entry = Entry("fork and join", "torch", "Tensor.copy_")
    return Job(entry, [call], moved_bytes=0)


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "8,1K,4K,8K,16K,64K", "8,1K")
    return frame.main("latency", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
