"""rota.Communicator and the backend on CUDA streams, in futures, graphs and compiled functions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from on_gpu import DEVICE, capture, connect, init, on_ranks, run_ranks
from oracle import assert_same, exact, exact_inputs, random_inputs
from ranks import Rank


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_all_reduce_is_ordered_with_the_current_stream(rank: Rank) -> None:
    """The host does not wait between filling a tensor, reducing it and reading it."""
    comm = connect(rank)
    size = 3000
    inputs = [tensor.pin_memory() for tensor in exact_inputs(rank.world_size, size, torch.float32)]
    expected = exact(inputs, "sum")
    tensor = torch.zeros(size).to(DEVICE)
    results = {mode: torch.empty(size).pin_memory() for mode in ("blocking", "work", "future")}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for mode, result in results.items():
            tensor.copy_(inputs[rank.rank], non_blocking=True)
            if mode == "blocking":
                comm.all_reduce(tensor)
            elif mode == "work":
                comm.all_reduce(tensor, async_op=True).wait()
            else:
                future = comm.all_reduce_future(tensor, "sum", None)
                assert future.wait().data_ptr() == tensor.data_ptr()
            result.copy_(tensor, non_blocking=True)
    stream.synchronize()
    for mode, result in results.items():
        assert_same(result, expected, mode)


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_all_reduce_replays_with_other_values(rank: Rank) -> None:
    comm = connect(rank)
    tensor = torch.zeros(1500).to(DEVICE)
    for algorithm in ("auto", "low_latency", "two_shot"):

        def reduce(algorithm: str = algorithm) -> None:
            comm.all_reduce(tensor, "sum", algorithm)

        reduce()
        graph = capture(lambda reduce=reduce: (reduce(), reduce()))
        for turn in range(4):
            inputs = [one + turn for one in exact_inputs(rank.world_size, 1500, torch.float32)]
            tensor.copy_(inputs[rank.rank])
            graph.replay()
            factor = rank.world_size
            if turn % 2:  # outside of the graph, in between
                reduce()
                factor *= rank.world_size
            expected = exact(inputs, "sum") * factor
            assert_same(tensor.cpu(), expected, f"{algorithm}, replay {turn}")


@on_ranks(2)
def test_cuda_transfers_are_captured_behind_collectives(rank: Rank) -> None:
    """Alternates collectives and transfers: the very first transfers are captured, dist.recv and
    dist.all_reduce use different streams, and replays of all graphs alternate with eager calls."""
    init(rank)
    inputs = exact_inputs(2, 20_000, torch.float32)
    total = exact(inputs, "sum")
    reduced, moved = (torch.zeros(20_000).to(DEVICE) for _ in range(2))
    dist.all_reduce(reduced)  # joins the GPUs

    def transfer() -> None:
        if rank.rank == 0:
            dist.send(reduced, 1)
        else:
            dist.recv(moved, 0)

    def body() -> None:
        for _ in range(2):
            dist.all_reduce(reduced)
            transfer()

    # The first graph is captured before any transfer.
    without_transfers = capture(lambda: dist.all_reduce(reduced))
    with_transfers = [capture(body) for _ in range(2)]
    for turn in range(6):
        case = f"turn {turn}, rank {rank.rank}"
        reduced.copy_(inputs[rank.rank])
        with_transfers[turn % 2].replay()  # sums twice
        assert_same(reduced.cpu(), total * 2, case)
        if rank.rank == 1:
            assert_same(moved.cpu(), total * 2, f"{case}, received")
        without_transfers.replay()
        transfer()
        dist.all_reduce(reduced)
        assert_same(reduced.cpu(), total * 8, case)
        if rank.rank == 1:
            assert_same(moved.cpu(), total * 4, f"{case}, received outside of graphs")


@on_ranks(2)
def test_cuda_recv_waits_for_a_graph_from_before_the_first_one(rank: Rank) -> None:
    """Replays a graph that was captured before the first receive. Both use the communicator's links
    (the message is too long for low_latency), and only the communicator orders them."""
    init(rank)
    inputs = exact_inputs(2, 20_000, torch.float32)
    reduced, moved = torch.zeros(20_000).to(DEVICE), inputs[0].to(DEVICE)
    dist.all_reduce(reduced)
    graph, stream = capture(lambda: dist.all_reduce(reduced)), torch.cuda.Stream()
    for turn in range(10):
        reduced.copy_(inputs[rank.rank])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        if rank.rank == 0:
            dist.send(moved, 1)
        else:
            dist.recv(moved, 0)
        torch.cuda.synchronize()
        assert_same(reduced.cpu(), exact(inputs, "sum"), f"turn {turn}, reduced")
        assert_same(moved.cpu(), inputs[0], f"turn {turn}, moved")


@on_ranks(2)
def test_cuda_first_recv_does_not_wait_for_the_own_send(rank: Rank) -> None:
    """Sends more than the links hold, so no send ends before the other rank receives."""
    init(rank)
    inputs = random_inputs(2, 2_000_000, torch.float32)
    sent, received = inputs[rank.rank].to(DEVICE), torch.zeros(2_000_000).to(DEVICE)
    dist.all_reduce(torch.zeros(1).to(DEVICE))  # joins the GPUs
    works = [dist.isend(sent, 1 - rank.rank), dist.irecv(received, 1 - rank.rank)]
    for work in works:
        assert work is not None
        work.wait()
    assert_same(received.cpu(), inputs[1 - rank.rank], "received")


def exchange_in_circles(rank: Rank) -> None:
    """Messages longer than what the links hold, which every rank lists beginning with its own."""
    init(rank)
    own, others = rank.rank, [(rank.rank + i) % 3 for i in (1, 2)]
    inputs = random_inputs(3, 2_000_000, torch.float32)
    sent, negative = inputs[own].to(DEVICE), inputs[own].neg().to(DEVICE)
    dist.all_reduce(torch.zeros(1).to(DEVICE))  # joins the GPUs

    shares = [torch.zeros(1000).to(DEVICE) for _ in range(3)]
    dist.all_to_all(shares, list(sent[:3000].split(1000)))
    for source, share in enumerate(shares):
        assert_same(share.cpu(), inputs[source][1000 * own :][:1000], "all_to_all")

    received = [torch.zeros_like(sent) for _ in range(2)]
    ring = [dist.P2POp(dist.isend, part, others[0]) for part in (sent, negative)]
    ring += [dist.P2POp(dist.irecv, part, others[1]) for part in received]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    for part, sign in zip(received, (1, -1), strict=True):
        assert_same(part.cpu(), inputs[others[1]] * sign, "around the ring")

    mesh = []
    for other, part in zip(others, received, strict=True):
        mesh.append(dist.P2POp(dist.isend, sent, other))
        mesh.append(dist.P2POp(dist.irecv, part, other))
    for work in dist.batch_isend_irecv(mesh):
        work.wait()
    for other, part in zip(others, received, strict=True):
        assert_same(part.cpu(), inputs[other], "among all")
    dist.barrier()  # nobody leaves while others still receive


@pytest.mark.order
@pytest.mark.parametrize("num_queues", [1, 8], ids="queues{}".format)
def test_cuda_messages_in_circles_do_not_wait_for_each_other(
    num_queues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams of a rank share one hardware queue, as Megatron sets it, or have several."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(num_queues))
    run_ranks(3, exchange_in_circles)


@on_ranks(2)
def test_cuda_reduce_bucket_counts_anew_in_each_replay(rank: Rank) -> None:
    """Two buckets in one graph; each replay must count from 0 again."""
    comm = connect(rank)
    sizes = (5000, 300)
    buckets = [torch.zeros(size).to(DEVICE) for size in sizes]
    stats = [torch.zeros(2, dtype=torch.float64).to(DEVICE) for _ in sizes]

    def reduce(buckets: list[torch.Tensor], stats: list[torch.Tensor]) -> None:
        for bucket, measured in zip(buckets, stats, strict=True):
            comm.reduce_bucket(
                bucket, measured, wire_dtype=torch.float16, block_scaling=True, divisor=2.0
            )

    reduce(buckets, stats)
    graph = capture(lambda: reduce(buckets, stats))
    for turn in range(5):
        on_cpu = [random_inputs(2, size, torch.float32)[rank.rank] + turn for size in sizes]
        if turn % 2:
            on_cpu[0][7:9] = math.inf
        for bucket, source in zip(buckets, on_cpu, strict=True):
            bucket.copy_(source)
        graph.replay()
        cpu_stats = [torch.zeros(2, dtype=torch.float64) for _ in sizes]
        reduce(on_cpu, cpu_stats)
        for i in range(len(sizes)):
            case = f"turn {turn}, bucket {i}"
            assert_same(buckets[i].cpu(), on_cpu[i], case)
            assert_same(stats[i].cpu(), cpu_stats[i], f"{case}, stats")
        assert cpu_stats[0][0] == 2 * (turn % 2)


@pytest.mark.torch_kernels
@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_all_reduce_in_a_compiled_function_is_right(rank: Rank) -> None:
    comm = connect(rank)

    def step(batch: torch.Tensor) -> torch.Tensor:
        doubled = batch * 2
        comm.all_reduce(doubled)
        return doubled + 1

    # aot_eager runs no compiler, which would take most of a minute.
    compiled = torch.compile(step, backend="aot_eager")
    for turn in range(3):
        inputs = [source + turn for source in exact_inputs(rank.world_size, 700, torch.float32)]
        got = compiled(inputs[rank.rank].to(DEVICE))
        assert_same(got.cpu(), exact(inputs, "sum") * 2 + 1, f"turn {turn}")
