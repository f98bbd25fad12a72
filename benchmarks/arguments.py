"""Command-line arguments that the benchmark scripts share, and argparse types."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from exact import MAX_SUM

FLOAT32_BYTES = 4

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Keeps the description's line breaks, shows defaults, and reports a bad argument in a line."""

    def __init__(self, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """Ends the process without the usage that argparse would print; --help prints it."""
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def add(self, *names: str, help: str = "", **options: Any) -> None:
        """add_argument, whose help ends in the default, if there is one."""
        if options.get("default") is not None:
            help = f"{help} (default: %(default)s)".strip()
        self.add_argument(*names, help=help, **options)

    def add_json(self) -> None:
        record = "the record (default: in benchmarks/results), whose summary is the last line"
        self.add("--json", type=Path, help=record)


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


def parse_each(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type: values of another, separated by commas, each kept once."""
    return lambda text: list(dict.fromkeys(map(parse, text.split(","))))


def parse_list(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of `choices`, separated by commas, each kept once."""

    def parse(name: str) -> str:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return name

    return parse_each(parse)


def parse_bucket_sizes(text: str) -> list[int]:
    """An argparse type: bytes of "25M,64M", for buckets of float32."""
    sizes = parse_each(parse_size)(text)
    if min(sizes) < FLOAT32_BYTES:
        raise argparse.ArgumentTypeError("a bucket holds at least one float32 (4 bytes)")
    return sizes


def add_message_sizes(parser: Parser, begin: str, end: str, factor: int) -> None:
    parser.add("-b", "--begin", type=parse_size, default=begin, help="smallest message")
    parser.add("-e", "--end", type=parse_size, default=end, help="largest message")
    parser.add("-f", "--factor", type=parse_natural(2), default=factor, help="from size to size")


def add_common_arguments(parser: Parser) -> None:
    # With more ranks, sums would not be exact in every dtype.
    parser.add("--ranks", type=parse_natural(2, MAX_SUM), default=2, help="to start")
    add_measuring_arguments(parser)


def add_measuring_arguments(parser: Parser) -> None:
    add, natural = parser.add, parse_natural(1)
    add("-n", "--iters", type=natural, metavar="N", default=20, help="timed samples a turn")
    add("-w", "--warmup", type=natural, metavar="N", default=5, help="untimed samples a turn")
    turns = "turns of each backend at each size, pooled"
    add("--repeats", type=natural, metavar="N", default=10, help=turns)
    add("-c", "--check", action="store_true", help="compare results with the exact ones: #wrong")
    limit = "fail when one turn of one backend takes longer"
    add("--timeout", type=natural, default=120, metavar="SECONDS", help=limit)
    parser.add_json()


def sizes_of(args: argparse.Namespace, parser: Parser) -> list[int]:
    """The sizes in bytes from -b to -e, each -f times the one before."""
    if args.end < args.begin:
        parser.error(f"-e {args.end} bytes is less than -b {args.begin} bytes")
    sizes = [args.begin]
    while sizes[-1] * args.factor <= args.end:
        sizes.append(sizes[-1] * args.factor)
    return sizes
