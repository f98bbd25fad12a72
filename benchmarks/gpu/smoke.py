"""A few rates of one GPU in seconds: enough to see whether they are as expected.

The other benchmarks here measure more, and longer.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from gpu import bench, hops, pack_unpack
from gpu.bench import LOCAL_RANKS, Bench
from gpu.local_ranks import make_job, make_sets
from gpu.timing import Job
from protocol import Entry
from rota import _C
from rota.communicator import DEFAULT_SLOT_BYTES

NUM_RANKS = 2
SHORT_BYTES = 8 << 10
FORMATS = [
    one for one in pack_unpack.FORMATS if one[0] in ("float16 scaled", "float8_e4m3fn scaled")
]


def benchmark(bench: Bench) -> None:
    """Gradients to the wire and back, all-reduces of local ranks, and a bucket of one rank."""
    (num_bytes,) = bench.sizes
    pack_unpack.measure(bench, num_bytes, "1 tensor", 1, FORMATS)
    bench.measure(bench.attempt("reduce_bucket", partial(bucket_job, bench)), "bucket", num_bytes)
    bench.mode = LOCAL_RANKS
    moved_bytes = 2 * NUM_RANKS * num_bytes
    jobs = bench.attempt("copy", partial(bench.copy_job, moved_bytes))
    sets = make_sets(bench, NUM_RANKS, num_bytes)
    jobs += bench.attempt("all_reduce", partial(make_job, bench, "auto", sets, moved_bytes))
    bench.measure(jobs, "all_reduce", num_bytes, ranks=NUM_RANKS)
    # "auto" would be a kernel in which no rank waits for another.
    sets = make_sets(bench, NUM_RANKS, SHORT_BYTES, num_sets=1)
    jobs = bench.attempt("low_latency", partial(make_job, bench, hops.LOW_LATENCY, sets))
    bench.measure(jobs, hops.OP, SHORT_BYTES, ranks=NUM_RANKS)


def bucket_job(bench: Bench) -> Job:
    """With one rank: pack, round, unpack, measure."""
    store, timeout = dist.HashStore(), timedelta(seconds=30)
    comm = _C.Communicator(store, 0, 1, timeout, DEFAULT_SLOT_BYTES)
    bucket = bench.random(bench.sizes[0] // 4, seed=0)
    stats = torch.empty(2, dtype=torch.float64, device=bench.device).zero_()
    call = partial(comm.reduce_bucket, bucket, stats, wire_dtype=torch.float16, block_scaling=True)
    return Job(Entry("rota float16 scaled", "rota", "Communicator.reduce_bucket"), [call])


if __name__ == "__main__":
    bench.main("smoke", __doc__, benchmark, "64M", "64K")
