"""One rank of benchmarks/hosts.py, in the namespace of its host: Gloo, rota and plain TCP.

The environment is that of host_network.rank_environments.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import host_network
import tiles
from exact import MAX_FLOAT8_SUM, MAX_SUM
from protocol import GLOO_LEADERS, TCP, Entry, Hello, Reply, Turn, serve, time_samples

# Of the buffers behind a send or recv; the kernel sizes those of the sockets.
CHUNK_BYTES = 1 << 20


def sent_by_host(num_bytes: int, num_hosts: int) -> int:
    """Bytes that each host must send in an all-reduce, however many ranks it has: those of a
    reduce-scatter and an all-gather between hosts (Patarasuk & Yuan 2009)."""
    return 2 * (num_hosts - 1) * num_bytes // num_hosts


class TcpRing:
    """Sends to the next host while receiving from the one before, so that all links are busy in
    both directions, as in an all-reduce. One thread, and two connections where there are two hosts.

    Args:
        leaders: the group of one rank of each host, for the addresses.
        host: this rank's.
    """

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

    def exchange(self, num_bytes: int) -> None:
        """Sends and receives `num_bytes`; blocks until both are done."""
        self.move(num_bytes, num_bytes)

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


class HostRank:
    """The process groups and connections of this rank; Gloo's default group synchronises ranks.

    Args:
        num_ranks_per_host: host by host.
        wire_dtypes: of rota between hosts, by name; a group for each.
    """

    def __init__(self, num_ranks_per_host: list[int], wire_dtypes: list[str]) -> None:
        self.rank = dist.get_rank()
        self.host = int(os.environ["GROUP_RANK"])
        self.num_hosts = len(num_ranks_per_host)
        self.versions = {"torch": str(torch.__version__)}
        self.missing: dict[str, str] = {}
        firsts = [sum(num_ranks_per_host[:host]) for host in range(self.num_hosts)]
        self._is_leader = self.rank in firsts
        self._leaders = dist.new_group(firsts)
        self._ring = TcpRing(self._leaders, self.host) if self._is_leader else None
        self._rota: dict[str, dist.ProcessGroup] = {}
        if wire_dtypes:
            self._start_rota(wire_dtypes)

    def _start_rota(self, wire_dtypes: list[str]) -> None:
        try:
            import rota
        except ImportError as error:
            self.missing["rota"] = f"rota is not built: run make venv ({error})"
            return
        self.versions["rota"] = rota.__version__
        make_options: Callable[..., Any] = rota.BackendOptions
        for name in wire_dtypes:
            try:
                options = make_options(
                    inter_wire_dtype=getattr(torch, name),
                    inter_block_scaling=is_float8(name),
                )
            except TypeError as error:
                self.missing["rota"] = f"this rota has no wire dtype between hosts ({error})"
                return
            self._rota[name] = dist.new_group(backend="rota", pg_options=options)

    def take_turn(self, turn: Turn) -> Reply:
        """Checks one call if requested, then times calls; all ranks start together."""
        call: Callable[[], object]
        num_wrong: int | None = None
        if turn.entry.backend in (TCP, GLOO_LEADERS) and not self._is_leader:
            call = _do_nothing
        elif turn.entry.backend == TCP:
            assert self._ring is not None
            num_bytes = turn.num_elems * getattr(torch, turn.dtype).itemsize
            call = partial(self._ring.exchange, sent_by_host(num_bytes, self.num_hosts))
        else:
            call, num_wrong = self._all_reduce_call(turn)
        dist.barrier()
        return Reply(time_samples(call, turn), num_wrong)

    def _all_reduce_call(self, turn: Turn) -> tuple[Callable[[], object], int | None]:
        """The call to time, and the number of wrong elements after a first one; timed on zeros,
        like collectives.py."""
        tensor = torch.zeros(turn.num_elems, dtype=getattr(torch, turn.dtype))
        group = self._group_of(turn.entry)
        call = partial(dist.all_reduce, tensor, group=group)
        if turn.check_seed is None:
            return call, None
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        # Partial sums must be exact on the wire, too.
        max_sum = MAX_FLOAT8_SUM if is_float8(turn.entry.wire_dtype or "") else MAX_SUM
        tiles.fill_with_input(tensor, rank, num_ranks, turn.check_seed, max_sum=max_sum)
        call()
        num_wrong = tiles.count_wrong(tensor, turn.op, num_ranks, turn.check_seed, max_sum=max_sum)
        tensor.zero_()
        return call, num_wrong

    def _group_of(self, entry: Entry) -> dist.ProcessGroup | None:
        if entry.backend == GLOO_LEADERS:
            group: dist.ProcessGroup = self._leaders
            return group
        if entry.backend == "rota":
            return self._rota[str(entry.wire_dtype)]
        return None  # the default group


def is_float8(name: str) -> bool:
    """Whether rota scales blocks of this wire dtype here."""
    return name.startswith("float8")


def _do_nothing() -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="where the driver listens")
    parser.add_argument("--ranks-per-host", required=True, help="such as 2,2")
    parser.add_argument("--wire-dtypes", required=True, help="of rota; empty: rota is not loaded")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks_per_host = [int(count) for count in args.ranks_per_host.split(",")]
    worker = HostRank(num_ranks_per_host, [name for name in args.wire_dtypes.split(",") if name])
    hello = Hello(worker.rank, os.getpid(), worker.versions, worker.missing)
    serve(args.socket, hello, worker.take_turn)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
