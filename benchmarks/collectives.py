"""Collective microbenchmark like nccl-tests: rota, Gloo, MPI, and a memcpy roofline.

    python benchmarks/collectives.py --op all_reduce --ranks 2 -b 4 -e 64M -f 4 -c

It starts its own ranks. All backends stay alive for the whole run, take turns at each size, and
sleep between turns. Both interfaces of rota are measured: torch.distributed ("rota dist") and
rota.Communicator ("rota comm"). All have tensors of ordinary pages.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import interleave
import machine
import mpi_env
import picture
import report
from arguments import (
    Parser,
    add_common_arguments,
    add_message_sizes,
    parse_list,
    sizes_of,
)
from operations import MESSAGES, OPERATIONS
from protocol import FAKE_AND_BARRIER, ROTA_EMPTY, Entry, Reply, Turn
from record import Run
from torch_worker import start_torch_ranks
from workers import Workers

ALGORITHMS = ("auto", "one_shot", "two_shot", "ordered_ring", "ring")
WIRE_DTYPES = ("none", "float16", "bfloat16", "float32")
BACKENDS = ("rota", "gloo", "fake", "mpi", *mpi_env.IMPLEMENTATIONS)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
ORDERS = ("rank", "tree")
SUMS = ("all_reduce", "reduce", "reduce_scatter")
NOT_IN_MPI = ("float16", "bfloat16")
MEMCPY = Entry(report.ROOFLINE, report.ROOFLINE, "numpy")


def parse_arguments() -> tuple[argparse.Namespace, list[int]]:
    """The command line, and the elements of each size; a bad one ends the process in one line."""
    parser = Parser(__doc__)
    add = parser.add
    add(
        "--op",
        choices=OPERATIONS,
        default="all_reduce",
        help="the collective; or send_recv, a message from rank 0 to rank 1 and back; or one_way, "
        "many in a row from rank 0 to rank 1",
    )
    add(
        "--backends",
        type=parse_list(BACKENDS),
        default="rota,gloo,mpi",
        help=f"some of {', '.join(BACKENDS)}; mpi is every MPI that `make bench` has set up; fake "
        "is torch's backend that moves nothing, which shows what torch.distributed itself takes, "
        "with rota also if each call waits for all ranks; a memcpy of as many bytes on every rank "
        "at once is always measured",
    )
    add("--dtype", choices=DTYPES, default="float32", help="of the elements")
    add_message_sizes(parser, "4", "64M", 4)
    for name, of, choices in (
        ("--algorithms", "rota.Communicator.all_reduce", ALGORITHMS),
        ("--wire-dtype", "rota.Communicator.all_reduce", WIRE_DTYPES),
        ("--orders", "rota.Communicator's sums", ORDERS),
    ):
        some = f"of {of}: some of {', '.join(choices)}"
        add(name, type=parse_list(choices), default=choices[0], help=some)
    add("--empty", action="store_true", help="rota.Communicator on tensors of rota.empty(), too")
    add_common_arguments(parser)
    add("--png", type=Path, help="where to draw the picture (default: beside the record)")
    add("--mpi-root", type=Path, default=mpi_env.DEFAULT_ROOT, help="MPI environments")
    args = parser.parse_args()

    sizes = sizes_of(args, parser)
    if args.op != "all_reduce" and (args.algorithms, args.wire_dtype) != (["auto"], ["none"]):
        parser.error("--algorithms and --wire-dtype are for --op all_reduce")
    if args.op not in SUMS and args.orders != ["rank"]:
        parser.error(f"--orders is for --op {', '.join(SUMS)}")
    if args.op in MESSAGES and args.ranks != 2:
        parser.error(f"--ranks is {args.ranks}; --op {args.op} measures two ranks")
    if args.op == "barrier" and args.png:
        parser.error("--png: a barrier has no sizes to draw")
    return args, message_elems(args, sizes)


def message_elems(args: argparse.Namespace, sizes: list[int]) -> list[int]:
    """Elements of the message at each size: at least one, or one per rank where it has parts."""
    if args.op == "barrier":
        return [0]
    item_bytes = getattr(torch, args.dtype).itemsize
    parts = OPERATIONS[args.op].num_parts(args.ranks)
    elems = [max(1, num_bytes // item_bytes // parts) * parts for num_bytes in sizes]
    return list(dict.fromkeys(elems))


def usable_mpis(args: argparse.Namespace, run: Run) -> list[str]:
    """The MPIs to measure; notes why others that were asked for are not available."""
    asked = [name for name in mpi_env.IMPLEMENTATIONS if {"mpi", name} & set(args.backends)]
    if asked and args.dtype in NOT_IN_MPI:
        run.note(f"{', '.join(asked)}: not measured, MPI has no datatype for {args.dtype}")
        return []
    missing = {name: mpi_env.why_missing(args.mpi_root, name) for name in asked}
    for name, reason in missing.items():
        if reason is not None:
            run.note(f"{name}: {reason}")
    return [name for name, reason in missing.items() if reason is None]


def entries_of(args: argparse.Namespace) -> list[Entry]:
    """What torch's ranks measure, in the order of the table."""
    entries = []
    if "rota" in args.backends:
        entries.append(Entry("rota dist", "rota", "torch.distributed"))
        for wire_dtype, algorithm, order in itertools.product(
            args.wire_dtype, args.algorithms, args.orders
        ):
            usual = "auto", "none", "rank"
            chosen = algorithm, wire_dtype, order
            named = [name for name, usually in zip(chosen, usual, strict=True) if name != usually]
            label = " ".join(["rota comm", *named])
            wire = None if wire_dtype == "none" else wire_dtype
            entries.append(Entry(label, "rota", "rota.Communicator", algorithm, wire, order))
        if args.empty:
            entries.append(Entry("rota empty", "rota", ROTA_EMPTY))
    for backend in ("gloo", "fake"):
        if backend in args.backends:
            entries.append(Entry(backend, backend, "torch.distributed"))
    if {"fake", "rota"} <= set(args.backends):
        entries.append(Entry(FAKE_AND_BARRIER, FAKE_AND_BARRIER, "torch.distributed"))
    return entries


def main() -> None:
    args, sizes = parse_arguments()
    name = args.op if args.op == "barrier" else f"{args.op}-{args.dtype}"
    with Run("collectives", args.ranks, args, name) as run, ExitStack() as jobs:
        torch_ranks = jobs.enter_context(Workers(args.timeout))
        entries, versions = start_torch_ranks(torch_ranks, run, args.ranks, entries_of(args))
        libraries: dict[str, Any] = {"torch": versions}
        mpi_ranks = {}
        for mpi in usable_mpis(args, run):
            mpi_ranks[mpi] = jobs.enter_context(Workers(args.timeout))
            worker = [str(Path(__file__).with_name("mpi_worker.py"))]
            command = mpi_env.launch_command(args.mpi_root.absolute(), mpi, args.ranks, worker)
            mpi_ranks[mpi].launch(command, args.ranks, mpi_env.IMPLEMENTATIONS[mpi].env)
            libraries[mpi] = mpi_ranks[mpi].recv_all()[0].versions
            entries.append(Entry(mpi, mpi, "mpi4py"))
        if not entries:
            sys.exit("error: none of the backends asked for can be measured")
        if args.op != "barrier":
            entries.append(MEMCPY)

        def ask(turn: Turn) -> list[Reply]:
            return mpi_ranks.get(turn.entry.backend, torch_ranks).ask(turn)

        measurements = interleave.measure_sizes(entries, ask, args.op, sizes, args, args.dtype)
        for ranks in mpi_ranks.values():
            ranks.stop()
        summary: dict[str, Any] = {}
        if args.op != "barrier":
            png = args.png or run.json_path.with_suffix(".png")
            title = f"{args.op} of {args.dtype}, {args.ranks} ranks on {machine.num_cores()} cores"
            picture.draw(png, measurements, title, run.subtitle())
            summary["png"] = str(png)
        run.publish(measurements, libraries, list(mpi_ranks), **summary)


if __name__ == "__main__":
    main()
