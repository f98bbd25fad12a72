"""Small all-reduces in a CUDA graph: from the launch of one to its completion.

    PYTHONPATH=python:benchmarks python3 -m gpu.latency --sizes 8,8K

A graph holds many, each of which starts when the one before it is complete, on the same tensors; a
time is that of a replay over their number. The entry "copy of 16 bytes" is what a graph needs to
start the least there is, and to wait for it. The last line of the output is JSON.
"""

from __future__ import annotations

import sys
from functools import partial

from arguments import FLOAT32_BYTES
from gpu import frame
from gpu.frame import Bench, Job
from gpu.local_all_reduce import RANKS, make_job
from protocol import Entry

ALGORITHMS = ("auto", "low_latency", "one_shot")


def benchmark(bench: Bench) -> None:
    """Every number of ranks, every size."""
    for num_ranks in RANKS:
        for num_bytes in bench.sizes:
            num_elems = max(1, num_bytes // FLOAT32_BYTES)
            tensors = [bench.random(num_elems, rank) for rank in range(num_ranks)]
            jobs = [copy_job(bench)]
            for algorithm in ALGORITHMS:
                make = partial(make_job, bench, algorithm, [tensors], moved_bytes=0)
                jobs += bench.attempt(f"{algorithm}, {num_ranks} ranks", make)
            bench.measure(jobs, "all_reduce, one after another", num_bytes, ranks=num_ranks)


def copy_job(bench: Bench) -> Job:
    """A copy of 16 bytes."""
    source, copied = bench.random(4, 0), bench.random(4, 1)
    entry = Entry("copy of 16 bytes", "torch", "Tensor.copy_")
    return Job(entry, [partial(copied.copy_, source)], moved_bytes=0)


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "8,1K,4K,8K,16K,64K", "8,1K")
    return frame.main("latency", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
