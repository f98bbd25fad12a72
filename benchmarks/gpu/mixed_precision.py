"""A mixed-precision step's work on a bucket: rota's pack and unpack beside torch's sequence.

    PYTHONPATH=python:benchmarks python3 -m gpu.mixed_precision --sizes 64M,256M

What a step does between backward and the optimizer's update: to the wire format and back, unscale
and look for Inf, norm, clip. torch's sequence is that of fp16_compress_hook, GradScaler.unscale_
and clip_grad_norm_, kernel by kernel. A size is that of the float32 gradients in DDP's flat bucket,
of which the parameters' gradients are views.

- One rank: nothing is reduced, on either side.
- Two local ranks: both sides reduce float16 with rota.LocalGroup.
- Through the hooks: one rank again, as a training loop calls them, host and all, in one bucket.

rota leaves the factor of clipping to the optimizer, which reads the gradients anyway; "clip in
place" makes a pass of its own for it, as torch does. The scale and the factor are 1 here, which
costs the same and leaves the data as they are. Nobody reads the result on the host except through
the hooks. Ratios are of times for the same gradients; TB/s are of what each entry's passes move.
The last line of the output is JSON.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import amp_turn
import error_bound
import traffic
from arguments import FLOAT32_BYTES
from gpu import frame, gradients
from gpu.frame import Bench, Job
from gpu.gradients import CHECKED_ELEMS, SHAPES, TILE_ELEMS
from gpu.target import Body, LocalGroup
from protocol import Entry, Turn

ROTA = "rota pack, unpack"
ROTA_IN_PLACE = "rota pack, unpack, clip in place"
ROTA_LIST = "rota pack, unpack of the list"
ROTA_BUCKET = "rota reduce_bucket"
TORCH = "torch hook, unscale, clip"
MAX_NORM = 1e9  # never reached: the factor is 1
WIRE = torch.float16
WIRE_BYTES = WIRE.itemsize
# Read and written for each element on one rank: in and out; by torch's hook, unscale_ and clipping.
FUSED_BYTES = 2 * (FLOAT32_BYTES + WIRE_BYTES)
TORCH_BYTES = traffic.torch_hook(WIRE_BYTES, all_reduce=0) + traffic.TORCH_AMP

# Of an entry through the hooks: its label, what amp_turn calls it.
HOOKS = (
    ("rota fused_hook, amp, clip", "rota", amp_turn.FUSED),
    ("rota fused_hook, amp, clip in place", "rota", amp_turn.FUSED_IN_PLACE),
    ("rota fp16 hook, torch amp, clip", "rota", amp_turn.ROTA_HOOK_TORCH_AMP),
    ("torch fp16 hook, torch amp, clip", "torch", amp_turn.TORCH_AMP),
)

Bound = Callable[[list[Tensor]], Tensor]


@dataclass
class Bucket:
    """DDP's bucket of one rank, and what torch's sequence needs beside it."""

    flat: Tensor
    gradients: list[Tensor]  # views of it
    parameters: list[torch.nn.Parameter]
    found_inf: Tensor
    inverse_scale: Tensor


def make_bucket(bench: Bench, num_bytes: int, num_tensors: int, seed: int) -> Bucket:
    """Normal numbers."""
    num_elems = num_bytes // FLOAT32_BYTES
    flat = bench.random(num_elems, seed)
    sizes = gradients.mixed_sizes(num_elems, num_tensors) if num_tensors > 1 else [num_elems]
    views = list(flat.split(sizes))
    parameters = [torch.nn.Parameter(view.detach()) for view in views]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    numbers = torch.tensor([0.0, 1.0]).to(flat.device)
    return Bucket(flat, views, parameters, numbers[:1], numbers[1:])


def benchmark(bench: Bench) -> None:
    """Every size, with few and with many parameters."""
    with tempfile.TemporaryDirectory(prefix="rota-gpu-") as folder:
        communicator = make_communicator(bench, Path(folder) / "store")
        try:
            for num_bytes in bench.sizes:
                for shape, num_tensors in SHAPES.items():
                    alone(bench, num_bytes, shape, num_tensors, communicator)
                    in_pairs(bench, num_bytes, shape, num_tensors)
            # Last, with all that DDP's hooks and NCCL bring: no figure is made of it.
            for num_bytes in bench.sizes:
                try:
                    through_hooks(bench, num_bytes)
                except Exception as error:
                    bench.fail(f"through the hooks, {num_bytes} bytes", error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def make_communicator(bench: Bench, store_path: Path) -> Any:
    """rota's, of one rank, over a group of torch's; None where it cannot be made."""
    if not bench.target.runs_torch_kernels:
        return None
    import rota

    try:
        store = dist.FileStore(str(store_path), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        communicator: Any = rota.Communicator()
        if bench.target.device.type == "cuda":
            communicator.connect_device(bench.target.device)
        return communicator
    except Exception as error:
        bench.fail("rota.Communicator of one rank", error)
        return None


# ---- one rank


def alone(bench: Bench, num_bytes: int, shape: str, num_tensors: int, communicator: Any) -> None:
    """Nothing is reduced."""
    sets = [
        make_bucket(bench, num_bytes, num_tensors, seed)
        for seed in range(bench.num_sets(num_bytes + num_bytes // 2))
    ]
    num_elems = num_bytes // FLOAT32_BYTES
    fused_bytes = num_elems * FUSED_BYTES
    jobs = bench.attempt("copy", lambda: bench.copy_job(fused_bytes))

    def add(label: str, api: str, moved_bytes: int, call: Callable[[Bucket], Body]) -> None:
        def make() -> Job:
            calls = [call(bucket) for bucket in sets]
            bound: Bound = torch_bound if label == TORCH else rota_bound
            check = partial(count_wrong, bench, [sets[0]], calls[0], bound)
            return Job(Entry(label, label.split()[0], api), calls, moved_bytes, check)

        jobs.extend(bench.attempt(f"{label}, {shape}", make))

    def rota_call(bucket: Bucket, parts: Sequence[Tensor], in_place: bool = False) -> Body:
        packed = bench.target.gradient_bucket(parts, WIRE, True)

        def call() -> None:
            packed.pack()
            packed.unpack()
            if in_place:
                norm = packed.stats[1].sqrt().float()
                factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
                torch._foreach_mul_(bucket.gradients, factor)

        return call

    def reduce_call(bucket: Bucket) -> Body:
        stats = torch.zeros(2, dtype=torch.float64).to(bucket.flat.device)
        return partial(
            communicator.reduce_bucket, bucket.flat, stats, wire_dtype=WIRE, block_scaling=True
        )

    add(ROTA, "GradientBucket", fused_bytes, lambda bucket: rota_call(bucket, [bucket.flat]))
    if num_tensors > 1:
        add(
            ROTA_LIST,
            "GradientBucket",
            fused_bytes,
            lambda bucket: rota_call(bucket, bucket.gradients),
        )
    if bench.target.runs_torch_kernels:
        add(
            ROTA_IN_PLACE,
            "GradientBucket",
            fused_bytes + num_elems * traffic.CLIP,
            lambda bucket: rota_call(bucket, [bucket.flat], in_place=True),
        )
        add(
            TORCH,
            "fp16_compress_hook",
            round(num_elems * TORCH_BYTES),
            lambda bucket: partial(torch_turn, bucket),
        )
    if communicator is not None:
        add(ROTA_BUCKET, "Communicator.reduce_bucket", fused_bytes, reduce_call)
    bench.measure(jobs, "mixed precision", num_bytes, shape=shape)


def torch_turn(bucket: Bucket) -> None:
    """What torch does in one rank's step, without an all-reduce."""
    torch_decompress(bucket, torch_compress(bucket, 1))


def torch_compress(bucket: Bucket, world_size: int) -> Tensor:
    """fp16_compress_hook before its all-reduce."""
    return bucket.flat.to(WIRE).div_(world_size)


def torch_decompress(bucket: Bucket, compressed: Tensor) -> None:
    """fp16_compress_hook after it; then GradScaler.unscale_ and clip_grad_norm_."""
    bucket.flat.copy_(compressed)
    torch._amp_foreach_non_finite_check_and_unscale_(
        bucket.gradients, bucket.found_inf, bucket.inverse_scale
    )
    torch.nn.utils.clip_grad_norm_(bucket.parameters, MAX_NORM)


# ---- two local ranks


def in_pairs(bench: Bench, num_bytes: int, shape: str, num_tensors: int) -> None:
    """Two ranks of this process; both sides reduce with the same kernel."""
    if not bench.target.runs_torch_kernels:
        return
    try:
        group = bench.target.local_group(2)
    except Exception as error:
        bench.fail("LocalGroup of 2 ranks", error)
        return
    pairs = [
        [make_bucket(bench, num_bytes, num_tensors, 2 * seed + rank) for rank in range(2)]
        for seed in range(bench.num_sets(3 * num_bytes))
    ]
    num_elems = num_bytes // FLOAT32_BYTES
    reduce_bytes = 2 * 2 * num_elems * WIRE_BYTES
    fused_bytes = 2 * num_elems * FUSED_BYTES + reduce_bytes
    torch_bytes = round(2 * num_elems * TORCH_BYTES)
    jobs = bench.attempt("copy", lambda: bench.copy_job(fused_bytes))

    def add(
        label: str, moved_bytes: int, bound: Bound, call: Callable[[list[Bucket]], Body]
    ) -> None:
        def make() -> Job:
            calls = [call(pair) for pair in pairs]
            check = partial(count_wrong, bench, pairs[0], calls[0], bound)
            entry = Entry(label, label.split()[0], "LocalGroup.all_reduce")
            return Job(entry, calls, moved_bytes, check)

        jobs.extend(bench.attempt(f"{label}, 2 ranks, {shape}", make))

    add(ROTA, fused_bytes, rota_plain_bound, partial(rota_pair_call, bench, group))
    add(TORCH, torch_bytes + reduce_bytes, torch_bound, partial(torch_pair_call, group))
    bench.measure(jobs, "mixed precision, local ranks", num_bytes, shape=shape, ranks=2)


def rota_pair_call(bench: Bench, group: LocalGroup, pair: list[Bucket]) -> Body:
    """Wires without scales, which an all-reduce of float16 can sum."""
    packed = [bench.target.gradient_bucket([bucket.flat], WIRE, False) for bucket in pair]
    wires = [one.wire[: one.wire.numel() // WIRE_BYTES * WIRE_BYTES].view(WIRE) for one in packed]

    def call() -> None:
        for one in packed:
            one.pack()
        group.all_reduce(wires, "avg")
        for one in packed:
            one.unpack()

    return call


def torch_pair_call(group: LocalGroup, pair: list[Bucket]) -> Body:
    """torch's hook, with rota's all-reduce in the place of NCCL's."""

    def call() -> None:
        compressed = [torch_compress(bucket, 2) for bucket in pair]
        group.all_reduce(compressed, "sum")
        for bucket, sum_of_halves in zip(pair, compressed, strict=True):
            torch_decompress(bucket, sum_of_halves)

    return call


# ---- through the hooks


def through_hooks(bench: Bench, num_bytes: int) -> None:
    """As a training loop calls them; the host reads the norm and whether there was an Inf."""
    if not dist.is_initialized() or not bench.target.runs_torch_kernels:
        return
    import rota

    device = bench.target.device.type
    entries = list(HOOKS)
    torch_group = None
    if device == "cuda" and bench.target.is_dry:
        bench.note("torch's hook is left out: there is no NCCL for a simulated GPU")
        entries = [entry for entry in entries if entry[2] != amp_turn.TORCH_AMP]
    elif device == "cuda":
        torch_group = dist.new_group(backend="nccl")
    num_elems = num_bytes // FLOAT32_BYTES
    jobs = []
    for label, backend, api in entries:

        def make(label: str = label, backend: str = backend, api: str = api) -> Job:
            entry = Entry(label, backend, api, wire_dtype="float16")
            turn = Turn(entry, "mixed_precision_turn", "float32", num_elems, 0, 0, 1, check_seed=0)
            call, num_wrong = amp_turn.amp_call(turn, rota, torch_group, device)
            return Job(entry, [call], 0, in_graph=False, more={"num_wrong": num_wrong})

        jobs += bench.attempt(label, make)
    bench.measure(jobs, "mixed precision through the hooks, host included", num_bytes)


# ---- what results may be


def rota_bound(contributions: list[Tensor]) -> Tensor:
    """Of what is sent in scaled blocks."""
    return error_bound.average_bound(contributions, error_bound.rota_wire(WIRE, True))


def rota_plain_bound(contributions: list[Tensor]) -> Tensor:
    """Of what is sent as plain float16."""
    return error_bound.average_bound(contributions, error_bound.rota_wire(WIRE, False))


def torch_bound(contributions: list[Tensor]) -> Tensor:
    """Of torch's hook."""
    return error_bound.torch_hook_bound(contributions, WIRE)


def count_wrong(bench: Bench, buckets: Sequence[Bucket], call: Body, bound: Bound) -> int:
    """Runs `call`, and counts what is not the average of the buckets within `bound`, in a piece at
    the start and one at the end; elsewhere what is NaN. The buckets are then as they were."""
    saved = [torch.empty_like(bucket.flat).copy_(bucket.flat) for bucket in buckets]
    call()
    bench.target.synchronize()
    device = bench.check_device
    num_elems = saved[0].numel()
    last = max(0, num_elems - CHECKED_ELEMS) // TILE_ELEMS * TILE_ELEMS
    num_wrong = 0
    for bucket in buckets:
        num_wrong += int(bucket.flat.to(device).isnan().sum())
        for begin in {0, last}:
            piece = slice(begin, begin + CHECKED_ELEMS)
            contributions = [flat[piece].to(device) for flat in saved]
            error = bucket.flat[piece].to(device).double()
            error -= error_bound.exact_average(contributions)
            num_wrong += int((~(error.abs() <= bound(contributions))).sum())
    for bucket, flat in zip(buckets, saved, strict=True):
        bucket.flat.copy_(flat)
    return num_wrong


def main() -> int:
    """The exit status: 0 if everything was measured and nothing was wrong."""
    args = frame.parse_arguments(__doc__, "64M,256M", "64K")
    return frame.main("mixed_precision", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
