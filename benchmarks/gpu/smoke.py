"""A benchmark of one GPU that takes seconds: enough to see whether its rates are as expected.

    PYTHONPATH=python:benchmarks python3 -m gpu.smoke

Times are medians over replays of a CUDA graph, taken with CUDA events. The other benchmarks here
measure more, and longer. The last line is JSON: every figure, and the target that it has.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from arguments import FLOAT32_BYTES, Parser
from rota import _C
from rota.communicator import DEFAULT_SLOT_BYTES
from rota.gpu import GradientBucket, LocalGroup

NUM_LOCAL_RANKS = 2
SMALL_ALL_REDUCE_BYTES = 8 << 10
# Calls per graph if they are short, so that the graph's launch does not count.
CALLS_IN_A_ROW = 20


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int  # of a large copy: read, and written
    bucket_bytes: int  # of gradients, and of each local rank's tensor
    num_replays: int


# A graph copies 512 MiB and more more slowly than a kernel does (benchmarks/gpu/bench.py).
FULL = Sizes(copy_bytes=1 << 28, bucket_bytes=64 << 20, num_replays=30)
SMALL = Sizes(copy_bytes=1 << 16, bucket_bytes=1 << 16, num_replays=3)


@dataclass(frozen=True)
class Figure:
    """One line of the benchmark.

    `got` is in `unit`: "GB/s" (1e9 bytes read and written), "share" of the copy rate or of a bound
    by it, or "us". `asked` is the project's target, if it has one: the least GB/s or share, or the
    most us.
    """

    name: str
    got: float
    unit: str
    asked: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.asked is None:
            return None
        return self.got <= self.asked if self.unit == "us" else self.got >= self.asked


def measure(device: torch.device, sizes: Sizes) -> list[Figure]:
    """Measures all figures on the current stream. Blocks."""
    with torch.cuda.device(device):
        copy_rate = measure_copy_rate(sizes)
        return [
            Figure("copy on the GPU", copy_rate / 1e9, "GB/s"),
            *pack_and_unpack(sizes, copy_rate),
            local_all_reduce(sizes, copy_rate),
            small_all_reduce(sizes),
            reduce_bucket(sizes),
        ]


def seconds_of(call: Callable[[], object], sizes: Sizes, calls_in_a_row: int = 1) -> float:
    """The time of one call, from the start of its first kernel to the end of its last."""
    call()  # one-time setup
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls_in_a_row):
            call()
    graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(sizes.num_replays)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    milliseconds: float = statistics.median(start.elapsed_time(end) for start, end in events)
    # A simulated GPU's clock may not have moved.
    return max(milliseconds, 1e-6) / 1e3 / calls_in_a_row


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes // FLOAT32_BYTES, dtype=torch.float32, device="cuda").zero_()


def measure_copy_rate(sizes: Sizes) -> float:
    """Bytes read and written per second."""
    source, target = zeros(sizes.copy_bytes), zeros(sizes.copy_bytes)
    return 2 * sizes.copy_bytes / seconds_of(lambda: target.copy_(source), sizes)


def pack_and_unpack(sizes: Sizes, copy_rate: float) -> list[Figure]:
    figures = []
    for wire_dtype in (torch.float16, torch.float8_e4m3fn):
        bucket = GradientBucket([zeros(sizes.bucket_bytes)], wire_dtype=wire_dtype)
        at_copy_rate = (bucket.num_bytes + bucket.num_wire_bytes) / copy_rate
        name = str(wire_dtype).removeprefix("torch.")
        for way, call in (("pack", bucket.pack), ("unpack", bucket.unpack)):
            share = at_copy_rate / seconds_of(call, sizes)
            figures.append(Figure(f"{way} float32 as scaled {name}", share, "share", asked=0.92))
    return figures


def local_all_reduce(sizes: Sizes, copy_rate: float) -> Figure:
    group = LocalGroup(NUM_LOCAL_RANKS)
    tensors = [zeros(sizes.bucket_bytes) for _ in range(NUM_LOCAL_RANKS)]
    bound = 2 * NUM_LOCAL_RANKS * sizes.bucket_bytes / copy_rate
    share = bound / seconds_of(lambda: group.all_reduce(tensors), sizes)
    return Figure(f"all-reduce of {NUM_LOCAL_RANKS} local ranks", share, "share", asked=0.85)


def small_all_reduce(sizes: Sizes) -> Figure:
    group = LocalGroup(NUM_LOCAL_RANKS)
    tensors = [zeros(SMALL_ALL_REDUCE_BYTES) for _ in range(NUM_LOCAL_RANKS)]
    # The group's own choice would be a kernel in which no rank waits for another.
    call = partial(group.all_reduce, tensors, algorithm="low_latency")
    seconds = seconds_of(call, sizes, CALLS_IN_A_ROW)
    name = f"all-reduce of 8 KiB, {NUM_LOCAL_RANKS} local ranks that wait for each other"
    return Figure(name, seconds * 1e6, "us", asked=6)


def reduce_bucket(sizes: Sizes) -> Figure:
    """With one rank: pack, round, unpack, measure."""
    comm = _C.Communicator(
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        slot_bytes=DEFAULT_SLOT_BYTES,
    )
    bucket = zeros(sizes.bucket_bytes)
    stats = torch.empty(2, dtype=torch.float64, device="cuda").zero_()

    def turn() -> None:
        comm.reduce_bucket(bucket, stats, wire_dtype=torch.float16, block_scaling=True)

    try:
        return Figure(
            "reduce_bucket float32 as scaled float16", seconds_of(turn, sizes) * 1e6, "us"
        )
    finally:
        comm.close()


def text_of(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def show(figures: list[Figure], is_small: bool) -> None:
    print(f"{'figure':<42}{'got':>12}   asked")
    for figure in figures:
        asked = ""
        if figure.asked is not None:
            bound = "at most" if figure.unit == "us" else "at least"
            asked = f"{bound} {text_of(figure.asked, figure.unit)}"
            if not figure.is_met and not is_small:
                asked += ": MISSED"
        print(f"{figure.name:<42}{text_of(figure.got, figure.unit):>12}   {asked}".rstrip())
    if is_small:
        print("--small: sizes are tiny, and these times mean nothing")
    print(json.dumps([asdict(figure) for figure in figures]))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes; measures nothing")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    show(measure(device, SMALL if args.small else FULL), args.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
