"""Gradients to the wire format and back, one launch each, beside a copy and torch's own ways.

    PYTHONPATH=python:benchmarks python3 -m gpu.pack_unpack --sizes 64M,256M

A size is that of the float32 gradients. Bytes are those of the gradients and of the wire, whatever
an entry really moves, so TB/s can be compared between entries of a wire dtype. torch's hook casts,
then divides in place, and copies back; its foreach functions do so to every tensor of a list. The
last line of the output is JSON.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from arguments import FLOAT32_BYTES
from error_bound import Wire, rota_wire
from gpu import frame, gradients
from gpu.frame import Bench, Job, first_line
from gpu.gradients import SHAPES, Snapshot
from gpu.target import Body, GradientBucket
from protocol import Entry

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
    """Every size and shape of the list."""
    for num_bytes in bench.sizes:
        for shape, num_tensors in SHAPES.items():
            measure(bench, num_bytes, shape, num_tensors)
    # Last, since a profiler may slow down what comes after it.
    for shape, num_tensors in SHAPES.items():
        count_launches(bench, bench.sizes[0], shape, num_tensors)


def measure(bench: Bench, num_bytes: int, shape: str, num_tensors: int) -> None:
    """All entries at one size and shape."""
    num_elems = num_bytes // FLOAT32_BYTES
    # All entries share the gradients of a set: pack reads them, and what unpack writes is random.
    sets = [
        gradients.make(bench, num_elems, num_tensors, seed)
        for seed in range(bench.num_sets(num_bytes + num_bytes // 2))
    ]
    saved = Snapshot(bench, sets[0])
    copy = bench.attempt("copy", lambda: bench.copy_job(num_bytes + num_bytes // 2))
    packs, unpacks = list(copy), list(copy)
    for label, wire_dtype, is_scaled in FORMATS:
        try:
            buckets = [
                bench.target.gradient_bucket(tensors, wire_dtype, is_scaled) for tensors in sets
            ]
            for bucket in buckets:
                bucket.pack()  # what unpack starts from
            moved_bytes = buckets[0].num_bytes + buckets[0].num_wire_bytes
            wire = rota_wire(wire_dtype, is_scaled)
            check = partial(both_ways, bench, buckets[0], sets[0], saved, wire)
            entry = Entry(f"rota {label}", "rota", "GradientBucket", wire_dtype=label)
            packs.append(Job(entry, [one.pack for one in buckets], moved_bytes, check))
            unpacks.append(Job(entry, [one.unpack for one in buckets], moved_bytes, check))
        except Exception as error:
            bench.fail(f"{label}, {shape}", error)
    if bench.target.runs_torch_kernels:
        make_peers = hook_jobs if num_tensors == 1 else foreach_jobs
        try:
            torchs_pack, torchs_unpack = make_peers(sets)
            packs.append(torchs_pack)
            unpacks.append(torchs_unpack)
        except Exception as error:
            bench.fail(f"torch, {shape}", error)
    bench.measure(packs, "pack", num_bytes, shape=shape)
    bench.measure(unpacks, "unpack", num_bytes, shape=shape)


def both_ways(
    bench: Bench,
    bucket: GradientBucket,
    tensors: list[Tensor],
    saved: Snapshot,
    wire: Wire,
) -> int:
    """Elements that are wrong after pack and unpack, with a factor each way; then the gradients
    are as they were, and packed."""
    saved.restore()
    gradients.poison(bench, [bucket.wire])
    bucket.pack(contribution_factor=LOSS_SCALE)
    gradients.poison(bench, tensors)
    bucket.unpack(result_factor=1 / LOSS_SCALE)
    bench.target.synchronize()
    num_wrong = saved.num_wrong(wire) + saved.stats_wrong(bucket.stats)
    saved.restore()
    bucket.pack()
    return num_wrong


def count_launches(bench: Bench, num_bytes: int, shape: str, num_tensors: int) -> None:
    """A row for each format and way: how many kernels one call launches."""
    tensors = gradients.make(bench, num_bytes // FLOAT32_BYTES, num_tensors, seed=0)
    for label, wire_dtype, is_scaled in FORMATS:
        try:
            bucket = bench.target.gradient_bucket(tensors, wire_dtype, is_scaled)
            calls: dict[str, Body] = {"pack": bucket.pack, "unpack": bucket.unpack}
            for op, call in calls.items():
                call()
                row = {"label": f"rota {label}", "backend": "rota", "op": op, "shape": shape}
                launches = bench.target.num_launches(call)
                bench.add_row({**row, "num_bytes": num_bytes, "launches": launches})
        except Exception as error:
            bench.note(f"{label}, {shape}: launches were not counted: {first_line(error)}")


def hook_jobs(sets: list[list[Tensor]]) -> tuple[Job, Job]:
    """What torch's fp16_compress_hook does before and after its all-reduce."""
    flats = [tensors[0] for tensors in sets]
    halves = [flat.to(torch.float16) for flat in flats]

    def compress(flat: Tensor) -> Tensor:
        return flat.to(torch.float16).div_(DIVISOR)

    def decompress(flat: Tensor, half: Tensor) -> Tensor:
        return flat.copy_(half)

    moved_bytes = flats[0].numel() * (4 + 2)
    return (
        Job(
            Entry("torch fp16 hook: to, div_", "torch", "fp16_compress_hook"),
            [partial(compress, flat) for flat in flats],
            moved_bytes,
        ),
        Job(
            Entry("torch fp16 hook: copy_", "torch", "fp16_compress_hook"),
            [partial(decompress, *pair) for pair in zip(flats, halves, strict=True)],
            moved_bytes,
        ),
    )


def foreach_jobs(sets: list[list[Tensor]]) -> tuple[Job, Job]:
    """The same to a list of tensors."""
    halves = [[tensor.to(torch.float16) for tensor in tensors] for tensors in sets]

    def compress(tensors: list[Tensor], half: list[Tensor]) -> None:
        torch._foreach_copy_(half, tensors)
        torch._foreach_div_(half, DIVISOR)

    def decompress(tensors: list[Tensor], half: list[Tensor]) -> None:
        torch._foreach_copy_(tensors, half)

    moved_bytes = sum(tensor.numel() for tensor in sets[0]) * (4 + 2)
    pairs = list(zip(sets, halves, strict=True))
    return (
        Job(
            Entry("torch _foreach_copy_, _foreach_div_", "torch", "_foreach_copy_"),
            [partial(compress, *pair) for pair in pairs],
            moved_bytes,
        ),
        Job(
            Entry("torch _foreach_copy_", "torch", "_foreach_copy_"),
            [partial(decompress, *pair) for pair in pairs],
            moved_bytes,
        ),
    )


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "64M,256M", "64K")
    return frame.main("pack_unpack", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
