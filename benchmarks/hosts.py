"""All-reduce over several hosts, which network namespaces simulate: rota, Gloo and plain TCP.

    python benchmarks/hosts.py --hosts 2x2 --rate 1gbit -b 4K -e 64M -f 16 -c

It needs the permission to make network namespaces. All hosts share the cores of this machine, and
their links have the rate that is asked for, with a burst and a queue that the record names.

`tcp` moves over plain connections what the wire must carry for a float32 all-reduce, in both
directions at once. The goodput of the run is that of the largest size, which should be much longer
than a burst. The bound of an entry is what each host must send, in the entry's wire dtype, at that
goodput; a message that fits in a burst can beat it. `gloo leaders` is Gloo among one rank of each
host. Bytes on the wire are counted at the interfaces, headers included (once for each packet of
many segments), and with the barrier that starts a turn, which shows at 4 KiB.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import error_bound
import host_network
import interleave
import report
import rota
from arguments import (
    FLOAT32_BYTES,
    Parser,
    add_measuring_arguments,
    add_message_sizes,
    parse_list,
    sizes_of,
)
from exact import MAX_FLOAT8_SUM
from host_network import HostNetwork, rate_bits_per_s
from interleave import Measurement
from protocol import Entry, Hello, Reply, Turn, time_samples
from record import Run
from report import optional
from torch_worker import TorchRank, greet, is_float8
from workers import Workers, serve

# Backends beside rota: plain sockets, and Gloo among all ranks or one of each host.
TCP, GLOO, GLOO_LEADERS = "tcp", "gloo", "gloo leaders"
BACKENDS = (TCP, GLOO, "rota")
WIRE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
UNLIMITED = "none"
MIB = 1 << 20
# The size of the buffers behind a send or recv; the kernel sizes those of the sockets.
CHUNK_BYTES = 1 << 20


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


def add_hosts(parser: Parser) -> None:
    layout = "hosts x ranks on each, or ranks host by host as in 3,1"
    parser.add("--hosts", type=parse_hosts, default="2x2", help=layout)


def parse_rate(text: str) -> str | None:
    """An argparse type: a rate, or None for UNLIMITED."""
    if text == UNLIMITED:
        return None
    try:
        rate_bits_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def sent_by_host(num_bytes: int, num_hosts: int) -> int:
    """Bytes that each host must send in an all-reduce, however many ranks it has: those of a
    reduce-scatter and an all-gather between hosts (Patarasuk & Yuan 2009)."""
    return 2 * (num_hosts - 1) * num_bytes // num_hosts


class TcpRing:
    """Sends to the next host while receiving from the one before, so that all links are busy in
    both directions, as in an all-reduce. One thread, and two connections where there are two hosts.
    `leaders`, a group of one rank of each host, is for the addresses."""

    def __init__(self, leaders: dist.ProcessGroup, host: int) -> None:
        addresses: list[Any] = [None] * leaders.size()
        with socket.create_server((host_network.address(host), 0)) as listener:
            dist.all_gather_object(addresses, listener.getsockname(), group=leaders)
            self._next = socket.create_connection(addresses[(host + 1) % len(addresses)])
            self._previous, _ = listener.accept()
        for connection in (self._next, self._previous):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self._source = memoryview(bytearray(CHUNK_BYTES))
        self._target = memoryview(bytearray(CHUNK_BYTES))

    def move(self, to_send: int, to_recv: int) -> None:
        """Sends and receives as many bytes; blocks until both are done."""
        while to_send or to_recv:
            num_moved = 0
            if to_send:
                num_moved += (moved := self._send(to_send))
                to_send -= moved
            if to_recv:
                num_moved += (moved := self._recv(to_recv))
                to_recv -= moved
            if num_moved == 0:
                select.select(
                    [self._previous] if to_recv else [], [self._next] if to_send else [], []
                )

    def _send(self, num_bytes: int) -> int:
        try:
            return self._next.send(self._source[:num_bytes])
        except BlockingIOError:
            return 0

    def _recv(self, num_bytes: int) -> int:
        try:
            num_received = self._previous.recv_into(self._target[:num_bytes])
        except BlockingIOError:
            return 0
        if num_received == 0:
            raise ConnectionError("the host before this one closed its connection")
        return num_received


class HostRank(TorchRank):
    """A rank with TCP's ring, and groups for the leaders and for rota in each wire dtype."""

    def __init__(self, num_ranks_per_host: list[int], wire_dtypes: list[str]) -> None:
        super().__init__({"rota"} if wire_dtypes else set())
        self.num_hosts = len(num_ranks_per_host)
        firsts = [sum(num_ranks_per_host[:host]) for host in range(self.num_hosts)]
        self._is_leader = self.rank in firsts
        leaders = self.groups[GLOO_LEADERS] = dist.new_group(firsts)
        host = int(os.environ["GROUP_RANK"])
        self._ring = TcpRing(leaders, host) if self._is_leader else None
        for name in wire_dtypes if self.rota is not None else ():
            options = rota.BackendOptions(
                inter_wire_dtype=getattr(torch, name), inter_block_scaling=is_float8(name)
            )
            self.groups[f"rota {name}"] = dist.new_group(backend="rota", pg_options=options)

    def take_turn(self, turn: Turn) -> Reply:
        """Checks one call if requested, then times calls; all ranks start together."""
        call: Callable[[], object] = _do_nothing
        if turn.entry.backend not in (TCP, GLOO_LEADERS) or (
            turn.entry.backend == GLOO_LEADERS and self._is_leader
        ):
            return super().take_turn(turn)
        if self._ring is not None:
            num_bytes = turn.num_elems * getattr(torch, turn.dtype).itemsize
            num_sent = sent_by_host(num_bytes, self.num_hosts)
            call = partial(self._ring.move, num_sent, num_sent)
        dist.barrier()
        return Reply(time_samples(call, turn), None)

    def group_of(self, entry: Entry) -> dist.ProcessGroup | None:
        return self.groups[entry.label]


def _do_nothing() -> None:
    pass


def rank_main(pipe: Connection, num_ranks_per_host: list[int], wire_dtypes: list[str]) -> None:
    """One rank, in the namespace and the environment of its host."""
    dist.init_process_group("gloo")
    worker = HostRank(num_ranks_per_host, wire_dtypes)
    pipe.send(Hello(worker.versions, worker.missing))
    serve(pipe, worker.take_turn)


def entries_of(args: argparse.Namespace) -> list[Entry]:
    entries = []
    if TCP in args.backends:
        entries.append(Entry(TCP, TCP, "socket"))
    if GLOO in args.backends:
        entries.append(Entry(GLOO, GLOO, "torch.distributed"))
        if max(args.hosts) > 1:
            entries.append(Entry(GLOO_LEADERS, GLOO_LEADERS, "torch.distributed"))
    if "rota" in args.backends:
        entries += [
            Entry(f"rota {wire_dtype}", "rota", "torch.distributed", wire_dtype=wire_dtype)
            for wire_dtype in args.wire_dtypes
        ]
    return entries


class WireCounter:
    """Counts what hosts send while ranks take their turns."""

    def __init__(self, network: HostNetwork, ranks: Workers) -> None:
        self._network = network
        self._ranks = ranks
        self._num_calls: Counter[tuple[Entry, int]] = Counter()
        self._num_bytes: Counter[tuple[Entry, int, int]] = Counter()  # by entry, size and host

    def ask(self, turn: Turn) -> list[Reply]:
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
    dtype = getattr(torch, entry.wire_dtype)
    return error_bound.rota_wire(dtype, is_float8(entry.wire_dtype)).elem_bytes


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


def print_rows(run: Run, rows: Sequence[dict[str, Any]]) -> None:
    headings = (
        *("backend", "min us", "p50 us", "p99 us", "Gloo's p50\n/ its", "bound us"),
        *("bound\n/ p50", "payload\nMiB", "sent\nMiB", "#wrong"),
    )
    for num_bytes, at_size in groupby(rows, key=lambda row: row["num_bytes"]):
        lines = [
            (
                row["label"],
                *(report.format_time(row[key]) for key in ("min_us", "p50_us", "p99_us")),
                optional(row["gloo_over_it"], ".2f"),
                optional(row["bound_us"], ".0f"),
                optional(row["share_of_bound"], ".1%"),
                *(f"{row[key] / MIB:.4g}" for key in ("payload_bytes", "sent_bytes")),
                optional(row["num_wrong"], "d"),
            )
            for row in at_size
        ]
        title = f"all_reduce of {report.format_bytes(num_bytes)}"
        report.print_table(run.console, title, headings, lines)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add
    add_hosts(parser)
    rate = f"of each link in each direction, or {UNLIMITED}"
    add("--rate", type=parse_rate, default="1gbit", help=rate)
    some = f"some of {', '.join(BACKENDS)}; no bound without tcp"
    add("--backends", type=parse_list(BACKENDS), default="tcp,gloo,rota", help=some)
    add(
        "--wire-dtypes",
        type=parse_list(WIRE_DTYPES),
        default="float32,float16,float8_e4m3fn",
        help=f"of rota between hosts: some of {', '.join(WIRE_DTYPES)}; float8 in scaled blocks",
    )
    add_message_sizes(parser, "4K", "64M", 16)
    add_measuring_arguments(parser)
    # A call takes up to seconds.
    parser.set_defaults(iters=5, warmup=1, repeats=4)
    args = parser.parse_args()
    sizes = [num_bytes // FLOAT32_BYTES for num_bytes in sizes_of(args, parser)]
    if args.begin < FLOAT32_BYTES:
        parser.error(f"-b {args.begin} bytes; float32 has {FLOAT32_BYTES}")

    name = f"hosts-{'+'.join(map(str, args.hosts))}-{args.rate or 'unlimited'}"
    with (
        Run("hosts", sum(args.hosts), args, name) as run,
        HostNetwork(len(args.hosts), args.rate) as network,
        Workers(args.timeout) as ranks,
    ):
        wire_dtypes = args.wire_dtypes if "rota" in args.backends else []
        for place in network.places(args.hosts):
            ranks.fork(rank_main, args.hosts, wire_dtypes, **place)
        entries, versions = greet(ranks, run, entries_of(args))
        if not entries:
            sys.exit("error: none of the backends asked for can be measured")
        counter = WireCounter(network, ranks)
        measurements = interleave.measure_sizes(entries, counter.ask, "all_reduce", sizes, args)
        rows = rows_of(measurements, counter, len(args.hosts))
        goodput = goodput_of(measurements, len(args.hosts))
        print_rows(run, rows)
        run.console.print(
            f"plain TCP: {optional(goodput, '.4f')} GB/s from each host and to it. Times are of "
            "one call on the slowest rank. Payload: what each host must send; sent: what the host "
            "that sent most did send.",
            soft_wrap=True,
        )
        run.finish(
            {
                "libraries": versions,
                "network": network.describe(),
                "tcp_goodput_gb_per_s": goodput and round(goodput, 6),
                "measurements": rows,
            },
            num_wrong=sum(result.num_wrong or 0 for result in measurements),
            tcp_goodput_gb_per_s=goodput,
            measurements=rows,
        )


if __name__ == "__main__":
    main()
