"""hosts.py: simulated hosts reach each other, as fast as they should, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import host_network
import own_process
from host_network import (
    SWITCH_ADDRESS,
    HostNetwork,
    NotAvailable,
    Traffic,
    address,
    burst_bytes,
    rate_bits_per_s,
)
from hosts import Hosts
from ranks import Rank, Ranks, error_of, run_ranks
from rota import _C

RATE = "100mbit"
PORT = 7777  # each host has all ports for itself


def skip_where_unavailable() -> None:
    with Hosts((1,)):
        pass


@contextlib.contextmanager
def connection(network: HostNetwork) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection from host 1 to host 0."""
    with network.hosts[0].call(lambda: socket.create_server((address(0), PORT))) as listener:
        client = network.hosts[1].call(lambda: socket.create_connection((address(0), PORT), 10))
        with client, listener.accept()[0] as server:
            yield client, server


def send_across(client: socket.socket, server: socket.socket, num_bytes: int) -> float:
    """The seconds until the server has `num_bytes` of the client's."""
    sender = threading.Thread(target=client.sendall, args=(bytes(num_bytes),))
    start = time.perf_counter()
    sender.start()
    num_left = num_bytes
    while num_left > 0:
        num_left -= len(server.recv(min(num_left, 1 << 20)))
    seconds = time.perf_counter() - start
    sender.join()
    return seconds


def namespace_of(process: str | int) -> int:
    return Path(f"/proc/{process}/ns/net").stat().st_ino


def namespaces_in_use() -> set[int]:
    """Those with a process in them; or held by a descriptor, which the links of /proc name."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.add(namespace_of(process.name))
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(descriptor)
                    if link.startswith("net:["):
                        used.add(int(link.removeprefix("net:[").removesuffix("]")))
    return used


def own_links() -> str:
    """Devices of the machine's own namespace, and the names of others."""
    commands = ["ip", "-oneline", "link"], ["ip", "netns", "list"]
    return "".join(subprocess.check_output(command, text=True) for command in commands)


def inodes_of(network: HostNetwork) -> set[int]:
    return {Path(host.path).stat().st_ino for host in [*network.hosts, network.switch]}


def describe(rank: Rank) -> tuple[str, int, list[str], int, float]:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    values = [os.environ[name] for name in names]
    dist.init_process_group("gloo")
    dist.all_reduce(total := torch.tensor([rank.rank + 1.0]))
    dist.destroy_process_group()
    return _C.host_id(), namespace_of("self"), values, rank.rank, total.item()


def test_ranks_of_a_host_share_its_namespace_and_id() -> None:
    with Hosts((1, 2)) as hosts:
        ids, namespaces, values, ranks, totals = zip(*hosts.run(describe), strict=True)
        assert ids == ("host0", "host1", "host1")
        assert list(namespaces) == [Path(hosts.hosts[i].path).stat().st_ino for i in (0, 1, 1)]
        assert hosts.ranks_of(0) == [0]
        assert hosts.ranks_of(1) == [1, 2]
    assert len({*namespaces, namespace_of("self")}) == 3
    assert values == (
        ["0", "3", "0", "1", "0"],
        ["1", "3", "0", "2", "1"],
        ["2", "3", "1", "2", "1"],
    )
    assert ranks == (0, 1, 2)
    assert totals == (6.0,) * 3  # only Gloo's sockets between hosts, so packets come through


def test_hosts_reach_each_other_and_the_machine_does_not_see_them() -> None:
    with Hosts((1, 1, 1)) as hosts:
        for i, here in enumerate(hosts.hosts):
            for there in [address(j) for j in range(3) if j != i] + [SWITCH_ADDRESS]:
                # Nobody listens there, which only a host that is reached can answer.
                error = error_of(
                    lambda here=here, there=there: here.call(
                        lambda: socket.create_connection((there, PORT), 10)
                    )
                )
                assert error[0] == "ConnectionRefusedError", error
        assert address(0) not in subprocess.check_output(["ip", "-oneline", "address"], text=True)


def test_link_has_the_rate_that_was_asked_for() -> None:
    num_bytes = 2 << 20
    ideal_s = (num_bytes - burst_bytes(RATE)) * 8 / rate_bits_per_s(RATE)
    with Hosts((1, 1), RATE) as hosts, connection(hosts) as (client, server):
        times = [send_across(client, server, num_bytes) for _ in range(3)]
        assert min(times) > ideal_s  # never faster, however loaded the machine is
        assert min(times) < 2 * ideal_s
        hosts.set_rate(None)
        times = [send_across(client, server, num_bytes) for _ in range(3)]
        assert min(times) < ideal_s
        # One direction of one host is enough to slow both ends down.
        hosts.set_rate(RATE, host=0)
        assert send_across(client, server, num_bytes) > ideal_s


def test_traffic_counts_what_was_sent() -> None:
    num_bytes = 4 << 20
    with Hosts((1, 1)) as hosts, connection(hosts) as (client, server):
        before = [hosts.traffic(host) for host in (0, 1)]
        send_across(client, server, num_bytes)
        after = [hosts.traffic(host) for host in (0, 1)]
        assert num_bytes < after[1].sent - before[1].sent < 1.05 * num_bytes
        assert num_bytes < after[0].received - before[0].received < 1.05 * num_bytes
        assert after[0].sent - before[0].sent < 0.05 * num_bytes  # acknowledgements
        own = hosts.run(own_traffic)
        assert own[1].sent >= after[1].sent


def own_traffic(rank: Rank) -> Traffic:
    return Traffic.now()


def test_link_that_is_down_fails_and_comes_back() -> None:
    with Hosts((1, 1)) as hosts:
        with connection(hosts):
            pass
        hosts.take_link_down(1)
        connect = lambda: socket.create_connection((address(0), PORT), 10)  # noqa: E731
        name, text = error_of(hosts.hosts[1].call, connect)
        assert (name, "unreachable" in text) == ("OSError", True)
        hosts.bring_link_up(1)
        with connection(hosts):
            pass


def test_dropped_traffic_vanishes_without_a_word() -> None:
    def bound(host: int) -> socket.socket:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind((address(host), PORT))
        receiver.settimeout(10)
        return receiver

    with (
        Hosts((1, 1)) as hosts,
        hosts.hosts[0].call(lambda: bound(0)) as here,
        hosts.hosts[1].call(lambda: bound(1)) as there,
    ):
        there.sendto(b"before", (address(0), PORT))
        assert here.recv(100) == b"before"
        hosts.drop_traffic(1)
        there.sendto(b"lost", (address(0), PORT))
        hosts.stop_dropping(1)
        there.sendto(b"after", (address(0), PORT))
        assert here.recv(100) == b"after"


@pytest.mark.parametrize(("how", "receiver"), [("drop_sent", 0), ("drop_received", 1)])
def test_traffic_is_dropped_in_one_direction(how: str, receiver: int) -> None:
    with Hosts((1, 1)) as hosts, connection(hosts) as ends:  # of host 1 and of host 0
        getattr(hosts, how)(1)
        for end in ends:
            end.sendall(b"word")
        ends[receiver].settimeout(10)
        ends[1 - receiver].settimeout(1)
        assert ends[receiver].recv(100) == b"word"
        with pytest.raises(TimeoutError):
            ends[1 - receiver].recv(100)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    skip_where_unavailable()
    run_ranks(1, own_namespace)  # starts the server that forks ranks, which stays
    links = own_links()
    num_descriptors = own_process.num_descriptors()
    with pytest.raises(error), Hosts((2, 2), RATE) as hosts, hosts.start(wait_for_note) as ranks:
        inodes = inodes_of(hosts)
        ranks.hear_all()
        assert own_links() == links
        assert inodes <= namespaces_in_use()
        raise error
    assert not inodes & namespaces_in_use()
    assert own_links() == links
    del ranks  # which has descriptors of its processes until then
    # A socket alone, such as that of a store, would keep a namespace alive.
    assert own_process.num_descriptors() == num_descriptors


def wait_for_note(rank: Rank) -> None:
    rank.tell()
    rank.hear()


def hold_a_network(rank: Rank) -> None:
    with HostNetwork(2) as network:
        rank.tell(inodes_of(network))
        rank.hear()


def test_nothing_is_left_after_the_process_was_killed() -> None:
    skip_where_unavailable()
    with Ranks(1, hold_a_network) as ranks:
        inodes = ranks.hear(0)
        assert inodes <= namespaces_in_use()
        ranks.kill(0)
        ranks.results(killed=[0])
    assert not inodes & namespaces_in_use()


def refuse() -> None:
    raise NotAvailable("not permitted")


@pytest.mark.parametrize("in_ci", [False, True])
def test_missing_permission_skips_but_fails_ci(
    in_ci: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true" if in_ci else "")
    monkeypatch.setattr(host_network, "_new_namespace", refuse)
    expected = pytest.fail.Exception if in_ci else pytest.skip.Exception
    with pytest.raises(expected, match="no hosts can be simulated: not permitted"), Hosts():
        pass


@pytest.mark.parametrize("rate", ["fast", "0mbit", "1gbit; reboot"])
def test_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="expected one such as 1gbit"):
        Hosts((1, 1), rate)


def fail_on_the_second(rank: Rank) -> None:
    assert rank.rank != 1, "no such luck"


def test_error_of_a_rank_names_it() -> None:
    with Hosts((1, 1)) as hosts, pytest.raises(AssertionError, match=r"(?s)rank 1/2.*no such luck"):
        hosts.run(fail_on_the_second)


def own_namespace(rank: Rank) -> int:
    return namespace_of("self")
