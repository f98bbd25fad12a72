"""Failures between ranks on GPUs: an exception that names the cause, never a hang."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch

import rota
from on_gpu import DEVICE, LIMIT_S, WAIT_S, capture, check_refused, connect, on_ranks
from oracle import assert_same, exact, exact_inputs
from ranks import Rank, Ranks, check_error, error_of

WARM_UP = 5
PROMPT_S = WAIT_S / 2  # far below the time-out; a death is noticed in milliseconds


def until_error(call: Callable[[], object]) -> tuple[str, str]:
    """Repeats `call`: calls only queue work, so an error is raised by a later call or a wait."""

    def loop() -> None:
        while True:
            call()
            torch.cuda.synchronize()

    return error_of(loop)


def reduce_until_error(rank: Rank, algorithm: str) -> list[tuple[str, str]]:
    comm = connect(rank)
    tensor = torch.zeros(2000).to(DEVICE)
    for _ in range(WARM_UP):
        comm.all_reduce(tensor, "sum", algorithm)
    torch.cuda.synchronize()
    rank.tell()
    first = until_error(lambda: comm.all_reduce(tensor, "sum", algorithm))
    return [first, error_of(lambda: comm.all_reduce(tensor)), error_of(comm.barrier)]


@pytest.mark.parametrize("algorithm", ["auto", "low_latency", "two_shot", "ring"])
def test_cuda_peer_killed_during_all_reduce_raises_peer_failed(algorithm: str) -> None:
    with Ranks(2, reduce_until_error, algorithm, timeout_s=LIMIT_S) as ranks:
        ranks.hear_all()
        started = time.monotonic()
        ranks.kill(1)
        first, *later = ranks.results(killed=[1])[0]
        assert time.monotonic() - started < PROMPT_S
        pid = ranks.pid(1)
    check_error(first, "PeerFailed", f"rank 1 (pid {pid})")
    for error in later:
        check_error(error, "PeerFailed")


@on_ranks(2)
def test_cuda_late_rank_is_a_timeout_that_names_it(rank: Rank) -> None:
    # Joining must fit in this timeout too, and there ranks start CUDA one after the other.
    comm = connect(rank, timeout_s=3.0)
    tensor = torch.zeros(2000).to(DEVICE)
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank.rank == 1:
        rank.await_word()
        return
    first, later = until_error(lambda: comm.all_reduce(tensor)), error_of(comm.barrier)
    rank.say()
    check_error(first, "Timeout", "rank 1", "rank 0/2")
    check_error(later, "Timeout")


@pytest.mark.order
@on_ranks(2)
def test_cuda_results_of_what_has_failed_are_nan_and_checked(rank: Rank) -> None:
    """Rank 1 takes no part in what rank 0 queues."""
    comm = connect(rank, timeout_s=3.0)
    comm.all_reduce(torch.zeros(2000).to(DEVICE))
    torch.cuda.synchronize()
    comm.check_results()
    if rank.rank == 1:
        rank.await_word()
        comm.check_results()  # of a dead group, but what was queued has ended well
        return
    sizes = {"low_latency": 300, "two_shot": 3001, "ring": 3001}
    summed = {algorithm: torch.ones(size).to(DEVICE) for algorithm, size in sizes.items()}
    halves, counts = torch.ones(3001).half().to(DEVICE), torch.arange(3001).to(DEVICE)
    gathered, received = torch.zeros(2, 3001).to(DEVICE), torch.zeros(3001).to(DEVICE)
    bucket, stats = torch.ones(3001).to(DEVICE), torch.zeros(2, dtype=torch.float64).to(DEVICE)
    for algorithm, tensor in summed.items():
        comm.all_reduce(tensor, "sum", algorithm)
    comm.all_reduce(halves)
    comm.all_reduce(counts)
    comm.all_gather(gathered, received)
    comm.broadcast(received, 1)
    comm.reduce_bucket(bucket, stats, wire_dtype=torch.float8_e4m3fn, block_scaling=True)
    torch.cuda.synchronize()
    error = error_of(comm.check_results)
    rank.say()
    for tensor in (*summed.values(), halves, received, bucket, gathered):
        assert tensor.cpu().isnan().all()
    assert_same(counts.cpu(), torch.arange(3001), "integers have no NaN")
    num_non_finite, squares = stats.cpu().tolist()
    assert num_non_finite == 3001 and squares != squares
    check_error(error, "Timeout", "rank 0", "rank 1")


@pytest.mark.order
@on_ranks(2)
def test_cuda_graph_outlives_its_communicator(rank: Rank) -> None:
    """A graph needs its communicator's memory, and must leave that of the peers alone."""
    comm = connect(rank)
    tensors = {
        algorithm: torch.ones(300).to(DEVICE) for algorithm in ("low_latency", "two_shot", "ring")
    }

    def reduce() -> None:
        for algorithm, tensor in tensors.items():
            comm.all_reduce(tensor, "sum", algorithm)

    reduce()
    graph = capture(reduce)
    comm.close()
    check_error(error_of(comm.all_reduce, tensors["ring"]), "RotaError")
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for tensor in tensors.values():
            assert tensor.cpu().isnan().all()
    del graph
    replacement = rank.communicator()
    replacement.connect_device(DEVICE)  # destroys what the graph has left
    tensor = torch.ones(300).to(DEVICE)
    replacement.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((300,), 2.0), "of a new communicator")


def be_late(rank: Rank) -> float:
    comm = connect(rank)
    if rank.rank == 1:
        rank.hear()
    tensor = torch.ones(2000).to(DEVICE)
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    return tensor.cpu().mean().item()


def test_cuda_slow_peer_is_named_on_stderr_and_then_awaited() -> None:
    with Ranks(2, be_late, timeout_s=LIMIT_S) as ranks:
        ranks.wait_for_stderr(0, "has waited")
        ranks.tell(1)
        assert ranks.results() == [2.0] * 2
        pid = ranks.pid(1)
        [line] = [line for line in ranks.stderr(0).splitlines() if "has waited" in line]
    assert f"rank 0/2 has waited 1 s for data of rank 1 (pid {pid})" in line


@on_ranks(2)
def test_cuda_ranks_that_disagree_raise_mismatch(rank: Rank) -> None:
    odd = rank.rank == 1
    eight = torch.zeros(8)
    disagreements: dict[str, Callable[[rota.Communicator], object]] = {
        "size": lambda comm: comm.all_reduce(torch.zeros(8 + odd).to(DEVICE)),
        "dtype": lambda comm: comm.all_reduce((eight.double() if odd else eight).to(DEVICE)),
        "op": lambda comm: comm.all_reduce(eight.to(DEVICE), "max" if odd else "sum"),
        "collective": lambda comm: (comm.broadcast if odd else comm.all_reduce)(eight.to(DEVICE)),
        "root": lambda comm: comm.broadcast(eight.to(DEVICE), rank.rank),
    }

    def error_in_own_group(call: Callable[[rota.Communicator], object]) -> tuple[str, str]:
        comm = connect(rank)
        # In the barrier at the latest.
        return error_of(lambda: (call(comm), torch.cuda.synchronize(), comm.barrier()))

    for what, call in disagreements.items():
        error, text = error_in_own_group(call)
        assert error == "Mismatch", (what, text)
        assert "rank 0 called" in text and "rank 1 called" in text, (what, text)


@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot", "two_shot", "ring"])
@on_ranks(2)
def test_cuda_ranks_that_replay_other_graphs_raise_mismatch(rank: Rank, algorithm: str) -> None:
    comm = connect(rank)
    tensors = [torch.zeros(1000, dtype=dtype).to(DEVICE) for dtype in (torch.int32, torch.float32)]

    def reduce(tensor: torch.Tensor) -> None:
        comm.all_reduce(tensor, "sum", algorithm)

    reduce(tensors[0])  # connects, and loads kernels
    graphs = [capture(functools.partial(reduce, tensor)) for tensor in tensors]
    for graph in reversed(graphs) if rank.rank == 1 else graphs:
        graph.replay()
    torch.cuda.synchronize()
    error = until_error(comm.barrier)
    check_error(error, "Mismatch", "replay the same CUDA graphs in the same order")


# ---- bad input


@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_cuda_capture_before_connect_device_says_what_to_do(rank: Rank) -> None:
    torch.cuda.set_device(DEVICE)
    comm = rank.communicator()
    tensor = torch.zeros(8).to(DEVICE)
    error, text = error_of(lambda: capture(lambda: comm.all_reduce(tensor)))
    assert error in ("RotaError", "TransportError", "ValueError"), text
    assert "connect_device" in text


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that starts one byte into `tensor`'s memory, as from another library."""
    num_bytes = tensor.nbytes - tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr() + 1, tensor.device, num_bytes
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


@on_ranks(2)
def test_cuda_bad_arguments_are_refused_before_anything_moves(rank: Rank) -> None:
    comm = connect(rank)
    on_gpu, on_cpu = torch.zeros(8).to(DEVICE), torch.zeros(8)
    stats = torch.zeros(2, dtype=torch.float64)
    bucket_options = {"wire_dtype": torch.float16, "block_scaling": True}
    bad_calls: dict[str, Callable[[], object]] = {
        "unknown algorithm": lambda: comm.all_reduce(on_gpu, "sum", "quick"),
        "unknown op": lambda: comm.all_reduce(on_gpu, "mean"),
        "low_latency on the CPU": lambda: comm.all_reduce(on_cpu, "sum", "low_latency"),
        "gather onto the CPU": lambda: comm.all_gather(torch.zeros(16), on_gpu),
        "stats on the CPU": lambda: comm.reduce_bucket(on_gpu, stats, **bucket_options),
        "complex": lambda: comm.all_reduce(torch.zeros(8, dtype=torch.complex64).to(DEVICE)),
        "misaligned": lambda: comm.all_reduce(misaligned(on_gpu)),
        "another device": lambda: comm.connect_device(torch.device("cpu")),
        "no such device": lambda: comm.connect_device(
            torch.device("cuda", torch.cuda.device_count())
        ),
    }
    check_refused(bad_calls, "ValueError", "TypeError", "RotaError", "TransportError")
    # Nothing has moved: the group goes on.
    inputs = exact_inputs(rank.world_size, 100, torch.float32)
    tensor = inputs[rank.rank].to(DEVICE)
    comm.all_reduce(tensor)
    assert_same(tensor.cpu(), exact(inputs, "sum"), "after refusals")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@on_ranks(2)
def test_cuda_tensor_of_another_gpu_is_refused(rank: Rank) -> None:
    comm = connect(rank)
    error, text = error_of(lambda: comm.all_reduce(torch.zeros(8).to("cuda:1")))
    assert error in ("ValueError", "RotaError"), text
    assert "cuda:1" in text and "cuda:0" in text


@on_ranks(2)
def test_cuda_communicator_that_is_dropped_ends_what_is_queued(rank: Rank) -> None:
    comm = connect(rank)
    tensor = torch.ones(2000).to(DEVICE)
    comm.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank.rank == 1:
        time.sleep(2.0)
    comm.all_reduce(tensor)
    del comm
    assert tensor.cpu().mean().item() == 4.0
