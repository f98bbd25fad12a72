"""Uses every kernel a few times on small tensors, for a memory checker to look on.

    PYTHONPATH=python:benchmarks compute-sanitizer --tool memcheck python3 -m gpu.tour

Prints a line for each; the exit status is 0 if all results were right. Data come from the CPU and
results go there, so that rota's are nearly the only kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import error_bound
import tiles
from arguments import Parser
from gpu.frame import first_line
from gpu.local_all_reduce import ALGORITHMS, GROUP_SIZE
from gpu.pack_unpack import FORMATS
from gpu.target import LocalGroup, Target, add_arguments, open_target

RANKS = (2, 4)
# Odd, so that the last chunk is short, and of several chunks; a multiple of every RANKS.
NUM_ELEMS = 5004
LOW_LATENCY_ELEMS = 1004
SEED = 3
TIMEOUT_S = 15.0  # a checked kernel is slow; far less than a memory checker's whole time
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64)
GRADIENT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GRADIENT_SIZES = (1, 511, 512, 513, 40_001)

Stop = tuple[str, Callable[[], int]]  # what is used; how many elements were wrong


class Groups:
    """A LocalGroup for each number of ranks."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._by_ranks: dict[int, LocalGroup] = {}

    def of(self, num_ranks: int) -> LocalGroup:
        """The same one each time, until it is dropped."""
        if num_ranks not in self._by_ranks:
            self._by_ranks[num_ranks] = self._target.local_group(num_ranks, TIMEOUT_S)
        return self._by_ranks[num_ranks]

    def drop(self) -> None:
        """After a failure: a group that has timed out stays unusable."""
        self._by_ranks.clear()


def inputs(target: Target, num_ranks: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank contributes, one element into its storage: not aligned."""
    tensors = []
    for rank in range(num_ranks):
        source = torch.empty(num_elems, dtype=dtype)
        tiles.fill_with_input(source, rank, num_ranks, SEED)
        storage = torch.empty(num_elems + 1, dtype=dtype, device=target.device)
        tensors.append(storage[1:].copy_(source))
    return tensors


def outputs(target: Target, num_ranks: int, num_elems: int) -> list[Tensor]:
    """A tensor for each rank."""
    return [torch.empty(num_elems, device=target.device) for _ in range(num_ranks)]


def num_wrong(target: Target, tensors: list[Tensor], op: str, num_ranks: int) -> int:
    """Elements of all tensors that are not what `op` gives."""
    target.synchronize()
    return sum(tiles.count_wrong(tensor.cpu(), op, num_ranks, SEED) for tensor in tensors)


def collectives(target: Target, groups: Groups, num_ranks: int) -> list[Stop]:
    """Every collective between local ranks."""

    def all_reduce(algorithm: str, dtype: torch.dtype) -> int:
        num_elems = LOW_LATENCY_ELEMS if algorithm == "low_latency" else NUM_ELEMS
        tensors = inputs(target, num_ranks, num_elems, dtype)
        group_size = GROUP_SIZE if algorithm == "hierarchical" else None
        groups.of(num_ranks).all_reduce(tensors, "sum", algorithm, group_size)
        return num_wrong(target, tensors, "all_reduce", num_ranks)

    def reduce_scatter() -> int:
        pieces = outputs(target, num_ranks, NUM_ELEMS // num_ranks)
        groups.of(num_ranks).reduce_scatter(
            pieces, inputs(target, num_ranks, NUM_ELEMS, torch.float32), "sum"
        )
        whole = torch.cat([piece.cpu() for piece in pieces])
        return num_wrong(target, [whole], "all_reduce", num_ranks)

    def all_gather() -> int:
        gathered = outputs(target, num_ranks, NUM_ELEMS * num_ranks)
        groups.of(num_ranks).all_gather(
            gathered, inputs(target, num_ranks, NUM_ELEMS, torch.float32)
        )
        return num_wrong(target, gathered, "all_gather", num_ranks)

    def broadcast() -> int:
        tensors = inputs(target, num_ranks, NUM_ELEMS, torch.float32)
        groups.of(num_ranks).broadcast(tensors, 0)
        return num_wrong(target, tensors, "broadcast", num_ranks)

    def send_recv() -> int:
        tensors = inputs(target, num_ranks, NUM_ELEMS, torch.float32)
        groups.of(num_ranks).send_recv(0, num_ranks - 1, tensors)
        return num_wrong(target, [tensors[0], tensors[-1]], "broadcast", num_ranks)

    stops: list[Stop] = []
    for algorithm in ALGORITHMS:
        for dtype in DTYPES:
            name = f"all_reduce {algorithm} {str(dtype).removeprefix('torch.')}"
            stops.append((name, partial(all_reduce, algorithm, dtype)))
    stops += [("reduce_scatter", reduce_scatter), ("all_gather", all_gather)]
    stops += [("broadcast", broadcast), ("send_recv", send_recv)]
    return [(f"{name}, {num_ranks} ranks", stop) for name, stop in stops]


def buckets(target: Target) -> list[Stop]:
    """pack and unpack in every format."""

    def both_ways(wire_dtype: torch.dtype, is_scaled: bool, dtype: torch.dtype) -> int:
        generator = torch.Generator().manual_seed(SEED)
        sources = [torch.randn(size, generator=generator).to(dtype) for size in GRADIENT_SIZES]
        gradients = [source.to(target.device) for source in sources]
        bucket = target.gradient_bucket(gradients, wire_dtype, is_scaled)
        bucket.pack()
        for gradient in gradients:
            gradient.copy_(torch.full(gradient.shape, torch.nan, dtype=dtype))
        bucket.unpack()
        target.synchronize()
        wire = error_bound.rota_wire(wire_dtype, is_scaled)
        wrong = 0
        for source, gradient in zip(sources, gradients, strict=True):
            exact = source.double()
            bound = error_bound.conversion_bound(exact.abs(), wire)
            # A float64 gradient is rounded to float32 on its way, a narrow one once more at last.
            unit = max(error_bound.FLOAT32_UNIT, torch.finfo(dtype).eps / 2)
            bound += 2 * unit * exact.abs() + error_bound.FLOAT32_TINY
            wrong += int((~((gradient.cpu().double() - exact).abs() <= bound)).sum())
        return wrong

    stops: list[Stop] = []
    for label, wire_dtype, is_scaled in FORMATS:
        for dtype in GRADIENT_DTYPES:
            name = f"pack, unpack {str(dtype).removeprefix('torch.')} as {label}"
            stops.append((name, partial(both_ways, wire_dtype, is_scaled, dtype)))
    return stops


def main() -> int:
    """The exit status: 0 if every result was right."""
    parser = Parser(__doc__)
    add_arguments(parser)
    target = open_target(parser.parse_args())
    torch.set_num_threads(1)
    stops = buckets(target)
    groups = Groups(target)
    for num_ranks in RANKS:
        stops += collectives(target, groups, num_ranks)
    num_failed = 0
    for name, stop in stops:
        try:
            wrong = stop()
            verdict = "ok  " if wrong == 0 else f"FAIL ({wrong} elements wrong)"
        except Exception as error:
            verdict = f"FAIL ({type(error).__name__}: {first_line(error)})"
        if verdict != "ok  ":
            num_failed += 1
            groups.drop()
        print(f"{verdict} {name}", flush=True)
    print(f"{len(stops) - num_failed} of {len(stops)} right")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
