"""All-reduce over several hosts, which network namespaces simulate: rota, Gloo and plain TCP.

    python benchmarks/hosts.py --hosts 2x2 --rate 1gbit -b 4K -e 64M -f 16 -c

It needs the permission to make network namespaces. All hosts share the cores of this machine, and
their links have the rate that is asked for, with a burst and a queue that the record names.

`tcp` moves over plain connections what the wire must carry for a float32 all-reduce, in both
directions at once. The goodput of the run is that of the largest size, which should be much longer
than a burst. The bound of an entry is what each host must send, in the entry's wire dtype, at that
goodput; a message that fits in a burst can beat it. `gloo leaders` is Gloo among one rank of each
host. Bytes on the wire are counted at the interfaces, headers included (once for each packet of
many segments), and with the barrier that starts a turn, which shows at 4 KiB. The last line of the
output is JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import driver
import error_bound
import interleave
import report
from arguments import (
    FLOAT32_BYTES,
    Parser,
    add_measuring_arguments,
    parse_list,
    parse_natural,
    parse_size,
    plan_of,
    sizes_of,
)
from exact import MAX_FLOAT8_SUM
from host_network import HostNetwork, rank_environments, rate_bits_per_s
from hosts_worker import is_float8, sent_by_host
from interleave import Measurement
from protocol import GLOO_LEADERS, TCP, Entry, Reply, Turn
from ranks import RankGroup

BACKENDS = (TCP, "gloo", "rota")
WIRE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
UNLIMITED = "none"
MIB = 1 << 20


def parse_hosts(text: str) -> list[int]:
    """An argparse type: ranks per host of "2x2" (hosts x ranks of each) or "3,1" (host by host)."""
    hosts, cross, ranks = text.partition("x")
    counts = [ranks] * int(hosts) if cross and hosts.isdecimal() else text.split(",")
    if len(counts) < 2 or not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected such as 2x3 (2 hosts with 3 ranks each) or 3,1, with 2 hosts or "
            "more"
        )
    if (num_ranks := sum(map(int, counts))) > MAX_FLOAT8_SUM:
        # With more, sums would not be exact in every dtype.
        raise argparse.ArgumentTypeError(f"{num_ranks} ranks, expected at most {MAX_FLOAT8_SUM}")
    return [int(count) for count in counts]


def parse_rate(text: str) -> str | None:
    """An argparse type: a rate, or None for UNLIMITED."""
    if text == UNLIMITED:
        return None
    try:
        rate_bits_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a bad one ends the process with a one-line error."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--hosts",
        type=parse_hosts,
        default="2x2",
        help="hosts x ranks on each, or ranks host by host as in 3,1 (default: 2x2)",
    )
    add(
        "--rate",
        type=parse_rate,
        default="1gbit",
        help=f"of each link in each direction, or {UNLIMITED} (default: 1gbit)",
    )
    add(
        "--backends",
        type=parse_list(BACKENDS),
        default="tcp,gloo,rota",
        help=f"some of {', '.join(BACKENDS)}; no bound without tcp (default: %(default)s)",
    )
    add(
        "--wire-dtypes",
        type=parse_list(WIRE_DTYPES),
        default="float32,float16,float8_e4m3fn",
        help=f"of rota between hosts: some of {', '.join(WIRE_DTYPES)}; float8 in scaled blocks "
        "(default: %(default)s)",
    )
    add("-b", "--begin", type=parse_size, default="4K", help="smallest message (default: 4K)")
    add("-e", "--end", type=parse_size, default="64M", help="largest message (default: 64M)")
    add("-f", "--factor", type=parse_natural(2), default=16, help="from size to size (default: 16)")
    add_measuring_arguments(parser)
    # A call takes up to seconds.
    parser.set_defaults(iters=5, warmup=1, repeats=4)
    args = parser.parse_args()
    if args.end < args.begin:
        parser.error(f"-e {args.end} bytes is less than -b {args.begin} bytes")
    if args.begin < FLOAT32_BYTES:
        parser.error(f"-b {args.begin} bytes; float32 has {FLOAT32_BYTES}")
    return args


def entries_of(args: argparse.Namespace) -> list[Entry]:
    """Everything to measure, in the order of the table."""
    entries = []
    if TCP in args.backends:
        entries.append(Entry(TCP, TCP, "socket"))
    if "gloo" in args.backends:
        entries.append(Entry("gloo", "gloo", "torch.distributed"))
        if max(args.hosts) > 1:
            entries.append(Entry(GLOO_LEADERS, GLOO_LEADERS, "torch.distributed"))
    if "rota" in args.backends:
        entries += [
            Entry(f"rota {wire_dtype}", "rota", "torch.distributed", wire_dtype=wire_dtype)
            for wire_dtype in args.wire_dtypes
        ]
    return entries


def start_ranks(args: argparse.Namespace, network: HostNetwork, run_dir: Path) -> RankGroup:
    """The ranks of all hosts, each in the namespace of its host."""
    worker = [sys.executable, str(driver.HERE / "hosts_worker.py")]
    worker += ["--ranks-per-host", ",".join(map(str, args.hosts))]
    worker += ["--wire-dtypes", ",".join(args.wire_dtypes) if "rota" in args.backends else ""]
    commands = []
    for values in rank_environments(args.hosts, network.serve_store()):
        assignments = [f"{name}={value}" for name, value in values.items()]
        host = network.hosts[int(values["GROUP_RANK"])]
        commands.append(host.command("env", *assignments, *worker))
    env = {"OMP_NUM_THREADS": "1"}
    return RankGroup("hosts", sum(args.hosts), commands, env, run_dir, args.timeout)


class WireCounter:
    """Counts what hosts send while ranks take their turns."""

    def __init__(self, network: HostNetwork, ranks: RankGroup) -> None:
        self._network = network
        self._ranks = ranks
        self._num_calls: Counter[tuple[Entry, int]] = Counter()
        self._num_bytes: Counter[tuple[Entry, int, int]] = Counter()  # by entry, size and host

    def ask(self, turn: Turn) -> list[Reply]:
        """Every rank's measurement of the turn."""
        before = self._sent()
        replies = self._ranks.ask(turn)
        for host, (first, last) in enumerate(zip(before, self._sent(), strict=True)):
            self._num_bytes[turn.entry, turn.num_elems, host] += last - first
        num_samples = turn.num_warmups + turn.num_samples
        num_checks = 0 if turn.check_seed is None or turn.entry.backend == TCP else 1
        self._num_calls[turn.entry, turn.num_elems] += num_samples * turn.batch + num_checks
        return replies

    def bytes_per_call(self, result: Measurement) -> float:
        """What the host that sent most sent in a call, on average."""
        key = result.entry, result.num_elems
        num_hosts = len(self._network.hosts)
        most = max(self._num_bytes[(*key, host)] for host in range(num_hosts))
        return most / self._num_calls[key]

    def _sent(self) -> list[int]:
        return [self._network.traffic(host).sent for host in range(len(self._network.hosts))]


def wire_bytes_per_elem(entry: Entry) -> float:
    """Bytes of a float32 element between hosts, with its share of a block's scale."""
    if entry.wire_dtype is None:
        return FLOAT32_BYTES
    wire = error_bound.rota_wire(getattr(torch, entry.wire_dtype), is_float8(entry.wire_dtype))
    return wire.dtype.itemsize + (1 / wire.block_elems if wire.block_elems else 0.0)


def goodput_of(measurements: Sequence[Measurement], num_hosts: int) -> float | None:
    """Plain TCP's goodput at the largest size in GB/s, from a host and to it; None if not
    measured."""
    of_tcp = [result for result in measurements if result.entry.backend == TCP]
    if not of_tcp:
        return None
    longest = max(of_tcp, key=lambda result: result.num_bytes)
    return sent_by_host(longest.num_bytes, num_hosts) / longest.p50_us / 1e3


def rows_of(
    measurements: Sequence[Measurement], counter: WireCounter, num_hosts: int
) -> list[dict[str, Any]]:
    """The rows of the record: times, and how they compare with Gloo and with the wire's bound."""
    goodput = goodput_of(measurements, num_hosts)
    rows = []
    for _, at_size in groupby(measurements, key=lambda result: result.num_bytes):
        results = list(at_size)
        gloo_us = {result.entry.label: result.p50_us for result in results}.get("gloo")
        for result in results:
            payload = sent_by_host(result.num_bytes, num_hosts)
            payload_bytes = payload * wire_bytes_per_elem(result.entry) / FLOAT32_BYTES
            bound_us = goodput and payload_bytes / goodput / 1e3
            rows.append(
                {
                    **report.row(result, None),
                    "gloo_over_it": gloo_us and round(gloo_us / result.p50_us, 4),
                    "payload_bytes": round(payload_bytes),
                    "sent_bytes": round(counter.bytes_per_call(result)),
                    "bound_us": bound_us and round(bound_us, 3),
                    "share_of_bound": bound_us and round(bound_us / result.p50_us, 4),
                }
            )
    return rows


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One table per size."""
    headings = (
        *("backend", "min us", "p50 us", "p99 us", "Gloo's p50\n/ its", "bound us"),
        *("bound\n/ p50", "payload\nMiB", "sent\nMiB", "#wrong"),
    )
    for num_bytes, at_size in groupby(rows, key=lambda row: row["num_bytes"]):
        lines = [
            (
                row["label"],
                *(report.format_time(row[key]) for key in ("min_us", "p50_us", "p99_us")),
                _optional(row["gloo_over_it"], ".2f"),
                _optional(row["bound_us"], ".0f"),
                _optional(row["share_of_bound"], ".1%"),
                *(f"{row[key] / MIB:.4g}" for key in ("payload_bytes", "sent_bytes")),
                _optional(row["num_wrong"], "d"),
            )
            for row in at_size
        ]
        title = f"all_reduce of {report.format_bytes(num_bytes)}"
        report.print_labelled(console, title, headings, lines)


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run: makes hosts, starts ranks, measures, prints, writes and sums up."""
    layout = "+".join(map(str, args.hosts))
    name = f"hosts-{layout}-{args.rate or 'unlimited'}"
    run = driver.Run("hosts", name, sum(args.hosts), args)
    with (
        tempfile.TemporaryDirectory(prefix="rota-bench-") as folder,
        HostNetwork(len(args.hosts), args.rate) as network,
    ):
        group = start_ranks(args, network, Path(folder))
        counter = WireCounter(network, group)
        with driver.running([group]):
            entries = driver.drop_missing(run, entries_of(args), group)
            if not entries:
                sys.exit("error: none of the backends asked for can be measured")
            sizes = [num_bytes // FLOAT32_BYTES for num_bytes in sizes_of(args)]
            measurements = interleave.measure_sizes(
                entries, counter.ask, "all_reduce", "float32", sizes, FLOAT32_BYTES, plan_of(args)
            )
        rows = rows_of(measurements, counter, len(args.hosts))
        network_facts = network.describe()

    goodput = goodput_of(measurements, len(args.hosts))
    run.write_record(
        {
            "libraries": group.hellos[0].versions,
            "network": network_facts,
            "tcp_goodput_gb_per_s": goodput and round(goodput, 6),
            "measurements": rows,
        }
    )
    print_rows(run.console, rows)
    run.console.print(
        f"plain TCP: {_optional(goodput, '.4f')} GB/s from each host and to it. Times are of one "
        "call on the slowest rank. Payload: what each host must send; sent: what the host that "
        "sent most did send.",
        soft_wrap=True,
    )
    by_entry: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_entry.setdefault(row["label"], {})[row["num_bytes"]] = {
            key: row[key] for key in ("p50_us", "gloo_over_it", "share_of_bound", "sent_bytes")
        }
    return {
        "benchmark": "hosts",
        "json": str(run.json_path),
        "num_wrong": sum(result.num_wrong or 0 for result in measurements),
        "tcp_goodput_gb_per_s": goodput,
        "measurements": by_entry,
    }


def main() -> int:
    """Returns the exit status: 0 if everything was measured and no result was wrong."""
    args = parse_arguments()
    return driver.exit_status(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
