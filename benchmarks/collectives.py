"""Collective microbenchmark like nccl-tests: rota, Gloo, MPI, and a memcpy roofline.

    python benchmarks/collectives.py --op all_reduce --ranks 2 -b 4 -e 64M -f 4 -c

It starts its own ranks. All backends stay alive for the whole run, take turns at each size, and
sleep between turns. Both interfaces of rota are measured: torch.distributed ("rota dist") and
rota.Communicator ("rota comm"). All have tensors of ordinary pages. The last line of the output is
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import driver
import interleave
import machine
import mpi_env
import picture
import report
from arguments import (
    Parser,
    add_common_arguments,
    parse_list,
    parse_natural,
    parse_size,
    plan_of,
    sizes_of,
)
from operations import MESSAGES, OPERATIONS
from protocol import FAKE_AND_BARRIER, ROTA_EMPTY, Entry, Reply, Turn
from ranks import RankGroup

ALGORITHMS = ("auto", "one_shot", "two_shot", "ordered_ring", "ring")
WIRE_DTYPES = ("none", "float16", "bfloat16", "float32")
BACKENDS = ("rota", "gloo", "fake", "mpi", *mpi_env.IMPLEMENTATIONS)
ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
ORDERS = ("rank", "tree")
SUMS = ("all_reduce", "reduce", "reduce_scatter")
NOT_IN_MPI = ("float16", "bfloat16")
MEMCPY = Entry(report.ROOFLINE, report.ROOFLINE, "numpy")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--op",
        choices=OPERATIONS,
        default="all_reduce",
        help="the collective; or send_recv, a message from rank 0 to rank 1 and back; or one_way, "
        "many in a row from rank 0 to rank 1 (default: all_reduce)",
    )
    add(
        "--backends",
        type=parse_list(BACKENDS),
        default="rota,gloo,mpi",
        help=f"some of {', '.join(BACKENDS)}; mpi is every MPI that `make bench` has set up; fake "
        "is torch's backend that moves nothing, which shows what torch.distributed itself takes, "
        "with rota also if each call waits for all ranks; a memcpy of as many bytes on every rank "
        "at once is always measured (default: %(default)s)",
    )
    add("--dtype", choices=ITEM_BYTES, default="float32", help="element type (default: float32)")
    add("-b", "--begin", type=parse_size, default="4", help="smallest message (default: 4)")
    add("-e", "--end", type=parse_size, default="64M", help="largest message (default: 64M)")
    add("-f", "--factor", type=parse_natural(2), default=4, help="from size to size (default: 4)")
    add(
        "--algorithms",
        type=parse_list(ALGORITHMS),
        default="auto",
        help=f"of rota.Communicator.all_reduce: some of {', '.join(ALGORITHMS)} (default: auto)",
    )
    add(
        "--wire-dtype",
        type=parse_list(WIRE_DTYPES),
        default="none",
        help=f"of rota.Communicator.all_reduce: some of {', '.join(WIRE_DTYPES)} (default: none)",
    )
    add(
        "--orders",
        type=parse_list(ORDERS),
        default="rank",
        help=f"of rota.Communicator's sums: some of {', '.join(ORDERS)} (default: rank)",
    )
    add("--empty", action="store_true", help="rota.Communicator on tensors of rota.empty(), too")
    add_common_arguments(parser)
    add("--png", type=Path, help="where to draw the picture (default: beside the record)")
    add("--mpi-root", type=Path, default=mpi_env.DEFAULT_ROOT, help="MPI environments (.venv-mpi)")
    args = parser.parse_args()

    if args.end < args.begin:
        parser.error(f"-e {args.end} bytes is less than -b {args.begin} bytes")
    if args.op != "all_reduce" and (args.algorithms, args.wire_dtype) != (["auto"], ["none"]):
        parser.error("--algorithms and --wire-dtype are for --op all_reduce")
    if args.op not in SUMS and args.orders != ["rank"]:
        parser.error(f"--orders is for --op {', '.join(SUMS)}")
    if args.op in MESSAGES and args.ranks != 2:
        parser.error(f"--ranks is {args.ranks}; --op {args.op} measures two ranks")
    if args.op == "barrier" and args.png:
        parser.error("--png: a barrier has no sizes to draw")
    return args


def message_elems(args: argparse.Namespace) -> list[int]:
    """Elements of the message at each size: at least one, or one per rank where it has parts."""
    if args.op == "barrier":
        return [0]
    item_bytes = ITEM_BYTES[args.dtype]
    parts = OPERATIONS[args.op].num_parts(args.ranks)
    sizes = [max(1, num_bytes // item_bytes // parts) * parts for num_bytes in sizes_of(args)]
    return list(dict.fromkeys(sizes))


def usable_mpis(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The MPIs to measure, and a note for each requested MPI that is not available."""
    asked = [name for name in mpi_env.IMPLEMENTATIONS if {"mpi", name} & set(args.backends)]
    if asked and args.dtype in NOT_IN_MPI:
        return [], [f"{', '.join(asked)}: not measured, MPI has no datatype for {args.dtype}"]
    missing = {name: mpi_env.why_missing(args.mpi_root, name) for name in asked}
    usable = [name for name, reason in missing.items() if reason is None]
    return usable, [f"{name}: {reason}" for name, reason in missing.items() if reason is not None]


def entries_of(args: argparse.Namespace, mpis: list[str]) -> list[Entry]:
    """Everything to measure, in the order of the table."""
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
    if "gloo" in args.backends:
        entries.append(Entry("gloo", "gloo", "torch.distributed"))
    if "fake" in args.backends:
        entries.append(Entry("fake", "fake", "torch.distributed"))
        if "rota" in args.backends:
            entries.append(Entry(FAKE_AND_BARRIER, FAKE_AND_BARRIER, "torch.distributed"))
    entries += [Entry(name, name, "mpi4py") for name in mpis]
    return entries if args.op == "barrier" else [*entries, MEMCPY]


def mpi_ranks(name: str, args: argparse.Namespace, run_dir: Path) -> RankGroup:
    """The ranks of one MPI, under its own mpiexec and interpreter."""
    worker = [str(driver.HERE / "mpi_worker.py")]
    command = mpi_env.launch_command(args.mpi_root.absolute(), name, args.ranks, worker)
    env = mpi_env.IMPLEMENTATIONS[name].env
    return RankGroup(name, args.ranks, [command], env, run_dir, args.timeout)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: starts ranks, measures every size, prints, writes and sums up."""
    name = args.op if args.op == "barrier" else f"{args.op}-{args.dtype}"
    run = driver.Run("collectives", name, args.ranks, args)
    mpis, notes = usable_mpis(args)
    entries = entries_of(args, mpis)
    for note in notes:
        run.note(note)

    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        run_dir = Path(folder)
        torch_group = driver.torch_ranks(args, args.backends, run_dir)
        mpi_groups = {name: mpi_ranks(name, args, run_dir) for name in mpis}
        groups = [torch_group, *mpi_groups.values()]

        def ask(turn: Turn) -> list[Reply]:
            return mpi_groups.get(turn.entry.backend, torch_group).ask(turn)

        with driver.running(groups):
            entries = driver.drop_missing(run, entries, torch_group)
            if set(entries) <= {MEMCPY}:
                sys.exit("error: none of the backends asked for can be measured")
            item_bytes = ITEM_BYTES[args.dtype]
            measurements = interleave.measure_sizes(
                entries, ask, args.op, args.dtype, message_elems(args), item_bytes, plan_of(args)
            )

    result = run.publish(measurements, groups, mpis)
    if args.op != "barrier":
        png = args.png or run.json_path.with_suffix(".png")
        title = f"{args.op} of {args.dtype}, {args.ranks} ranks on {machine.num_cores()} cores"
        picture.draw(png, measurements, title, run.subtitle())
        result["png"] = str(png)
    return result


def main() -> int:
    """Returns the exit status: 0 if everything was measured and no result was wrong."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
