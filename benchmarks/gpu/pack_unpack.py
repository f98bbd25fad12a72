"""Gradients to the wire format and back, one launch each, compared with a copy and with torch.

A size is that of the float32 gradients. Bytes are those of the gradients and the wire buffer,
whatever an entry actually moves, so that TB/s of entries with the same wire dtype are comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from arguments import FLOAT32_BYTES
from error_bound import Wire, rota_wire
from gpu import bench, gradients
from gpu.bench import Bench
from gpu.timing import Body, Job
from protocol import Entry
from rota.gpu import GradientBucket

# Label, wire dtype, whether blocks are scaled.
FORMATS = (
    ("float16 scaled", torch.float16, True),
    ("float16", torch.float16, False),
    ("bfloat16", torch.bfloat16, False),
    ("float8_e4m3fn scaled", torch.float8_e4m3fn, True),
    ("float8_e5m2 scaled", torch.float8_e5m2, True),
    ("float32", torch.float32, False),
)
LOSS_SCALE = 1024.0
DIVISOR = 2.0  # torch's hook divides by world_size


def benchmark(bench: Bench) -> None:
    for num_bytes in bench.sizes:
        for shape, num_tensors in gradients.shapes(bench).items():
            measure(bench, num_bytes, shape, num_tensors)


def measure(
    bench: Bench,
    num_bytes: int,
    shape: str,
    num_tensors: int,
    formats: Sequence[tuple[str, torch.dtype, bool]] = FORMATS,
) -> None:
    """All entries at one size and shape; they share the gradients."""
    moved_bytes = num_bytes + num_bytes // 2
    sets = [
        gradients.make(bench, num_bytes, num_tensors, seed)
        for seed in range(bench.num_sets(moved_bytes))
    ]
    packs = bench.attempt("copy", partial(bench.copy_job, moved_bytes))
    unpacks = list(packs)
    made = [bench.attempt(one[0], partial(rota_jobs, sets, *one)) for one in formats]
    made.append(bench.attempt("torch", partial(torch_jobs, sets)))
    for jobs in made:
        packs += [pack for pack, _ in jobs]
        unpacks += [unpack for _, unpack in jobs]
    bench.measure(packs, "pack", num_bytes, shape=shape)
    bench.measure(unpacks, "unpack", num_bytes, shape=shape)


def rota_jobs(
    sets: list[tuple[Tensor, list[Tensor]]], label: str, wire_dtype: torch.dtype, is_scaled: bool
) -> tuple[Job, Job]:
    buckets = [
        GradientBucket(views, wire_dtype=wire_dtype, block_scaling=is_scaled) for _, views in sets
    ]
    for bucket in buckets:
        bucket.pack()  # the input of unpack
    moved_bytes = buckets[0].num_bytes + buckets[0].num_wire_bytes
    check = partial(both_ways, buckets[0], *sets[0], rota_wire(wire_dtype, is_scaled))
    entry = Entry(f"rota {label}", "rota", "GradientBucket", wire_dtype=label)
    calls: tuple[list[Body], list[Body]] = (
        [bucket.pack for bucket in buckets],
        [bucket.unpack for bucket in buckets],
    )
    return Job(entry, calls[0], moved_bytes, check), Job(entry, calls[1], moved_bytes, check)


def both_ways(bucket: GradientBucket, flat: Tensor, views: list[Tensor], wire: Wire) -> int:
    """Counts wrong elements after pack and unpack with factors; then restores and packs again."""
    flat.normal_()
    saved = flat.clone()
    bucket.wire.fill_(255)  # NaN in every format
    bucket.pack(contribution_factor=LOSS_SCALE)
    flat.fill_(torch.nan)
    bucket.unpack(result_factor=1 / LOSS_SCALE)
    originals = saved.split([view.numel() for view in views])
    num_wrong = sum(
        gradients.num_wrong(view, [original], gradients.one_way(wire))
        for view, original in zip(views, originals, strict=True)
    )
    num_non_finite, sum_of_squares = bucket.stats.tolist()
    squares = float(flat.double().square().sum())
    num_wrong += num_non_finite != 0 or not math.isclose(sum_of_squares, squares, rel_tol=1e-9)
    flat.copy_(saved)
    bucket.pack()
    return num_wrong


def torch_jobs(sets: list[tuple[Tensor, list[Tensor]]]) -> tuple[Job, Job]:
    """The work of torch's fp16_compress_hook around its all-reduce, on every tensor of a list."""
    pairs = [(views, [view.to(torch.float16) for view in views]) for _, views in sets]

    def pack(views: list[Tensor], halves: list[Tensor]) -> None:
        torch._foreach_copy_(halves, views)
        torch._foreach_div_(halves, DIVISOR)

    moved_bytes = sets[0][0].numel() * (FLOAT32_BYTES + 2)
    entry = Entry("torch foreach: copy, divide", "torch", "_foreach_copy_")
    unpacks: list[Body] = [partial(torch._foreach_copy_, *pair) for pair in pairs]
    return (
        Job(entry, [partial(pack, *pair) for pair in pairs], moved_bytes),
        Job(replace(entry, label="torch foreach: copy"), unpacks, moved_bytes),
    )


if __name__ == "__main__":
    bench.main("pack_unpack", __doc__, benchmark, "64M,256M", "64K")
