"""Command-line arguments that the benchmark scripts share, and argparse types."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from exact import MAX_SUM
from interleave import Plan

FLOAT32_BYTES = 4


class Parser(argparse.ArgumentParser):
    """Keeps the description's line breaks, and reports a bad argument in one line."""

    def __init__(self, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """Ends the process without the usage that argparse would print; --help prints it."""
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def parse_size(text: str) -> int:
    """Bytes of "4", "64K", "1M" or "1G" (powers of 1024)."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    shift = {"": 0, "K": 10, "M": 20, "G": 30}.get(unit)
    if shift is None or not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected bytes such as 4, 64K or 1M"
        )
    return int(digits) << shift


def parse_natural(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """An argparse type: whole numbers from `minimum` to `maximum`."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        if text.isdecimal() and int(text) >= minimum and (maximum is None or int(text) <= maximum):
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number {bounds}")

    return parse


def parse_list(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of `choices`, separated by commas, each kept once."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return names

    return parse


def parse_bucket_sizes(text: str) -> list[int]:
    """An argparse type: bytes of "25M,64M", for buckets of float32."""
    sizes = [parse_size(size) for size in text.split(",")]
    if min(sizes) < FLOAT32_BYTES:
        raise argparse.ArgumentTypeError("a bucket holds at least one float32 (4 bytes)")
    return sizes


def add_bucket_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the bucket sizes on which hooks are timed."""
    parser.add_argument(
        "--sizes",
        type=parse_bucket_sizes,
        default="25M,64M",
        help="bucket sizes (default: 25M,64M)",
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the number of ranks and samples, and for output files."""
    # With more ranks, sums would not be exact in every dtype.
    parser.add_argument(
        "--ranks", type=parse_natural(2, MAX_SUM), default=2, help="ranks to start (default: 2)"
    )
    add_measuring_arguments(parser)


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the number of samples, and for output files."""
    add = parser.add_argument
    add(
        "-n",
        "--iters",
        type=parse_natural(1),
        metavar="N",
        default=20,
        help="timed samples a turn (default: %(default)s)",
    )
    add(
        "-w",
        "--warmup",
        type=parse_natural(1),
        metavar="N",
        default=5,
        help="untimed samples a turn (default: %(default)s)",
    )
    add(
        "--repeats",
        type=parse_natural(1),
        metavar="N",
        default=10,
        help="turns of each backend at each size, pooled (default: %(default)s)",
    )
    add("-c", "--check", action="store_true", help="compare results with the exact ones: #wrong")
    add(
        "--timeout",
        type=parse_natural(1),
        default=120,
        metavar="SECONDS",
        help="fail when one turn of one backend takes longer (default: %(default)s)",
    )
    add("--json", type=Path, help="where to write the record (default: benchmarks/results/)")


def sizes_of(args: argparse.Namespace) -> list[int]:
    """The sizes in bytes from -b to -e, each -f times the one before."""
    sizes = []
    num_bytes = args.begin
    while num_bytes <= args.end:
        sizes.append(num_bytes)
        num_bytes *= args.factor
    return sizes


def plan_of(args: argparse.Namespace) -> Plan:
    """How much to measure, from the arguments."""
    return Plan(args.warmup, args.iters, args.repeats, args.check)
