"""Constants of the cost model: the cost of a graph's node, and the latency of a flag.

    PYTHONPATH=python:benchmarks python3 -m gpu.micro

The gap between nodes is the time of a chain of tiny kernels divided by their number, with and
without events awaited and recorded in between, as rota orders its streams. A flag's latency is the
slope of the time of `ring` on a few bytes over its number of steps: each step is one message and
one wait for its flag.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

import rota
from gpu import bench
from gpu.bench import Bench
from gpu.local_all_reduce import make_job, make_sets, tiny_copy
from gpu.timing import Job
from protocol import Entry

RING_RANKS = (2, 3, 4, 6, 8)


def benchmark(bench: Bench) -> None:
    """Measures nodes, then flags."""
    source, copied = bench.random(4, 0), bench.random(4, 1)
    event = torch.cuda.Event(external=True)
    kernel = partial(torch.add, source, 0, out=copied)

    def kernel_and_event() -> None:
        torch.cuda.current_stream().wait_event(event)
        kernel()
        event.record()

    jobs = [
        tiny_copy(bench),
        Job(Entry("tiny kernel", "torch", "add"), [kernel]),
        Job(
            Entry("tiny kernel, an event awaited and recorded", "torch", "add"), [kernel_and_event]
        ),
        Job(Entry("tiny kernel on the stream", "torch", "add"), [kernel], in_graph=False),
    ]
    bench.measure(jobs, "node of a graph", 16)
    jobs = []
    for num_ranks in RING_RANKS:
        (num_bytes,) = bench.sizes
        sets = make_sets(bench, num_ranks, num_bytes, num_sets=1)
        group = rota.LocalGroup(num_ranks, bench.device, num_channels=1)
        label = f"ring, {num_ranks} ranks"
        jobs += bench.attempt(label, partial(make_job, bench, "ring", sets, 0, group, label))
    bench.measure(jobs, "ring of one channel", num_bytes)
    times_us = {row["label"]: row["p50_us"] for row in bench.rows if not row.get("num_wrong")}
    steps, steps_us = [], []
    for num_ranks in RING_RANKS:
        if (label := f"ring, {num_ranks} ranks") in times_us:
            steps.append(2 * (num_ranks - 1))
            steps_us.append(times_us[label])
    if len(steps) > 1:
        slope_us, start_us = np.polyfit(steps, steps_us, 1)
        for label, us in (("one message and its flag", slope_us), ("a ring's start", start_us)):
            bench.keep({"label": label, "op": "slope of ring over steps", "p50_us": round(us, 3)})


if __name__ == "__main__":
    bench.main("micro", __doc__, benchmark, "64", "64")
