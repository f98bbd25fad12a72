"""The latency of a hop: a message from one rank to another that waits for its flag.

A graph runs many all-reduces on the same few bytes, each after the one before; a time is that of
a replay divided by their number, so it includes the gap between two nodes of a graph.

- ring in one channel has 2·(N - 1) steps, each one message and one wait: a hop is the slope of its
  time over the number of steps.
- low_latency has one hop, whose packets are their own flags: it is what low_latency takes more than
  two_shot_in_place, a kernel of local ranks that does the same sums and waits for nobody.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from gpu import bench
from gpu.bench import Bench
from gpu.local_ranks import WAITS_FOR_NOBODY, make_job, make_sets, tiny_copy
from rota.gpu import LocalGroup

RANKS = (2, 3, 4, 6, 8)
OP = "all_reduce, one after another"
LOW_LATENCY, RING = "low_latency", "ring"


def benchmark(bench: Bench) -> None:
    """Measures every number of ranks and size, then calculates the hops."""
    times_us: dict[tuple[str, int, int], float] = {}
    for num_bytes, num_ranks in product(bench.sizes, RANKS[:2] if bench.is_small else RANKS):
        sets = make_sets(bench, num_ranks, num_bytes, num_sets=1)
        jobs = [tiny_copy(bench)]
        for algorithm, num_channels in ((WAITS_FOR_NOBODY, None), (LOW_LATENCY, None), (RING, 1)):
            group = LocalGroup(num_ranks, bench.device, num_channels=num_channels)
            make = partial(make_job, bench, algorithm, sets, group=group)
            jobs += bench.attempt(f"{algorithm}, {num_ranks} ranks", make)
        begin = len(bench.rows)
        bench.measure(jobs, OP, num_bytes, ranks=num_ranks)
        for row in bench.rows[begin:]:
            if row["label"] == f"rota {row['algorithm']}" and not row["num_wrong"]:
                times_us[row["algorithm"], num_bytes, num_ranks] = row["p50_us"]
    for num_bytes in bench.sizes:
        keep_hops(bench, num_bytes, times_us)


def keep_hops(bench: Bench, num_bytes: int, times_us: dict[tuple[str, int, int], float]) -> None:
    """Records what a hop takes, from the times by algorithm, size and ranks."""

    def keep(label: str, us: float, **more: int) -> None:
        row = {"label": label, "op": "hop", "num_bytes": num_bytes, "p50_us": round(us, 3)}
        bench.keep(row | more)

    at_size = {key: us for key, us in times_us.items() if key[1] == num_bytes}
    rings = {2 * (ranks - 1): us for (name, _, ranks), us in at_size.items() if name == RING}
    if len(rings) > 1:
        slope_us, _ = np.polyfit(list(rings), list(rings.values()), 1)
        keep("ring, one step", float(slope_us))
    for (name, _, ranks), us in at_size.items():
        without = at_size.get((WAITS_FOR_NOBODY, num_bytes, ranks))
        if name == LOW_LATENCY and without is not None:
            keep("low_latency less a kernel that does not wait", us - without, ranks=ranks)


if __name__ == "__main__":
    bench.main("hops", __doc__, benchmark, "64,1K,8K", "64", bench.LOCAL_RANKS)
