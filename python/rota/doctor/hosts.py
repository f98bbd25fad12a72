"""`python -m rota doctor --hosts` on every rank of a job: who shares what, and how fast it is.

Levels are hosts and, where a host has several and its ranks are bound to them, NUMA nodes. On one
host, sums that are added by nodes use that level.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

import rota
from rota import _C

_TIMEOUT = timedelta(seconds=60)
_NUM_SHORT, _NUM_LONG = 200, 5  # calls of which the median is taken
_SHORT_ELEMS = 2
_LONG_ELEMS = 4 << 20  # float32: 16 MiB


def _median_s(call: Callable[[], object], num_calls: int) -> float:
    call()
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _rates(what: str, call: Callable[[torch.Tensor], object], num_ways: int = 1) -> str:
    """The time of a short call, or of each of its ways, and the rate of a long one."""
    short, long = (
        torch.zeros(num_elems, dtype=torch.float32, device="cpu")
        for num_elems in (_SHORT_ELEMS, _LONG_ELEMS)
    )
    short_s = _median_s(lambda: call(short), _NUM_SHORT) / num_ways
    long_s = _median_s(lambda: call(long), _NUM_LONG) / num_ways
    return (
        f"{what} of {short.nbytes} bytes {short_s * 1e6:.1f} us, of {long.nbytes >> 20} MiB "
        f"{long.nbytes / long_s / 1e9:.3f} GB/s"
    )


def _between(communicator: rota.Communicator, first: int, second: int) -> str:
    """Half the time of messages there and back between two ranks; the others must not call it."""

    def there_and_back(tensor: torch.Tensor) -> None:
        if communicator.rank == first:
            communicator.send(tensor, second)
            communicator.recv(tensor, second)
        else:
            communicator.recv(tensor, first)
            communicator.send(tensor, first)

    return _rates("a message", there_and_back, num_ways=2)


class _Facts(NamedTuple):
    """What one rank knows."""

    host_id: str
    numa_node: int | None
    lines: dict[str, str]


def _by_node(ranks: list[int], facts: list[_Facts]) -> dict[int, list[int]]:
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        node = facts[rank].numa_node
        if node is not None:
            by_node.setdefault(node, []).append(rank)
    return by_node


def _sums_of_nodes(communicator: rota.Communicator) -> str:
    nodes = communicator.numa_nodes
    if not nodes:
        return "NUMA nodes are no level of sums"
    return (
        f"NUMA nodes are a level of sums: all_reduce with group_size={len(nodes[0])}, of integers, "
        "or with order='tree' if nodes are subtrees, adds within nodes first"
    )


def _print(hosts: list[list[int]], facts: list[_Facts], sums_of_nodes: str) -> None:
    num_rails = min(len(ranks) for ranks in hosts)
    rails = f", rails between hosts: {num_rails}" if len(hosts) > 1 else ""
    print(f"hosts: {len(hosts)}, ranks: {len(facts)}{rails}")
    for host, ranks in enumerate(hosts):
        print(f"  host {host} ({facts[ranks[0]].host_id}): ranks {' '.join(map(str, ranks))}")
        for node, of_node in sorted(_by_node(ranks, facts).items()):
            print(f"    NUMA node {node}: ranks {' '.join(map(str, of_node))}")
    print(sums_of_nodes)
    print("levels, medians:")
    for what, text in {key: text for fact in facts for key, text in fact.lines.items()}.items():
        print(f"  {what}: {text}")
    sys.stdout.flush()


def run() -> int:
    """Prints the hosts and their ranks, and what is measured on each level; collective.

    Rank 0 prints. Returns 0, or 2 where no job of torchrun's is found.
    """
    if "RANK" not in os.environ and not dist.is_initialized():
        print(
            "rota doctor --hosts: RANK is not set; start it on every rank, as in "
            "`torchrun --nnodes 2 --nproc-per-node 2 ... -m rota doctor --hosts`",
            file=sys.stderr,
        )
        return 2
    is_own_group = not dist.is_initialized()
    if is_own_group:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank = dist.get_rank()
    everyone = rota.Communicator()
    hosts = everyone.hosts
    sums_of_nodes = _sums_of_nodes(everyone)
    own_host = next(host for host, ranks in enumerate(hosts) if rank in ranks)
    groups = [dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT) for ranks in hosts]
    within = rota.Communicator(groups[own_host])

    facts = [_Facts("", None, {}) for _ in range(dist.get_world_size())]
    own = _Facts(_C.host_id(), _C.numa_node(), {})
    dist.all_gather_object(facts, own)
    lines = own.lines
    for host, ranks in enumerate(hosts):
        firsts = {node: of_node[0] for node, of_node in sorted(_by_node(ranks, facts).items())}
        nodes = list(firsts)
        if host == own_host:
            is_alone = within.world_size == 1
            rates = "one rank" if is_alone else _rates("all_reduce", within.all_reduce)
            lines[f"within host {host}"] = rates
        everyone.barrier()
        for node in nodes[1:]:
            pair = (firsts[nodes[0]], firsts[node])
            if rank in pair:
                what = f"NUMA node {nodes[0]} to {node} of host {host}"
                lines[what] = _between(everyone, *pair)
            everyone.barrier()
        first, second = hosts[0][0], ranks[0]
        if host > 0 and rank in (first, second):
            lines[f"host 0 to host {host}"] = _between(everyone, first, second)
        everyone.barrier()

    dist.all_gather_object(facts, own)
    if rank == 0:
        _print(hosts, facts, sums_of_nodes)
    within.close()
    everyone.close()
    if is_own_group:
        dist.destroy_process_group()
    return 0
