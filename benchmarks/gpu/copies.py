"""Upper bounds for all data movement: copies by a graph's memcpy node, on the stream, and by
kernels of torch and rota.

    PYTHONPATH=python:benchmarks python3 -m gpu.copies --sizes 1M,64M,1G

A size is the source's; the copy reads and writes twice as many bytes in all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import rota
from arguments import FLOAT32_BYTES
from gpu import bench
from gpu.bench import Bench, check_copy
from gpu.timing import Body, Job
from protocol import Entry


def benchmark(bench: Bench) -> None:
    """Measures each size and kind of copy."""
    for num_bytes in bench.sizes:
        jobs = bench.attempt("copy", partial(bench.copy_job, 2 * num_bytes))
        jobs += [
            replace(
                job, entry=replace(job.entry, label="the same copy, on the stream"), in_graph=False
            )
            for job in jobs
        ]
        jobs += bench.attempt("torch's kernel", partial(kernel_job, bench, num_bytes))
        jobs += bench.attempt("rota pack", partial(pack_job, bench, num_bytes))
        bench.measure(jobs, "copy", num_bytes)
        del jobs  # the next size needs the memory


def buffers(bench: Bench, num_bytes: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tensors to copy between."""
    num_elems = num_bytes // FLOAT32_BYTES
    return [
        (bench.random(num_elems, 2 * seed), bench.random(num_elems, 2 * seed + 1))
        for seed in range(bench.num_sets(2 * num_bytes))
    ]


def kernel_job(bench: Bench, num_bytes: int) -> Job:
    """torch's elementwise kernel; copy_ between tensors of one dtype would be a memcpy."""
    pairs = buffers(bench, num_bytes)
    calls: list[Body] = [partial(torch.add, source, 0, out=copied) for source, copied in pairs]
    check = partial(check_copy, *pairs[0], calls[0])
    return Job(Entry("torch.add(source, 0, out=)", "torch", "add"), calls, 2 * num_bytes, check)


def pack_job(bench: Bench, num_bytes: int) -> Job:
    """rota's pack to float32, which is an exact copy."""
    sources = [source for source, _ in buffers(bench, num_bytes)]
    buckets = [rota.GradientBucket([source], wire_dtype=torch.float32) for source in sources]
    wire = buckets[0].wire[:num_bytes].view(torch.float32)
    check = partial(check_copy, sources[0], wire, buckets[0].pack)
    entry = Entry("rota pack to float32", "rota", "GradientBucket")
    return Job(entry, [bucket.pack for bucket in buckets], 2 * num_bytes, check)


if __name__ == "__main__":
    bench.main("copies", __doc__, benchmark, "1M,16M,64M,256M,1G", "4K,64K")
