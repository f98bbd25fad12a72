"""A mixed-precision step's work on a bucket: rota's pack and unpack, and torch's sequence.

    PYTHONPATH=python:benchmarks python3 -m gpu.fused_turn --sizes 64M,256M

A step's work between backward and the optimizer's update: convert to the wire format and back,
unscale and check for Inf, norm, clip. torch's sequence is that of fp16_compress_hook,
GradScaler.unscale_ and clip_grad_norm_, kernel by kernel. A size is that of the float32 gradients
in DDP's flat bucket; the parameters' gradients are views of it.

- One rank: nothing is reduced, on either side.
- Two local ranks: both sides reduce float16 with rota.LocalGroup.
- Through the hooks: one rank again, as a training loop calls them, host time included, one bucket.

rota leaves the clipping factor to the optimizer, which reads the gradients anyway; "clip in place"
makes a separate pass for it, as torch does. The scale and the factor are 1 here, which costs the
same and leaves the data unchanged. TB/s count the bytes that each entry's passes move.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import amp_turn
import error_bound
import rota
import traffic
from arguments import FLOAT32_BYTES
from gpu import bench, gradients
from gpu.bench import Bench
from gpu.timing import Body, Job
from protocol import Entry, Turn

OP = "fused turn"
ROTA = "rota pack, unpack"
ROTA_IN_PLACE = "rota pack, unpack, clip in place"
TORCH = "torch hook, unscale, clip"
MAX_NORM = 1e9  # never reached: the factor is 1
WIRE = torch.float16
# Bytes read and written per element on one rank: by rota's pack and unpack, and by torch's hook,
# unscale_ and clipping.
FUSED_BYTES = 2 * (FLOAT32_BYTES + WIRE.itemsize)
TORCH_BYTES = traffic.torch_hook(WIRE.itemsize, all_reduce=0) + traffic.TORCH_AMP
REDUCE_BYTES = 2 * WIRE.itemsize

# Through the hooks: label, and api in amp_turn.
HOOKS = (
    ("rota fused_hook, amp, clip", amp_turn.FUSED),
    ("rota fused_hook, amp, clip in place", amp_turn.FUSED_IN_PLACE),
    ("rota fp16 hook, torch amp, clip", amp_turn.ROTA_HOOK_TORCH_AMP),
    ("torch fp16 hook, torch amp, clip", amp_turn.TORCH_AMP),
)


# Makes the call for a set's buckets, one per rank.
CallOf = Callable[[Sequence["Bucket"]], Body]


class Bucket:
    """One rank's DDP bucket, and the other tensors that torch's sequence needs."""

    def __init__(self, bench: Bench, num_bytes: int, num_tensors: int, seed: int) -> None:
        self.flat, self.gradients = gradients.make(bench, num_bytes, num_tensors, seed)
        self.parameters = [torch.nn.Parameter(view.detach()) for view in self.gradients]
        for parameter, view in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = view
        self._found_inf = torch.zeros(1, device=bench.device)
        self._inverse_scale = torch.ones(1, device=bench.device)

    def compress(self, world_size: int) -> Tensor:
        """fp16_compress_hook before its all-reduce."""
        return self.flat.to(WIRE).div_(world_size)

    def decompress(self, compressed: Tensor) -> None:
        """fp16_compress_hook after it; then GradScaler.unscale_ and clip_grad_norm_."""
        self.flat.copy_(compressed)
        torch._amp_foreach_non_finite_check_and_unscale_(
            self.gradients, self._found_inf, self._inverse_scale
        )
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def torch_turn(self) -> None:
        """torch's work in one rank's step, without an all-reduce."""
        self.decompress(self.compress(1))


def benchmark(bench: Bench) -> None:
    """Every size, with few and with many parameters."""
    for num_bytes in bench.sizes:
        for shape, num_tensors in gradients.shapes(bench).items():
            bench.attempt("one rank", partial(alone, bench, num_bytes, shape, num_tensors))
            bench.attempt("local ranks", partial(in_pairs, bench, num_bytes, shape, num_tensors))
    # Last, because it involves DDP's hooks and NCCL; no target depends on it.
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for num_bytes in bench.sizes:
            bench.attempt("through the hooks", partial(through_hooks, bench, num_bytes))
        dist.destroy_process_group()


def alone(bench: Bench, num_bytes: int, shape: str, num_tensors: int) -> None:
    """One rank."""
    num_elems = num_bytes // FLOAT32_BYTES
    buckets = [
        [Bucket(bench, num_bytes, num_tensors, seed)]
        for seed in range(bench.num_sets(num_bytes + num_bytes // 2))
    ]
    fused, clip = FUSED_BYTES * num_elems, traffic.CLIP * num_elems
    jobs = bench.attempt("copy", partial(bench.copy_job, fused))

    def add(label: str, moved_bytes: int, bound: gradients.Bound, call: CallOf) -> None:
        jobs.extend(
            bench.attempt(label, partial(make_job, label, moved_bytes, bound, call, buckets))
        )

    bound = partial(error_bound.average_bound, wire=error_bound.rota_wire(WIRE, True))
    add(ROTA, fused, bound, lambda one: rota_call(one[0], [one[0].flat]))
    if num_tensors > 1:
        add(f"{ROTA} of the list", fused, bound, lambda one: rota_call(one[0], one[0].gradients))
    add(ROTA_IN_PLACE, fused + clip, bound, lambda one: rota_call(one[0], [one[0].flat], clip=True))
    torch_bytes = round(TORCH_BYTES * num_elems)
    add(TORCH, torch_bytes, torch_bound, lambda one: one[0].torch_turn)
    bench.measure(jobs, OP, num_bytes, shape=shape)


def rota_call(bucket: Bucket, parts: Sequence[Tensor], clip: bool = False) -> Body:
    """Converts to scaled blocks and back."""
    packed = rota.GradientBucket(parts, wire_dtype=WIRE)

    def call() -> None:
        packed.pack()
        packed.unpack()
        if clip:
            norm = packed.stats[1].sqrt().float()
            factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(bucket.gradients, factor)

    return call


def in_pairs(bench: Bench, num_bytes: int, shape: str, num_tensors: int) -> None:
    """Two ranks of this process; both sides reduce with the same kernel."""
    group = rota.LocalGroup(2, bench.device)
    pairs = [
        [Bucket(bench, num_bytes, num_tensors, 2 * seed + rank) for rank in range(2)]
        for seed in range(bench.num_sets(3 * num_bytes))
    ]
    num_elems = num_bytes // FLOAT32_BYTES

    def rota_pair_call(pair: Sequence[Bucket]) -> Body:
        """Wires without scales, which an all-reduce of float16 can sum."""
        packed = [
            rota.GradientBucket([one.flat], wire_dtype=WIRE, block_scaling=False) for one in pair
        ]
        wires = [one.wire[: num_elems * WIRE.itemsize].view(WIRE) for one in packed]

        def call() -> None:
            for one in packed:
                one.pack()
            group.all_reduce(wires, "avg")
            for one in packed:
                one.unpack()

        return call

    def torch_pair_call(pair: Sequence[Bucket]) -> Body:
        """torch's hook, with rota's all-reduce in the place of NCCL's."""

        def call() -> None:
            compressed = [bucket.compress(2) for bucket in pair]
            group.all_reduce(compressed, "sum")
            for bucket, halves in zip(pair, compressed, strict=True):
                bucket.decompress(halves)

        return call

    bound = partial(error_bound.average_bound, wire=error_bound.rota_wire(WIRE, False))
    fused = round(2 * num_elems * (FUSED_BYTES + REDUCE_BYTES))
    torch_bytes = round(2 * num_elems * (TORCH_BYTES + REDUCE_BYTES))
    jobs = bench.attempt("copy", partial(bench.copy_job, fused))
    jobs += bench.attempt(ROTA, partial(make_job, ROTA, fused, bound, rota_pair_call, pairs))
    make = partial(make_job, TORCH, torch_bytes, torch_bound, torch_pair_call, pairs)
    jobs += bench.attempt(TORCH, make)
    bench.measure(jobs, f"{OP}, local ranks", num_bytes, shape=shape, ranks=2)


def through_hooks(bench: Bench, num_bytes: int) -> None:
    """Calls hooks as a training loop does; the host reads the norm and the Inf flag."""
    jobs = []
    for label, api in HOOKS:
        backend = label.split()[0]
        if backend == "torch" and bench.is_small:
            continue  # NCCL does not run on a simulated GPU
        entry = Entry(label, backend, api, wire_dtype="float16")
        num_elems = num_bytes // FLOAT32_BYTES
        turn = Turn(entry, "mixed_precision_turn", "float32", num_elems, 0, 0, 1, check_seed=0)

        def make(turn: Turn = turn) -> Job:
            group = dist.new_group(backend="nccl") if turn.entry.backend == "torch" else None
            call, num_wrong = amp_turn.amp_call(turn, rota, group, "cuda")
            wrong = [num_wrong or 0]  # of the first turn only: later turns have other data
            return Job(
                turn.entry, [call], check=lambda: wrong.pop() if wrong else 0, in_graph=False
            )

        jobs += bench.attempt(label, make)
    bench.measure(jobs, f"{OP} through the hooks, host included", num_bytes)


def make_job(
    label: str,
    moved_bytes: int,
    bound: gradients.Bound,
    call_of: CallOf,
    sets: Sequence[Sequence[Bucket]],
) -> Job:
    """A job whose result must be the average of a set's buckets, within `bound`."""
    calls = [call_of(buckets) for buckets in sets]

    def check() -> int:
        saved = [bucket.flat.normal_().clone() for bucket in sets[0]]
        calls[0]()
        num_wrong = sum(gradients.num_wrong(bucket.flat, saved, bound) for bucket in sets[0])
        for bucket, flat in zip(sets[0], saved, strict=True):
            bucket.flat.copy_(flat)
        return num_wrong

    api = "fp16_compress_hook" if label == TORCH else "GradientBucket"
    return Job(Entry(label, label.split()[0], api), calls, moved_bytes, check)


def torch_bound(contributions: Sequence[Tensor]) -> Tensor:
    """Error bound of torch's hook."""
    return error_bound.torch_hook_bound(contributions, WIRE)


if __name__ == "__main__":
    bench.main("fused_turn", __doc__, benchmark, "64M,256M", "64K")
