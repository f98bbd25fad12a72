"""Hosts that are simulated: the same results, bytes on the wire, the doctor."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from host_network import Traffic
from hosts import Hosts
from oracle import (
    assert_same,
    random_inputs,
)
from ranks import Rank
from rota.doctor import hosts as doctor_hosts
from several_hosts import (
    MANY_CHUNKS,
    UNEVEN,
    Layout,
    by_hosts,
)

# ---- simulated hosts


SOME_HOSTS = [(2, 2), (1, 1), (1, 2, 1)]


def use_simulated_hosts(rank: Rank, num_ranks_per_host: tuple[int, ...]) -> None:
    host_of = [host for host, num in enumerate(num_ranks_per_host) for _ in range(num)]
    layout = Layout(tuple(host_of))
    rank.init()
    communicator = rank.communicator()
    assert communicator.hosts == layout.hosts
    inputs = random_inputs(rank.world_size, MANY_CHUNKS, torch.float32)
    communicator.all_reduce(tensor := inputs[rank.rank].clone())
    assert_same(tensor, by_hosts(inputs, layout), "all_reduce")
    dist.broadcast(tensor := inputs[rank.rank].clone(), rank.world_size - 1)
    assert_same(tensor, inputs[-1], "broadcast")
    to, source = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    work = dist.isend(inputs[rank.rank], to)
    dist.recv(tensor, source)
    work.wait()
    assert_same(tensor, inputs[source], "message")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks_per_host", SOME_HOSTS, ids=str)
def test_simulated_hosts_give_the_same_results(num_ranks_per_host: tuple[int, ...]) -> None:
    with Hosts(num_ranks_per_host) as hosts:
        hosts.run(use_simulated_hosts, num_ranks_per_host)


NUM_ELEMS = 3 << 20  # of float32, a multiple of every number of ranks here
NUM_BYTES = 4 * NUM_ELEMS
# Headers of TCP and signs of life; a frame's would be 4.5 % without the long packets of veth.
OVERHEAD = 1.08
CONSTANT_BYTES = 100_000


def count_bytes(rank: Rank) -> dict[str, Traffic]:
    """What each collective sends and receives on this rank's host."""
    rank.init()
    communicator = rank.communicator()
    flat = dist.new_group(backend="gloo")
    n = rank.world_size
    part, whole = torch.ones(NUM_ELEMS // n), torch.ones(NUM_ELEMS)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: communicator.all_reduce(whole),
        "all_reduce in 16 bits": lambda: communicator.all_reduce(whole, wire_dtype=torch.float16),
        "reduce_scatter": lambda: communicator.reduce_scatter(part, whole),
        "all_gather": lambda: communicator.all_gather(whole, part),
        "broadcast": lambda: communicator.broadcast(whole),
        "flat all_reduce": lambda: dist.all_reduce(whole, group=flat),
        "flat all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=flat),
    }
    counts = {}
    for name, call in calls.items():
        call()  # connects
        communicator.barrier()
        before = Traffic.now()
        communicator.barrier()
        call()
        communicator.barrier()
        after = Traffic.now()
        communicator.barrier()  # nobody begins with the next one
        counts[name] = Traffic(after.sent - before.sent, after.received - before.received)
    dist.barrier()
    dist.destroy_process_group()
    return counts


@pytest.mark.parametrize("num_ranks_per_host", [(2, 2), (2, 2, 2)], ids=str)
def test_bytes_between_hosts_are_those_of_hierarchical_algorithms(
    num_ranks_per_host: tuple[int, ...],
) -> None:
    with Hosts(num_ranks_per_host) as hosts:
        results = hosts.run(count_bytes)
        firsts = [results[hosts.ranks_of(host)[0]] for host in range(len(num_ranks_per_host))]
    num_hosts = len(num_ranks_per_host)
    rest = (num_hosts - 1) / num_hosts  # of the tensor belongs to other hosts
    fewest = {
        "all_reduce": 2 * rest * NUM_BYTES,
        "all_reduce in 16 bits": rest * NUM_BYTES,
        "reduce_scatter": rest * NUM_BYTES,
        "all_gather": rest * NUM_BYTES,
        "broadcast": NUM_BYTES,
    }
    for name, num_bytes in fewest.items():
        most = OVERHEAD * num_bytes + CONSTANT_BYTES
        for host, counts in enumerate(firsts):
            assert counts[name].sent < most, f"{name} of host {host}"
            assert counts[name].received < most, f"{name} of host {host}"
        total = sum(counts[name].sent for counts in firsts)
        # What is counted is what was sent: the test would notice if it saw nothing.
        assert total > (num_hosts - 1 if name == "broadcast" else num_hosts) * num_bytes
    assert sum(counts["broadcast"].sent for counts in firsts) < (
        OVERHEAD * (num_hosts - 1) * NUM_BYTES + num_hosts * CONSTANT_BYTES
    )
    # Flat ones break these limits.
    for name in ("all_reduce", "all_gather"):
        flat = max(counts[f"flat {name}"].sent for counts in firsts)
        assert flat > OVERHEAD * fewest[name] + CONSTANT_BYTES, f"flat {name}"


def ask_doctor(rank: Rank) -> str:
    if rank.rank < 3:
        os.environ["ROTA_NUMA_NODE"] = "001"[rank.rank]
    rank.init("gloo")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert doctor_hosts.run() == 0
    return output.getvalue()


def test_doctor_prints_the_hosts_and_their_levels() -> None:
    text, *others = UNEVEN.run(ask_doctor)
    assert not any(others)
    for fact in (
        "hosts: 2, ranks: 4, rails between hosts: 1",
        "host 0 (host0): ranks 0 1 2\n    NUMA node 0: ranks 0 1\n    NUMA node 1: ranks 2\n",
        "host 1 (host1): ranks 3",
        "within host 0: all_reduce of 8 bytes",
        "within host 1: one rank",
        "NUMA node 0 to 1 of host 0: a message of 8 bytes",
        "host 0 to host 1: a message of 8 bytes",
    ):
        assert fact in text, text
