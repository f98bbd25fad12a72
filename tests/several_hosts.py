"""What ranks on several hosts should hold: layouts of ranks on hosts, and the contract of sums."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rota
from bucket_oracle import Format, through_wire
from oracle import (
    FLOAT8_DTYPES,
    OPS,
    Array,
    exact,
    reduce_in_order,
    round_to,
    to_numpy,
    to_tensor,
)
from ranks import Body, Rank, Ranks, as_test

# Several chunks, the last of which is odd. One is 2 MiB of float32 in a sum, and 1 MiB of each
# rank's part in a copy (kSumChunkBytes and kCopyChunkBytes in csrc/hosts/).
MANY_CHUNKS = 1_200_003
STAR_BYTES = 64 << 10  # kStarBytes: a longer broadcast goes from host to host
SHORT = 4096  # in float32 it goes with the greeting (kMaxShortBytes)


class Layout(NamedTuple):
    """The host of each rank, by rank."""

    host_of: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.host_of)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host; hosts are in the order of their lowest ranks."""
        numbers = list(dict.fromkeys(self.host_of))
        return [[r for r, host in enumerate(self.host_of) if host == n] for n in numbers]

    def __str__(self) -> str:
        return "hosts" + "".join(map(str, self.host_of))

    def run(self, function: Callable[..., Any], *args: object, timeout_s: float = 60) -> list[Any]:
        """Runs `function(rank, *args)` on every rank and returns what each returned."""
        with self.start(function, *args, timeout_s=timeout_s) as ranks:
            return ranks.results()

    def start(
        self,
        function: Callable[..., Any],
        *args: object,
        timeout_s: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> Ranks:
        """Starts `function(rank, *args)` on every rank, whose `layout` this is; see Ranks."""
        own = (self, function, *args)
        return Ranks(self.world_size, _run_on_host, *own, timeout_s=timeout_s, env=env)


def _run_on_host(rank: Rank, layout: Layout, function: Callable[..., Any], *args: object) -> Any:
    os.environ["ROTA_HOST_ID"] = f"host{layout.host_of[rank.rank]}"
    rank.layout = layout
    result = function(rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


PAIR = Layout((0, 0))
ONE_HOST = Layout((0, 0, 0))
TWO_BY_TWO = Layout((0, 0, 1, 1))
ONE_BY_ONE = Layout((0, 1))
UNEVEN = Layout((0, 0, 0, 1))
THREE_UNEVEN = Layout((0, 1, 1, 2))
THREE_BY_TWO = Layout((0, 0, 1, 1, 2, 2))
INTERLEAVED = Layout((0, 1, 0, 1))
LAYOUTS = [TWO_BY_TWO, ONE_BY_ONE, UNEVEN, THREE_UNEVEN, THREE_BY_TWO, INTERLEAVED]


def on_layout(
    layout: Layout | None = None, *, timeout_s: float = 60
) -> Callable[[Callable[..., Any]], Any]:
    """Like ranks.on_ranks, on the ranks of a layout; None: the test has a parameter `layout`."""

    def run(body: Body, args: dict[str, Any]) -> None:
        place: Layout = layout or args.pop("layout")
        place.run(functools.partial(body, **args), timeout_s=timeout_s)

    return lambda body: as_test(body, 1, None if layout else "layout", run)


def of_layouts(*layouts: Layout) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", layouts, ids=str)


of_every_layout = of_layouts(*LAYOUTS)
of_one_host_and_several = of_layouts(ONE_HOST, *LAYOUTS)


def flat_communicator(rank: Rank) -> rota.Communicator:
    """A communicator of the same ranks, as if they were on one host."""
    own = os.environ["ROTA_HOST_ID"]
    os.environ["ROTA_HOST_ID"] = "one for all"
    try:
        communicator = rank.communicator()
        assert communicator.hosts == [list(range(rank.world_size))]
        return communicator
    finally:
        os.environ["ROTA_HOST_ID"] = own


def default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# ---- the contract, in numpy


def rounded(values: Array, wire: Format | None) -> Array:
    if wire is None:
        return values
    return through_wire(values.astype(np.float64), wire).astype(values.dtype)


def by_hosts(
    inputs: Sequence[torch.Tensor],
    layout: Layout,
    op: str = "sum",
    wire: Format | None = None,
    *,
    order: str = "rank",
    contribution_factor: float = 1.0,
    divisor: float | None = None,
    result_factor: float = 1.0,
) -> torch.Tensor:
    """What every rank holds after a sum over several hosts.

    Each host sums its ranks' contributions in the accumulate dtype and rounds the sum to the wire
    format; the hosts' sums are added, divided, and rounded once more.

    Args:
        inputs: by rank.
        wire: between hosts; None: the accumulate dtype.
        order: as in Communicator.all_reduce, within a host and over the hosts.
        contribution_factor, divisor, result_factor: as in Communicator.reduce_bucket.
    """
    dtype = inputs[0].dtype
    if not dtype.is_floating_point:
        return exact(inputs, op)
    is_double = dtype == torch.float64 and not (wire and wire.block_scaling)
    local = np.float64 if is_double else np.float32
    above = local if wire is None or wire.dtype == torch.float64 else np.float32
    add = functools.partial(reduce_in_order, OPS[op], group_size=None, order=order)
    with np.errstate(all="ignore"):
        contributions = [to_numpy(t).astype(local) * contribution_factor for t in inputs]
        sums = [add([contributions[rank] for rank in ranks]) for ranks in layout.hosts]
        total = add([rounded(partial, wire).astype(above) for partial in sums])
        if divisor is None and op == "avg":
            divisor = len(inputs)
        if divisor is not None:
            total = total / above(divisor)
        result = rounded(total, wire) * result_factor
        return to_tensor(round_to(result, dtype), dtype)


def wires_of(dtype: torch.dtype) -> Iterator[Format]:
    """The formats that are narrower than a dtype, or as wide."""
    for wire in (torch.float32, torch.float16, torch.bfloat16, *FLOAT8_DTYPES):
        if wire.itemsize <= dtype.itemsize:
            yield Format(wire, False)
