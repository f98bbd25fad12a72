"""What the collectives on GPUs could take at best: bounds on paper, not measurements.

    python benchmarks/paper.py --system h200-nvlink --ranks 8
    python benchmarks/paper.py --update csrc/README.md

Bytes, messages and waits come from csrc/schedule/cost.h, which counts them step by step. A kernel's
bound is its launch, the flags that one byte waits for on its way, and the busiest of: the links of
a rank out, the links in, its memory. Waits of later rounds and of other channels hide behind data,
so they are not in it, and neither is any time for arithmetic. Slots count as memory; where they
stay in a cache, the memory part is less.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from arguments import FLOAT32_BYTES, Parser, parse_list, parse_size
from rota._C import schedule

BYTES_PER_US = 1e3  # of 1 GB/s

ELEM_GRANULE = 64
BUCKET_TILE = 512
ONE_ROUND = 1 << 40  # a slot that everything fits in


class Rate(NamedTuple):
    value: float
    source: str


class System(NamedTuple):
    """Rates in GB/s, latencies in µs."""

    link: Rate | None  # each way of one GPU; None: all ranks share one GPU
    memory: Rate  # of one GPU, bytes read and bytes written together
    flag: Rate  # from the store of a flag to a peer that goes on
    launch: Rate


LAUNCH = Rate(2.5, "assumed; 2 to 3 are common")
H200_MEMORY = Rate(4300, "copy on the device, measured; nominal 4800")

SYSTEMS = {
    "h200-nvlink": System(
        link=Rate(450, "NVLink 4, nominal: 900 both ways"),
        memory=H200_MEMORY,
        flag=Rate(1, "assumed"),
        launch=LAUNCH,
    ),
    "h100-pcie": System(
        link=Rate(64, "PCIe 5 x16, nominal, shared with no other GPU"),
        memory=Rate(2000, "nominal, NVIDIA PB-11133-001"),
        flag=Rate(2, "assumed"),
        launch=LAUNCH,
    ),
    "one-gpu": System(
        link=None,
        memory=H200_MEMORY,
        flag=Rate(1, "assumed"),
        launch=LAUNCH,
    ),
}


class Shape(NamedTuple):
    """What is reduced or moved: elements of `dtype`, among so many ranks."""

    num_elems: int
    dtype: torch.dtype
    num_ranks: int

    def message(self) -> schedule.Message:
        """Travels as it is; partial sums in the dtype that sums are kept in."""
        plain = schedule.WireFormat(self.dtype)
        accumulate = torch.float32 if self.dtype.itemsize < 4 else self.dtype
        return schedule.Message(
            num_elems=self.num_elems,
            tensor=plain,
            wire=plain,
            hop=schedule.WireFormat(accumulate),
            slot_bytes=ONE_ROUND,
            granule_elems=ELEM_GRANULE,
        )

    def bucket_message(
        self, tensor: schedule.WireFormat, wire: schedule.WireFormat
    ) -> schedule.Message:
        """A gradient bucket, cut at whole tiles."""
        return schedule.Message(
            num_elems=self.num_elems,
            tensor=tensor,
            wire=wire,
            hop=schedule.WireFormat(torch.float32),
            slot_bytes=ONE_ROUND,
            granule_elems=BUCKET_TILE,
        )


Kernel = list[schedule.Cost]  # of each rank


def of_each_rank(
    cost: Callable[[schedule.Message, int, int], schedule.Cost],
) -> Callable[[Shape], list[Kernel]]:
    """One kernel, of which each rank has its own part."""

    def kernels(shape: Shape) -> list[Kernel]:
        message = shape.message()
        return [[cost(message, rank, shape.num_ranks) for rank in range(shape.num_ranks)]]

    return kernels


def two_groups(message: schedule.Message, rank: int, num_ranks: int) -> schedule.Cost:
    """On links that are all alike, where it has nothing to gain: to show what it costs."""
    return schedule.hierarchical_cost(message, rank, num_ranks, num_ranks // 2)


def send_recv(shape: Shape) -> list[Kernel]:
    """One pair of ranks; the others do nothing."""
    message = shape.message()
    return [[schedule.send_cost(message), schedule.recv_cost(message)]]


FUSED_WIRE = schedule.WireFormat(torch.float16, True)


def fused_hook(shape: Shape) -> list[Kernel]:
    """Gradients of the dtype; pack, two_shot of the packed float16 bucket, unpack."""
    gradients = shape.bucket_message(schedule.WireFormat(shape.dtype), FUSED_WIRE)
    packed = shape.bucket_message(FUSED_WIRE, FUSED_WIRE)
    ranks = range(shape.num_ranks)
    return [
        [schedule.pack_cost(gradients) for _ in ranks],
        [schedule.two_shot_cost(packed, rank, shape.num_ranks) for rank in ranks],
        [schedule.unpack_cost(gradients) for _ in ranks],
    ]


def all_reduce_factor(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def half_factor(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def one(_: int) -> float:
    return 1.0


class Collective(NamedTuple):
    kernels: Callable[[Shape], list[Kernel]]  # one after the other
    bus_factor: Callable[[int], float]  # busbw / algbw, as nccl-tests defines it


COLLECTIVES = {
    "one_shot": Collective(
        of_each_rank(lambda message, _, p: schedule.one_shot_cost(message, p)), all_reduce_factor
    ),
    "low_latency": Collective(
        of_each_rank(lambda message, _, p: schedule.low_latency_cost(message, p)),
        all_reduce_factor,
    ),
    "two_shot": Collective(of_each_rank(schedule.two_shot_cost), all_reduce_factor),
    "two_shot_in_place": Collective(
        of_each_rank(schedule.two_shot_in_place_cost), all_reduce_factor
    ),
    "ring": Collective(of_each_rank(schedule.ring_cost), all_reduce_factor),
    "ordered_ring": Collective(of_each_rank(schedule.ordered_ring_cost), all_reduce_factor),
    "hierarchical, 2 groups": Collective(of_each_rank(two_groups), all_reduce_factor),
    "fused hook": Collective(fused_hook, all_reduce_factor),
    "reduce_scatter": Collective(of_each_rank(schedule.reduce_scatter_cost), half_factor),
    "all_gather": Collective(of_each_rank(schedule.all_gather_cost), half_factor),
    "broadcast": Collective(
        of_each_rank(lambda message, rank, p: schedule.broadcast_cost(message, rank, p, 0)), one
    ),
    "send, recv": Collective(send_recv, one),
}


def out_bytes(cost: schedule.Cost) -> int:
    return cost.sent_bytes + cost.read_by_peers_bytes


def in_bytes(cost: schedule.Cost) -> int:
    return cost.received_bytes + cost.read_from_peers_bytes


def memory_bytes(cost: schedule.Cost) -> int:
    return cost.hbm_read_bytes + cost.hbm_written_bytes


hbm_read_bytes = attrgetter("hbm_read_bytes")
hbm_written_bytes = attrgetter("hbm_written_bytes")
num_messages = attrgetter("num_messages")


def busiest(part: Callable[[schedule.Cost], int], kernels: list[Kernel]) -> int:
    """The largest part that a rank has in each kernel, all kernels together."""
    return sum(max(map(part, costs)) for costs in kernels)


def bound_us(kernels: list[Kernel], system: System) -> float:
    """At least so long; kernels run one after the other."""
    total_us = 0.0
    for costs in kernels:
        if system.link is None:
            busiest_us = sum(map(memory_bytes, costs)) / system.memory.value / BYTES_PER_US
        else:
            on_links = (
                max(max(out_bytes(cost), in_bytes(cost)) for cost in costs) / system.link.value
            )
            in_memory = max(map(memory_bytes, costs)) / system.memory.value
            busiest_us = max(on_links, in_memory) / BYTES_PER_US
        waits_us = costs[0].waits_in_a_row * system.flag.value
        total_us += system.launch.value + waits_us + busiest_us
    return total_us


# ---- the tables ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    title: str
    header: list[str]
    rows: list[list[str]]
    text_columns: tuple[int, ...] = (0,)  # aligned to the left

    def markdown(self) -> str:
        columns = range(len(self.header))
        rule = ["---" if column in self.text_columns else "---:" for column in columns]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows))

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.header):
            justify: Literal["left", "right"] = "left" if number in self.text_columns else "right"
            table.add_column(name, justify=justify, no_wrap=number == 0)
        for row in self.rows:
            table.add_row(*row)
        return table


def short(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def size_name(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes} B"


def systems_grids(_: argparse.Namespace) -> list[Grid]:
    rows = []
    for name, system in SYSTEMS.items():
        rates = (
            ("link, each way, GB/s", system.link),
            ("memory, read + written, GB/s", system.memory),
            ("flag, µs", system.flag),
            ("launch, µs", system.launch),
        )
        rows += [[name, what, short(rate.value), rate.source] for what, rate in rates if rate]
    return [Grid("Systems", ["system", "rate", "value", "source"], rows, text_columns=(0, 1, 3))]


def bounds_grids(args: argparse.Namespace) -> list[Grid]:
    """One for each number of ranks: time in µs, and busbw in GB/s."""
    system, dtype = SYSTEMS[args.system], DTYPES[args.dtype]
    grids = []
    for num_ranks in args.ranks:
        rows = []
        for name, collective in COLLECTIVES.items():
            row = [name]
            for num_bytes in args.sizes:
                shape = Shape(num_bytes // dtype.itemsize, dtype, num_ranks)
                time_us = bound_us(collective.kernels(shape), system)
                busbw = num_bytes / time_us / BYTES_PER_US * collective.bus_factor(num_ranks)
                row.append(f"{short(time_us)} ({short(busbw)})")
            rows.append(row)
        what = f"{args.system}, {num_ranks} ranks, {args.dtype}"
        header = [what, *map(size_name, args.sizes)]
        grids.append(Grid("Bounds: µs (busbw in GB/s)", header, rows))
    return grids


def bytes_grids(args: argparse.Namespace) -> list[Grid]:
    """One for each number of ranks: bytes per element of the busiest rank, for one round."""
    grids = []
    for num_ranks in args.ranks:
        num_elems = BUCKET_TILE * num_ranks
        rows = []
        for name, collective in COLLECTIVES.items():
            kernels = collective.kernels(Shape(num_elems, DTYPES[args.dtype], num_ranks))
            parts = (out_bytes, in_bytes, hbm_read_bytes, hbm_written_bytes)
            rows.append(
                [
                    name,
                    *(short(busiest(part, kernels) / num_elems) for part in parts),
                    str(busiest(num_messages, kernels)),
                    str(sum(costs[0].waits_in_a_row for costs in kernels)),
                    str(len(kernels)),
                ]
            )
        header = [
            f"{num_ranks} ranks, {args.dtype}",
            "links out",
            "links in",
            "memory read",
            "memory written",
            "messages",
            "waits in a row",
            "launches",
        ]
        grids.append(Grid("Bytes per element, of the busiest rank", header, rows))
    return grids


# (name, dtype, whether its blocks are scaled): what the fused hook can send.
BUCKET_WIRES = (
    ("float32", torch.float32, False),
    ("bfloat16", torch.bfloat16, False),
    ("float16, scaled", torch.float16, True),
    ("float8_e4m3fn, scaled", torch.float8_e4m3fn, True),
    ("float8_e5m2, scaled", torch.float8_e5m2, True),
)


def bucket_grids(args: argparse.Namespace) -> list[Grid]:
    """Bytes per element of the kernels around the all-reduce of a gradient bucket."""
    shape = Shape(1 << 20, DTYPES[args.dtype], 1)
    memory = SYSTEMS[args.system].memory.value
    rows = []
    for name, dtype, is_scaled in BUCKET_WIRES:
        wire = schedule.WireFormat(dtype, is_scaled)
        message = shape.bucket_message(schedule.WireFormat(shape.dtype), wire)
        row = [name]
        for cost in (schedule.pack_cost(message), schedule.unpack_cost(message)):
            row += [
                f"{cost.hbm_read_bytes / shape.num_elems:.3f}",
                f"{cost.hbm_written_bytes / shape.num_elems:.3f}",
                short(memory / (memory_bytes(cost) / shape.num_elems)),
            ]
        rows.append(row)
    header = [
        f"wire format, {args.dtype} gradients",
        "pack reads",
        "pack writes",
        f"at most, 1e9 elements/s ({args.system})",
        "unpack reads",
        "unpack writes",
        "at most, 1e9 elements/s",
    ]
    return [Grid("Bucket kernels: bytes of memory per element", header, rows)]


GRIDS: dict[str, Callable[[argparse.Namespace], list[Grid]]] = {
    "systems": systems_grids,
    "bytes": bytes_grids,
    "bucket": bucket_grids,
    "bounds": bounds_grids,
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


# ---- the command line ----------------------------------------------------------------------------


def parse_ranks(text: str) -> list[int]:
    """An argparse type: "2,4,8"."""
    if not all(
        part.isdecimal() and int(part) > 1 and int(part) % 2 == 0 for part in text.split(",")
    ):
        raise argparse.ArgumentTypeError(f"{text!r}; expected even numbers such as 2,4,8")
    return [int(part) for part in text.split(",")]


def parse_sizes(text: str) -> list[int]:
    """An argparse type: bytes of "4K,64M", whole elements of every dtype here."""
    sizes = [parse_size(size) for size in text.split(",")]
    if any(size % FLOAT32_BYTES for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}; expected multiples of {FLOAT32_BYTES} bytes")
    return sizes


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--tables",
        type=parse_list(list(GRIDS)),
        default=",".join(GRIDS),
        help="what to print (default: %(default)s)",
    )
    parser.add_argument("--system", choices=SYSTEMS, default="h200-nvlink")
    parser.add_argument("--ranks", type=parse_ranks, default="2,4,8", help="default: %(default)s")
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default="4K,64K,1M,16M,64M,1G",
        help="bytes of the tensor (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the tensor (default: %(default)s)",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="write the tables of a Markdown file anew, each behind the comment that says how",
    )
    return parser


def grids_of(args: argparse.Namespace) -> list[Grid]:
    return [grid for table in args.tables for grid in GRIDS[table](args)]


def markdown_of(args: argparse.Namespace) -> str:
    return "\n\n".join(grid.markdown() for grid in grids_of(args))


# A table in a file stands between these; between the first one's halves: the arguments for it.
BEGIN, BEGIN_END, END = "<!-- benchmarks/paper.py ", " -->", "<!-- end -->"


def updated(text: str, parser: Parser) -> str:
    """The text with every table between BEGIN and END made anew."""
    before, *parts = text.split(BEGIN)
    result = [before]
    for part in parts:
        arguments, _, rest = part.partition(BEGIN_END)
        _, end, after = rest.partition(END)
        if not end:
            parser.error(f"--update: no {END} behind {BEGIN}{arguments}{BEGIN_END}")
        table = markdown_of(parser.parse_args(shlex.split(arguments)))
        result.append(f"{BEGIN}{arguments}{BEGIN_END}\n{table}\n{END}{after}")
    return "".join(result)


def main(argv: Sequence[str]) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.update is not None:
        args.update.write_text(updated(args.update.read_text(), parser))
    elif args.markdown:
        print(markdown_of(args))
    else:
        console = Console()
        console.print("Bounds on paper, not measurements.")
        for grid in grids_of(args):
            console.print(grid.rich())


if __name__ == "__main__":
    main(sys.argv[1:])
