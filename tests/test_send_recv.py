"""Send and recv of CPU tensors, through rota.Communicator and through torch.distributed."""

from __future__ import annotations

import gc
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oracle import DTYPES, assert_same, name_of, random_patterns
from ranks import Rank, Ranks, check_error, error_of, on_ranks

OTHER_DTYPES = (torch.complex64, torch.uint16, torch.uint64)
CELL_BYTES = 128 << 10  # csrc/transport/layout.h
LINK_BYTES = 16 * CELL_BYTES  # of up to 5 ranks
# Zero, one, around the end of a cell and of several, a whole link, many links.
AROUND_CELLS = [n + i for n in (CELL_BYTES, 4 * CELL_BYTES) for i in (-1, 0, 1)]
SIZES = [0, 1, *AROUND_CELLS, LINK_BYTES, 5 * LINK_BYTES + 13]
LONG = LINK_BYTES  # elements of float32: four links


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def numbers(rank: int, num_elems: int = 1000) -> torch.Tensor:
    return torch.arange(num_elems, dtype=torch.float32) + rank * 0.5


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES], ids=name_of)
@on_ranks(2)
def test_send_every_size_and_dtype_arrives(rank: Rank, dtype: torch.dtype) -> None:
    comm = rank.communicator()
    peer = 1 - rank.rank
    for size in SIZES:
        inputs = random_patterns(2, size // dtype.itemsize, dtype)
        output = torch.zeros_like(inputs[0])
        if rank.rank == 0:
            comm.send(inputs[0], peer)
            assert comm.recv(output, peer) == peer
        else:
            assert comm.recv(output, peer) == peer
            comm.send(inputs[1], peer)
        assert_same(as_bytes(output), as_bytes(inputs[peer]), f"size {size}")


@on_ranks(2)
def test_send_both_ranks_first_does_not_hang(rank: Rank) -> None:
    """Both ranks send far more than their links hold before either receives."""
    comm = rank.communicator()
    for send, recv in ((comm.send, comm.recv), (dist.send, dist.recv)):
        output = torch.zeros(LONG)
        send(numbers(rank.rank, LONG), 1 - rank.rank)
        recv(output, 1 - rank.rank)
        assert_same(output, numbers(1 - rank.rank, LONG), "both first")


@on_ranks(2)
def test_send_bad_peer_tag_or_tensor_is_refused(rank: Rank) -> None:
    comm = rank.communicator()
    tensor = numbers(0)
    peer = 1 - rank.rank
    for call, fact in (
        (lambda: comm.send(tensor, 2), "rota.send: the peer is 2, expected a rank in [0, 2)"),
        (lambda: comm.recv(tensor, 2), "rota.recv: the peer is 2"),
        (lambda: comm.recv(tensor, -1), "rota.recv: the peer is -1"),
        (lambda: comm.send(tensor, peer, tag=-1), "rota.send: tag is -1, expected 0 or more"),
        (lambda: comm.recv(tensor, tag=-1), "rota.recv: tag is -1"),
        (lambda: dist.group.WORLD.send([tensor], peer, -5), "tag is -5"),
        (lambda: dist.group.WORLD.send([tensor, tensor], peer, 0), "2 tensors, expected one"),
        (lambda: comm.send(tensor.expand(2, 1000), peer), ""),
    ):
        check_error(error_of(call), "ValueError", fact)


def send_to_nobody(rank: Rank) -> tuple[str, str] | None:
    comm = rank.communicator(timeout_s=1)
    if rank.rank == 1:
        rank.hear()
        return None
    return error_of(lambda: comm.send(numbers(0, LONG), 1, tag=6))


def test_send_that_nobody_receives_times_out_and_names_who_was_awaited() -> None:
    with Ranks(2, send_to_nobody) as ranks:
        error = ranks.hear_result(0)
        ranks.tell(1)
        pid = ranks.pid(1)
    check_error(error, "Timeout", "rota.send: rank 0/2 waited ", f"for rank 1 (pid {pid})", "tag 6")


def wait_for_the_dead(rank: Rank, is_any: bool) -> tuple[str, str] | None:
    rank.init()
    output = torch.zeros(LONG)
    rank.tell()
    if rank.rank == 1:
        time.sleep(60)
    return error_of(lambda: dist.recv(output, None if is_any else 1))


@pytest.mark.parametrize("is_any", [False, True], ids=["from-it", "from-any"])
def test_recv_from_a_rank_that_dies_names_it(is_any: bool) -> None:
    with Ranks(2, wait_for_the_dead, is_any) as ranks:
        ranks.hear_all()
        time.sleep(0.1)
        pid = ranks.pid(1)
        ranks.kill(1)
        error = ranks.results(killed={1})[0]
    check_error(error, "PeerFailed", f"rank 1 (pid {pid})")


@on_ranks(2)
def test_isend_goes_on_while_its_rank_does_something_else(rank: Rank) -> None:
    """Rank 0 enters a barrier, which rank 1 enters only once it has received: nothing hangs."""
    rank.init()
    if rank.rank == 0:
        work = dist.isend(numbers(0, LONG), 1)
        dist.barrier()
        work.wait()
    else:
        output = torch.zeros(LONG)
        dist.recv(output, 0)
        dist.barrier()
        assert_same(output, numbers(0, LONG), "sent meanwhile")


@on_ranks(2)
def test_irecv_future_is_set_while_nobody_waits(rank: Rank) -> None:
    rank.init()
    peer = 1 - rank.rank
    output = torch.zeros(LONG)
    received: list[torch.Tensor] = []
    recv = dist.irecv(output, peer)
    done = recv.get_future().then(lambda future: received.extend(future.value()))
    send = dist.isend(numbers(rank.rank, LONG), peer)
    done.wait()
    assert_same(received[0], numbers(peer, LONG), "future")
    assert recv.is_completed() and recv.is_success()
    send.wait()


@on_ranks(2)
def test_work_wait_gives_up_and_the_recv_goes_on(rank: Rank) -> None:
    rank.init()
    if rank.rank == 0:
        rank.await_word()
        dist.send(numbers(0), 1)
        return
    output = torch.zeros(1000)
    work = dist.irecv(output, 0)
    error = error_of(lambda: work.wait(timedelta(milliseconds=50)))
    is_completed = work.is_completed()
    rank.say()
    work.wait()
    assert_same(output, numbers(0), "after all")
    check_error(error, "Timeout", "gave up after 50 ms")
    assert not is_completed


@on_ranks(2)
def test_work_that_is_dropped_is_done(rank: Rank) -> None:
    """A dropped work still completes, and then releases its tensor."""
    rank.init()
    peer = 1 - rank.rank
    output = torch.zeros(LONG)
    dist.isend(numbers(rank.rank, LONG), peer)
    dist.irecv(output, peer)
    gc.collect()
    dist.barrier()
    deadline = time.monotonic() + 30
    while not torch.equal(output, numbers(peer, LONG)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dist.barrier()  # the other rank has received this rank's message


@on_ranks(2)
def test_recv_from_a_rank_that_has_left_gets_what_it_sent(rank: Rank) -> None:
    comm = rank.communicator()
    if rank.rank == 0:
        comm.send(numbers(0), 1)
        comm.close()
        rank.say()
        assert error_of(lambda: comm.send(numbers(0), 1))[0] == "RotaError"
        return
    rank.await_word()
    output = torch.zeros(1000)
    comm.recv(output, 0)  # arrived before rank 0 left
    assert_same(output, numbers(0), "from a rank that has left")
    check_error(error_of(lambda: comm.recv(output, 0)), "PeerFailed", "has left the group")


EARLY_BYTES = 256 << 20


@on_ranks(2)
def test_early_message_without_memory_for_it_names_its_length(rank: Rank) -> None:
    """Rank 1 waits in a barrier, so it takes in what rank 0 sends, for which it has no memory."""
    rank.init()
    dist.send(torch.ones(1), 1) if rank.rank == 0 else dist.recv(torch.ones(1), 0)
    if rank.rank == 0:
        rank.await_word()
        error = error_of(lambda: dist.send(torch.zeros(EARLY_BYTES, dtype=torch.uint8), 1))
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most_bytes = pages * resource.getpagesize() + EARLY_BYTES // 4
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, limits[1]))
        rank.say()
        error = error_of(dist.barrier)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    length = f"(uint8[{EARLY_BYTES}], tag 0) that came before its recv"
    check_error(error, "TransportError", length)
