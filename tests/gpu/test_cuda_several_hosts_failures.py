"""CUDA tensors of ranks on several hosts: what is staged, disagreements, failures, interrupts.

Hosts and engine are those of test_cuda_several_hosts.py.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from connected_hosts import TIME_S, Connected, communicator_over, on_layout
from device_engines import fake_engine, make_engine, num_exchanges
from on_gpu import DEVICE, capture, init
from oracle import FLOAT8_DTYPES, assert_same, name_of, random_inputs
from ranks import Rank, check_error, error_of
from several_hosts import ONE_BY_ONE, TWO_BY_TWO, Layout, by_hosts, of_layouts

# ---- what goes through the host's memory


@on_layout(TWO_BY_TWO)
def test_what_has_no_kernel_is_staged(rank: Rank) -> None:
    connected = Connected(rank)
    comm, n = connected.comm, rank.world_size
    for dtype in FLOAT8_DTYPES:
        source = random_inputs(n, 1000, dtype)[rank.rank]
        connected.same_on_both(source, name_of(dtype), is_staged=True)

    def round_at_random() -> None:
        bucket, stats = torch.ones(1000).to(DEVICE), torch.zeros(2, dtype=torch.float64).to(DEVICE)
        comm.reduce_bucket(
            bucket, stats, wire_dtype=torch.float16, block_scaling=True, stochastic_seed=3
        )
        assert_same(bucket.cpu(), torch.full((1000,), float(n)), "stochastic rounding")

    assert not connected.goes_through_engine(round_at_random)
    error = error_of(lambda: comm.send(torch.ones(4).to(DEVICE), (rank.rank + 1) % n))
    check_error(error, "TransportError")


@on_layout(TWO_BY_TWO)
def test_an_engine_for_the_cpu_alone_stages(rank: Rank) -> None:
    """As without an engine: Gloo's one backend for all devices would stage, too."""
    init(rank, "gloo")
    inputs = random_inputs(rank.world_size, 1000, torch.float32)
    for engine in (None, dist.new_group(backend="gloo")):
        comm = communicator_over(engine)
        comm.all_reduce(tensor := inputs[rank.rank].to(DEVICE))
        assert_same(tensor.cpu(), by_hosts(inputs, rank.layout), "all_reduce")
        assert comm.peer_access is not None and "the network" in comm.peer_access


def join_on_one_host(rank: Rank) -> str | None:
    if rank.layout.host_of[rank.rank] == 1:
        os.environ["ROTA_PEER_MEMORY"] = "symmetric"
    init(rank, "gloo")
    engine = make_engine()
    comm = communicator_over(engine)
    inputs = random_inputs(rank.world_size, 1000, torch.float32)
    comm.all_reduce(tensor := inputs[rank.rank].to(DEVICE))
    assert_same(tensor.cpu(), by_hosts(inputs, rank.layout), "all_reduce")
    assert num_exchanges(engine) == 0
    return comm.peer_access


@pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs GPUs that have no symmetric memory"
)
def test_where_one_hosts_gpus_cannot_be_joined_all_ranks_stage() -> None:
    with TWO_BY_TWO.start(join_on_one_host, timeout_s=TIME_S) as ranks:
        assert set(ranks.results()) == {"the memory of 2 hosts and the network"}
        for rank in range(4):
            assert "go through the host's memory, which is slow" in ranks.stderr(rank)
        assert "the GPUs of another host cannot be joined" in ranks.stderr(0)
        assert "libnvidia-ml" in ranks.stderr(3)


# ---- disagreements and failures


@on_layout(TWO_BY_TWO)
def test_calls_that_differ_are_a_mismatch_on_every_rank(rank: Rank) -> None:
    connected = Connected(rank)
    comm, is_odd = connected.comm, rank.rank == 3
    ones = torch.ones(9)

    def on_own(device: Any) -> torch.Tensor:
        return ones.clone().to(device)

    for call, facts in (
        (
            lambda: comm.all_reduce(on_own(DEVICE)[: 9 if is_odd else 8]),
            ("float32[8]", "float32[9]"),
        ),
        (
            lambda: comm.all_reduce(on_own(DEVICE), "max" if is_odd else "sum"),
            ("all_reduce(sum", "all_reduce(max"),
        ),
        (
            lambda: comm.all_reduce(on_own("cpu" if is_odd else DEVICE)),
            ("two_shot, between GPUs)", "two_shot)"),
        ),
        (lambda: comm.broadcast(on_own(DEVICE), 1 if is_odd else 0), ("root 0", "root 1")),
    ):
        check_error(error_of(call), "Mismatch", *facts)
    comm.all_reduce(tensor := on_own(DEVICE))
    assert_same(tensor.cpu(), ones * 4, "the group goes on")


@on_layout(TWO_BY_TWO)
def test_joining_gpus_is_compared_with_other_calls(rank: Rank) -> None:
    init(rank, "gloo")
    comm = communicator_over(make_engine())
    ones = torch.ones(8)
    call = comm.barrier if rank.rank == 3 else lambda: comm.all_reduce(ones.to(DEVICE))
    error = error_of(call)
    comm.all_reduce(tensor := ones.to(DEVICE))
    assert_same(tensor.cpu(), ones * 4, "the group goes on")
    check_error(error, "Mismatch", "rank 2 called connect_device(); rank 3 called barrier()")


@on_layout(ONE_BY_ONE)
def test_engine_that_does_not_deliver_is_an_error_on_every_rank(rank: Rank) -> None:
    init(rank, "gloo")
    comm = communicator_over(fake_engine(rank.rank, rank.world_size))
    error = error_of(lambda: comm.connect_device(DEVICE))
    assert error_of(lambda: comm.all_reduce(torch.ones(4)))[0] == "TransportError"
    check_error(error, "TransportError", "did not deliver", "pass another engine")


@on_layout(TWO_BY_TWO)
def test_engine_that_fails_on_one_rank_is_an_error_on_every_rank(rank: Rank) -> None:
    init(rank, "gloo")
    engine = make_engine()  # nothing ends the wait of its first exchange
    if rank.rank == 1:
        engine = fake_engine(rank.rank, rank.world_size, raises=True)
    comm = communicator_over(engine)
    first = error_of(lambda: comm.all_reduce(torch.ones(4).to(DEVICE)))
    check_error(error_of(lambda: comm.all_reduce(torch.ones(4))), first[0])
    fact = "the engine of rank 1 failed to exchange CUDA tensors"
    check_error(first, "TransportError", fact)


def lose_last(rank: Rank) -> tuple[str, str]:
    """The test kills the last rank while all go on."""
    del os.environ["ROTA_HOST_SILENCE_MS"]
    comm = Connected(rank).comm
    tensor = torch.zeros(4 << 20).to(DEVICE)  # most of the time the ranks are in the engine
    comm.all_reduce(tensor)
    tensor.cpu()
    rank.tell()

    def reduce() -> None:
        while True:
            comm.all_reduce(tensor)

    result = error_of(reduce)
    assert error_of(reduce)[0] == result[0]
    rank.tell()
    rank.hear()  # a rank that ends takes its connections with it
    return result


@of_layouts(ONE_BY_ONE, TWO_BY_TWO)
def test_all_survivors_hear_of_a_killed_rank(layout: Layout) -> None:
    last = layout.world_size - 1
    with layout.start(lose_last, timeout_s=TIME_S) as ranks:
        ranks.hear_all()
        ranks.kill(last)
        killed_at = time.monotonic()
        for rank in range(last):
            ranks.hear(rank)
        assert time.monotonic() - killed_at < 5
        for rank in range(last):
            ranks.tell(rank)
        results = ranks.results(killed={last})
    for error in results[:last]:
        check_error(error, "PeerFailed", f"rank {last}")


def interrupt_one(rank: Rank) -> tuple[str, str]:
    comm = Connected(rank).comm
    rank.tell()
    if rank.rank == 1:
        rank.hear()
    return error_of(lambda: comm.all_reduce(torch.ones(8).to(DEVICE)))


def test_interrupted_call_is_an_error_on_every_rank() -> None:
    with ONE_BY_ONE.start(interrupt_one, timeout_s=TIME_S) as ranks:
        ranks.hear_all()
        time.sleep(0.2)  # rank 0 waits now; if not yet, the interrupt comes a little earlier
        ranks.kill(0, signal.SIGINT)
        interrupted_at = time.monotonic()
        assert ranks.hear_result(0)[0] == "KeyboardInterrupt"
        assert time.monotonic() - interrupted_at < 2
        ranks.tell(1)
        check_error(ranks.results()[1], "PeerFailed", "rank 0 was interrupted")


@on_layout(ONE_BY_ONE)
def test_a_graph_cannot_capture_a_call(rank: Rank) -> None:
    comm = Connected(rank).comm
    tensor = torch.ones(8).to(DEVICE)
    comm.all_reduce(tensor)
    error = error_of(lambda: capture(lambda: comm.all_reduce(tensor)))
    check_error(error, "ValueError", "which a CUDA graph cannot capture")
