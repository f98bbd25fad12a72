"""What the collectives on GPUs could take at best: bounds on paper, not measurements.

    python benchmarks/paper.py --system h200-nvlink --ranks 8
    python benchmarks/paper.py --update csrc/README.md

Bytes, messages and waits come from the formulas of csrc/schedule/cost.h. A kernel's
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
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from arguments import FLOAT32_BYTES, Parser, parse_list, parse_size
from rota import _C
from rota._C import schedule

BYTES_PER_US = 1e3  # of 1 GB/s


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

    def cost(self, what: str, group_size: int = 1) -> schedule.Cost:
        """Travels as it is; partial sums in the dtype that sums are kept in."""
        tensor = float(self.num_elems * self.dtype.itemsize)
        return schedule.cost(
            what,
            tensor=tensor,
            wire=tensor,
            hop=float(self.num_elems * max(self.dtype.itemsize, FLOAT32_BYTES)),
            world_size=self.num_ranks,
            group_size=group_size,
        )


class Kernel(NamedTuple):
    """What one launch moves: of the busiest rank, and of all together."""

    links_out: float
    links_in: float
    memory_read: float
    memory_written: float
    memory_of_all: float
    num_messages: int = 0
    num_waits: int = 0


def kernel(cost: schedule.Cost) -> Kernel:
    return Kernel(
        cost.links_out_bytes,
        cost.links_in_bytes,
        cost.memory_read_bytes,
        cost.memory_written_bytes,
        cost.memory_bytes_of_all,
        cost.num_messages,
        cost.num_waits,
    )


# For each element of a bucket: its part of the 16 bytes that say where a tile of 512 elements lies,
# and of the float64 sum of squares of four tiles.
TILE_LIST_BYTES = 16 / 512
SQUARES_BYTES = 8 / 2048


def pack(shape: Shape, wire_bytes: float) -> Kernel:
    read = shape.num_elems * (shape.dtype.itemsize + TILE_LIST_BYTES)
    written = shape.num_elems * wire_bytes
    return Kernel(0, 0, read, written, shape.num_ranks * (read + written))


def unpack(shape: Shape, wire_bytes: float) -> Kernel:
    read = shape.num_elems * (wire_bytes + TILE_LIST_BYTES)
    written = shape.num_elems * (shape.dtype.itemsize + SQUARES_BYTES)
    return Kernel(0, 0, read, written, shape.num_ranks * (read + written))


def wire_bytes_of(dtype: torch.dtype, is_scaled: bool) -> float:
    """Of one element, with its part of its block's scale."""
    return dtype.itemsize + (1 / _C.block_elems(dtype) if is_scaled else 0)


def fused_hook(shape: Shape) -> list[Kernel]:
    """Gradients of the dtype; pack, two_shot of the packed float16 bucket, unpack."""
    wire_bytes = wire_bytes_of(torch.float16, is_scaled=True)
    on_wire = shape.num_elems * wire_bytes
    packed = schedule.cost(
        "two_shot", tensor=on_wire, wire=on_wire, hop=0.0, world_size=shape.num_ranks
    )
    return [pack(shape, wire_bytes), kernel(packed), unpack(shape, wire_bytes)]


def named(what: str) -> Callable[[Shape], list[Kernel]]:
    return lambda shape: [kernel(shape.cost(what))]


def two_groups(shape: Shape) -> list[Kernel]:
    """On links that are all alike, where it has nothing to gain: to show what it costs."""
    return [kernel(shape.cost("hierarchical", group_size=shape.num_ranks // 2))]


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
    "one_shot": Collective(named("one_shot"), all_reduce_factor),
    "low_latency": Collective(named("low_latency"), all_reduce_factor),
    "two_shot": Collective(named("two_shot"), all_reduce_factor),
    "two_shot_in_place": Collective(named("two_shot_in_place"), all_reduce_factor),
    "ring": Collective(named("ring"), all_reduce_factor),
    "ordered_ring": Collective(named("ordered_ring"), all_reduce_factor),
    "hierarchical, 2 groups": Collective(two_groups, all_reduce_factor),
    "fused hook": Collective(fused_hook, all_reduce_factor),
    "reduce_scatter": Collective(named("reduce_scatter"), half_factor),
    "all_gather": Collective(named("all_gather"), half_factor),
    "broadcast": Collective(named("broadcast"), one),
    "send, recv": Collective(named("send_recv"), one),
}
# Ranks of one GPU are of one launch, which changes what this one waits for.
LOCAL = {"two_shot_in_place": Collective(named("local two_shot_in_place"), all_reduce_factor)}


def bound_us(kernels: list[Kernel], system: System) -> float:
    """At least so long; kernels run one after the other."""
    total_us = 0.0
    for one in kernels:
        if system.link is None:
            busiest_us = one.memory_of_all / system.memory.value / BYTES_PER_US
        else:
            on_links = max(one.links_out, one.links_in) / system.link.value
            in_memory = (one.memory_read + one.memory_written) / system.memory.value
            busiest_us = max(on_links, in_memory) / BYTES_PER_US
        total_us += system.launch.value + one.num_waits * system.flag.value + busiest_us
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
    collectives = COLLECTIVES if system.link else COLLECTIVES | LOCAL
    grids = []
    for num_ranks in args.ranks:
        rows = []
        for name, collective in collectives.items():
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
        rows = []
        for name, collective in COLLECTIVES.items():
            kernels = collective.kernels(Shape(1, DTYPES[args.dtype], num_ranks))
            totals = [sum(parts) for parts in zip(*kernels, strict=True)]
            out, into, read, written, _, messages, waits = totals
            numbers = [*map(short, (out, into, read, written)), str(messages), str(waits)]
            rows.append([name, *numbers, str(len(kernels))])
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
    shape = Shape(1, DTYPES[args.dtype], 1)
    memory = SYSTEMS[args.system].memory.value
    rows = []
    for name, dtype, is_scaled in BUCKET_WIRES:
        wire_bytes = wire_bytes_of(dtype, is_scaled)
        row = [name]
        for one in (pack(shape, wire_bytes), unpack(shape, wire_bytes)):
            rate = short(memory / one.memory_of_all)
            row += [f"{one.memory_read:.3f}", f"{one.memory_written:.3f}", rate]
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
