"""A mixed-precision step's work on a bucket: rota's pack and unpack, and three ways of torch's.

A step's work between backward and the optimizer's update: convert to the wire format and back,
unscale and check for Inf, norm, clip. One rank, so nothing is reduced. A size is that of the
float32 gradients in DDP's flat bucket; the parameters' gradients are views of it, each at a
multiple of 256 bytes. Entries of torch:

- its hook, as DDP users have it: fp16_compress_hook, GradScaler.unscale_ and clip_grad_norm_;
- foreach: the same on the list of gradients, without a flat bucket;
- torch.compile: both sides of the all-reduce as one function each over the flat bucket, compiled
  for each size, as one who writes the hook anew would have it.

rota leaves the clipping factor to the optimizer, which reads the gradients anyway, and so does one
entry of torch.compile; "clip in place" makes a separate pass for it. The scale and the factor are 1
here, which costs the same and leaves the data unchanged. TB/s count the bytes that each entry's
passes move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import error_bound
import traffic
from arguments import FLOAT32_BYTES
from gpu import bench, gradients
from gpu.bench import Bench
from gpu.timing import Body, Job
from protocol import Entry
from rota.gpu import GradientBucket

OP = "fused turn"
ROTA = "rota pack, unpack"
ROTA_LIST = f"{ROTA} of the list"
ROTA_IN_PLACE = f"{ROTA}, clip in place"
HOOK = "torch hook, unscale, clip"
FOREACH = "torch foreach: cast, unscale, norm, clip"
COMPILED = "torch.compile: cast, unscale, norm"
COMPILED_IN_PLACE = "torch.compile: cast, unscale, norm, clip in place"
MAX_NORM = 1e9  # never reached: the factor is 1
WIRE = torch.float16
# Bytes read and written per element.
FUSED_BYTES = 2 * (FLOAT32_BYTES + WIRE.itemsize)
HOOK_BYTES = traffic.torch_hook(WIRE.itemsize, all_reduce=0) + traffic.TORCH_AMP
# The cast; the norm of the compressed gradients; their clipped decompression.
COMPILED_IN_PLACE_BYTES = FUSED_BYTES + WIRE.itemsize


class Bucket:
    """DDP's bucket, and the other tensors that torch's entries need."""

    def __init__(self, bench: Bench, num_bytes: int, num_tensors: int, seed: int) -> None:
        self.flat, self.gradients = gradients.make(
            bench, num_bytes, num_tensors, seed, is_aligned=True
        )
        self.parameters = [torch.nn.Parameter(view.detach()) for view in self.gradients]
        for parameter, view in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = view
        self.halves = [torch.empty_like(view, dtype=WIRE) for view in self.gradients]
        self.found_inf = torch.zeros(1, device=bench.device)
        self.inverse_scale = torch.ones(1, device=bench.device)

    def unscale_and_clip(self) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.gradients, self.found_inf, self.inverse_scale
        )
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)


def rota_call(bucket: Bucket, parts: Sequence[Tensor], clip: bool = False) -> Body:
    packed = GradientBucket(parts, wire_dtype=WIRE)

    def call() -> None:
        packed.pack()
        packed.unpack()
        if clip:
            factor = clip_factor(packed.stats[1].sqrt().float())
            torch._foreach_mul_(bucket.gradients, factor)

    return call


def hook_call(bucket: Bucket) -> Body:
    """fp16_compress_hook of one rank, then what a training loop does."""

    def call() -> None:
        bucket.flat.copy_(bucket.flat.to(WIRE).div_(1))
        bucket.unscale_and_clip()

    return call


def foreach_call(bucket: Bucket) -> Body:
    def call() -> None:
        torch._foreach_copy_(bucket.halves, bucket.gradients)
        torch._foreach_div_(bucket.halves, 1.0)
        torch._foreach_copy_(bucket.gradients, bucket.halves)
        bucket.unscale_and_clip()

    return call


def clip_factor(norm: Tensor) -> Tensor:
    return torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)


def compress(flat: Tensor) -> Tensor:
    """What a hook does before the all-reduce of one rank."""
    return flat.to(WIRE)


def decompress(
    flat: Tensor, compressed: Tensor, inverse_scale: Tensor, clips: bool
) -> tuple[Tensor, Tensor]:
    """What follows the all-reduce; returns the norm and whether there is Inf or NaN."""
    gradient = compressed.float() * inverse_scale
    found_inf = torch.logical_not(gradient.isfinite().all())
    norm = torch.linalg.vector_norm(gradient)
    flat.copy_(gradient * clip_factor(norm) if clips else gradient)
    return norm, found_inf


def compiled(is_small: bool) -> Callable[..., Callable[[Bucket], Body]]:
    """Compiles the two sides of the all-reduce, at the first call with each size; returns what
    makes the call of a bucket for `clips`."""
    # Inductor's kernels are Triton's, which a simulated GPU cannot run.
    backend = "eager" if is_small else "inductor"
    before = torch.compile(compress, dynamic=False, backend=backend)
    after = torch.compile(decompress, dynamic=False, backend=backend)

    def call_of(bucket: Bucket, clips: bool) -> Body:
        def call() -> None:
            after(bucket.flat, before(bucket.flat), bucket.inverse_scale, clips)

        return call

    return lambda clips: partial(call_of, clips=clips)


def benchmark(bench: Bench) -> None:
    num_tensors = gradients.num_many(bench)
    for num_bytes in bench.sizes:
        measure(bench, num_bytes, num_tensors)


def measure(bench: Bench, num_bytes: int, num_tensors: int) -> None:
    """All entries at one size; they share the buckets."""
    num_elems = num_bytes // FLOAT32_BYTES
    buckets = [
        Bucket(bench, num_bytes, num_tensors, seed)
        for seed in range(bench.num_sets(num_bytes + num_bytes // 2))
    ]
    rota_bound = partial(error_bound.average_bound, wire=error_bound.rota_wire(WIRE, True))
    jobs = bench.attempt("copy", partial(bench.copy_job, FUSED_BYTES * num_elems))

    def add(
        label: str, bytes_per_elem: float, bound: gradients.Bound, call_of: Callable[[Bucket], Body]
    ) -> None:
        moved_bytes = round(bytes_per_elem * num_elems)
        make = partial(make_job, label, moved_bytes, bound, call_of, buckets)
        jobs.extend(bench.attempt(label, make))

    fused, in_place = FUSED_BYTES, FUSED_BYTES + traffic.CLIP
    add(ROTA, fused, rota_bound, lambda one: rota_call(one, [one.flat]))
    add(ROTA_LIST, fused, rota_bound, lambda one: rota_call(one, one.gradients))
    add(ROTA_IN_PLACE, in_place, rota_bound, lambda one: rota_call(one, [one.flat], clip=True))
    add(HOOK, HOOK_BYTES, torch_bound, hook_call)
    add(FOREACH, HOOK_BYTES, torch_bound, foreach_call)
    make_call = compiled(bench.is_small)
    add(COMPILED, fused, torch_bound, make_call(clips=False))
    add(COMPILED_IN_PLACE, COMPILED_IN_PLACE_BYTES, torch_bound, make_call(clips=True))
    bench.measure(jobs, OP, num_bytes, shape=f"{num_tensors} tensors, aligned")


def make_job(
    label: str,
    moved_bytes: int,
    bound: gradients.Bound,
    call_of: Callable[[Bucket], Body],
    buckets: Sequence[Bucket],
) -> Job:
    """A job whose result must be the bucket as it was, within `bound`."""
    calls = [call_of(bucket) for bucket in buckets]

    def check() -> int:
        saved = buckets[0].flat.normal_().clone()
        calls[0]()
        num_wrong = gradients.num_wrong(buckets[0].flat, [saved], bound)
        buckets[0].flat.copy_(saved)
        return num_wrong

    backend, _, api = label.partition(" ")
    return Job(Entry(label, backend, api), calls, moved_bytes, check)


def torch_bound(contributions: Sequence[Tensor]) -> Tensor:
    return error_bound.torch_hook_bound(contributions, WIRE)


if __name__ == "__main__":
    bench.main("fused_turn", __doc__, benchmark, "64M,256M", "64K")
