"""Several hosts on one machine: network namespaces that are joined by a switch.

Tests and benchmarks share this. It knows nothing of ranks except the environment that they need.

A host is a namespace with one veth, `eth0`; the switch is a bridge in a namespace of its own, so
the machine's own network is never touched. Namespaces have no names: a descriptor of this process
holds each, and the kernel removes a namespace with all its devices when the last process in it and
the last descriptor of it are gone. Nothing is left behind even after SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

# The interface of every host, for GLOO_SOCKET_IFNAME.
INTERFACE = "eth0"
SWITCH = "switch0"
SWITCH_ADDRESS = "10.77.0.254"
MTU = 1500
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# TCP hands packets of many segments (GSO) to a device, and tbf cuts those that are longer than its
# burst into single frames, which costs more than the link. But what fits in a burst passes an idle
# link at once. Shorter packets allow a shorter burst, and cost CPU time. With these, 2 cores reach
# 0.94 to 0.95 of the rate, of which headers leave 0.956 (2026-11-24 in LOG.md).
FAST_BITS_PER_S = 500e6
FAST_PACKET_BYTES = 32 << 10
SLOW_PACKET_BYTES = 16 << 10
PACKETS_PER_BURST = 2
# The queue of a port, 2.5 MB at 1 Gbit/s as in a small switch: enough for TCP never to run dry, and
# short enough for a heartbeat behind it.
QUEUE_MS = 20
# Linux's own limit, where nothing is shaped.
UNSHAPED_PACKET_BYTES = 65536

# Answers of `ip` and `tc` that blame the machine, not the command.
_MACHINE_LACKS = re.compile(
    "not permitted|not supported|Unknown device type|qdisc (kind is unknown|not found)", re.I
)
_DROP_ALL = "pfifo limit 0"  # a queue for no packet
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


class NotAvailable(Exception):
    """This machine cannot simulate hosts, because a permission or a tool is missing."""


def rate_bits_per_s(rate: str) -> float:
    """The number behind "1gbit" or "100mbit", as `tc` reads them; a ValueError if it is none."""
    match = re.fullmatch(r"(\d+)([kmg]bit)", rate)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{rate!r} is not a rate; expected one such as 1gbit or 100mbit")
    return int(match[1]) * UNITS[match[2]]


def packet_bytes(rate: str | None) -> int:
    """The longest packet that TCP hands to a device at this rate; None is unlimited."""
    if rate is None:
        return UNSHAPED_PACKET_BYTES
    is_fast = rate_bits_per_s(rate) >= FAST_BITS_PER_S
    return FAST_PACKET_BYTES if is_fast else SLOW_PACKET_BYTES


def burst_bytes(rate: str) -> int:
    """What passes an idle link of this rate without delay."""
    return PACKETS_PER_BURST * packet_bytes(rate)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def rank_environments(
    num_ranks_per_host: Sequence[int], store: dist.TCPStore
) -> list[dict[str, str]]:
    """The variables of each rank, by rank: those of torchrun, whose agents also serve the store
    themselves, and what Gloo and rota need to know of the host."""
    world_size = sum(num_ranks_per_host)
    environments: list[dict[str, str]] = []
    for host, num_ranks in enumerate(num_ranks_per_host):
        for local_rank in range(num_ranks):
            values = {
                "RANK": len(environments),
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": num_ranks,
                "GROUP_RANK": host,
                "MASTER_ADDR": store.host,
                "MASTER_PORT": store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "ROTA_HOST_ID": f"host{host}",
            }
            environments.append({name: str(value) for name, value in values.items()})
    return environments


def enter_namespace(path: str) -> None:
    """Moves the calling thread, and threads and processes that it starts, into a namespace."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(namespace, _CLONE_NEWNET), f"cannot enter {path}")
    finally:
        os.close(namespace)


@dataclass(frozen=True)
class Traffic:
    """Bytes through INTERFACE since it was made, Ethernet headers included.

    A packet of many segments counts once with one header, so the frames of a real network have up
    to 4.5 % more.
    """

    sent: int
    received: int

    @classmethod
    def now(cls) -> Traffic:
        """The traffic of the host in which the calling thread is."""
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        fields = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:")).split()
        return cls(sent=int(fields[9]), received=int(fields[1]))  # proc_pid_net(5)


class Namespace:
    """A network namespace with a running loopback."""

    def __init__(self) -> None:
        self._fd = _in_thread(_new_namespace)
        # Other processes can open it too: those that only have the number of a descriptor cannot.
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs `arguments` in here."""
        return ["nsenter", f"--net={self.path}", *arguments]

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run in here by a thread of its own. Sockets stay in
        the namespace in which they were made."""

        def enter_and_call() -> T:
            enter_namespace(self.path)
            return function()

        return _in_thread(enter_and_call)

    def configure(self, tool: str, *lines: str) -> None:
        """Runs lines of `ip` or `tc` in here.

        Raises:
            NotAvailable: this machine lacks what a line needs.
            RuntimeError: a line failed for another reason.
        """
        done = subprocess.run(
            self.command(tool, "-batch", "-"),
            input="".join(f"{line}\n" for line in lines),
            text=True,
            capture_output=True,
        )
        if done.returncode != 0:
            kind = NotAvailable if _MACHINE_LACKS.search(done.stderr) else RuntimeError
            raise kind(f"{tool}: {done.stderr.strip()} (lines: {'; '.join(lines)})")


class HostNetwork:
    """Hosts that reach each other through a switch; a context manager.

    Args:
        num_hosts: host `i` has the address 10.77.0.{i+1}.
        rate: of each host's link in each direction, such as "1gbit"; None: as fast as the CPU.

    Raises:
        NotAvailable: on entering, see there.

    Example:
        >>> with HostNetwork(2, "100mbit") as network:
        ...     subprocess.run(network.hosts[0].command("ip", "address"))
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= 253:
            raise ValueError(f"{num_hosts} hosts, expected 1 to 253")
        if rate is not None:
            rate_bits_per_s(rate)
        self.hosts: list[Namespace] = []
        self._num_hosts = num_hosts
        self._rate = rate
        self._switch: Namespace | None = None
        self._stores: list[dist.TCPStore] = []

    @property
    def switch(self) -> Namespace:
        """The namespace of the bridge, at SWITCH_ADDRESS; no test takes it down."""
        if self._switch is None:
            raise RuntimeError("the network is not set up, or no longer; use it in a `with` block")
        return self._switch

    def __enter__(self) -> HostNetwork:
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the namespaces; those with processes in them live as long as these."""
        self._stores.clear()  # their sockets would keep the switch
        for namespace in [*self.hosts, *filter(None, [self._switch])]:
            namespace.close()
        self.hosts, self._switch = [], None

    def _set_up(self) -> None:
        for tool in ("ip", "tc", "nsenter"):
            if shutil.which(tool) is None:
                raise NotAvailable(f"there is no {tool} on PATH (packages iproute2, util-linux)")
        self._switch = Namespace()
        self._switch.configure(
            "ip",
            "link set lo up",
            f"link add name {SWITCH} type bridge",
            *_without_ipv6(SWITCH),
            f"address add {SWITCH_ADDRESS}/24 dev {SWITCH}",
            f"link set {SWITCH} up",
        )
        for host in range(self._num_hosts):
            namespace, port = Namespace(), _port(host)
            self.hosts.append(namespace)
            peer = f"peer name {INTERFACE} mtu {MTU} netns {namespace.path}"
            self._switch.configure(
                "ip",
                f"link add name {port} mtu {MTU} type veth {peer}",
                *_without_ipv6(port),
                f"link set {port} master {SWITCH} up",
            )
            namespace.configure(
                "ip",
                "link set lo up",
                *_without_ipv6(INTERFACE),
                f"address add {address(host)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            )
        if self._rate is not None:
            self.set_rate(self._rate)

    def serve_store(self) -> dist.TCPStore:
        """An empty store, whose server runs in this process until the network ends, and listens at
        the switch, where it outlives every host."""
        store = self.switch.call(
            lambda: dist.TCPStore(
                SWITCH_ADDRESS,
                0,
                is_master=True,
                timeout=timedelta(seconds=30),
                wait_for_workers=False,
            )
        )
        self._stores.append(store)
        return store

    def places(self, num_ranks_per_host: Sequence[int]) -> list[dict[str, Any]]:
        """The arguments of Workers.fork that start each rank on its host, with an empty store."""
        environments = rank_environments(num_ranks_per_host, self.serve_store())
        paths = [host.path for host in self.hosts]
        return [{"namespace": paths[int(env["GROUP_RANK"])], "env": env} for env in environments]

    def set_rate(self, rate: str | None, host: int | None = None) -> None:
        """Changes the rate of a host's link in both directions, or that of all."""
        shape = "noqueue"
        if rate is not None:
            shape = f"tbf rate {rate} burst {burst_bytes(rate)} latency {QUEUE_MS}ms"
        for number in range(self._num_hosts) if host is None else [host]:
            for namespace, device in (
                (self.hosts[number], INTERFACE),
                (self.switch, _port(number)),
            ):
                namespace.configure("ip", f"link set {device} gso_max_size {packet_bytes(rate)}")
                namespace.configure("tc", f"qdisc replace dev {device} root {shape}")

    def take_link_down(self, host: int) -> None:
        """The host loses its link and knows it: its sends fail."""
        self.hosts[host].configure("ip", f"link set {INTERFACE} down")

    def bring_link_up(self, host: int) -> None:
        self.hosts[host].configure("ip", f"link set {INTERFACE} up")

    def drop_traffic(self, host: int) -> None:
        """From now on all packets from and to the host vanish without a word; its link stays up.

        If its processes end meanwhile, their peers keep half-open connections.
        """
        self.switch.configure("ip", f"link set {_port(host)} nomaster")

    def drop_sent(self, host: int) -> None:
        """From now on packets from the host vanish without a word; those to it still arrive."""
        self.hosts[host].configure("tc", f"qdisc replace dev {INTERFACE} root {_DROP_ALL}")

    def drop_received(self, host: int) -> None:
        """From now on packets to the host vanish without a word; those from it still arrive."""
        self.switch.configure("tc", f"qdisc replace dev {_port(host)} root {_DROP_ALL}")

    def stop_dropping(self, host: int) -> None:
        self.switch.configure("ip", f"link set {_port(host)} master {SWITCH}")

    def traffic(self, host: int) -> Traffic:
        return self.hosts[host].call(Traffic.now)

    def describe(self) -> dict[str, Any]:
        """What a reader of measurements needs to know."""
        algorithm = Path("/proc/sys/net/ipv4/tcp_congestion_control")
        return {
            "num_hosts": self._num_hosts,
            "rate": self._rate,
            "mtu": MTU,
            "packet_bytes": packet_bytes(self._rate),
            "burst_bytes": None if self._rate is None else burst_bytes(self._rate),
            "queue_ms": None if self._rate is None else QUEUE_MS,
            "congestion_control": self.hosts[0].call(algorithm.read_text).strip(),
        }


def _port(host: int) -> str:
    return f"host{host}"


def _without_ipv6(device: str) -> list[str]:
    """Without addresses of IPv6 a quiet link stays quiet, and Gloo takes that of IPv4."""
    return [f"link set {device} addrgenmode none"] if Path("/proc/sys/net/ipv6").exists() else []


def _new_namespace() -> int:
    """A descriptor of a new namespace, which the calling thread also enters."""
    try:
        _check(_libc.unshare(_CLONE_NEWNET), "cannot make a network namespace")
    except OSError as error:
        raise NotAvailable(str(error)) from error
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises in a thread that then ends."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()
