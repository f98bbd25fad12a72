"""Calls that only move bytes take every dtype that torch stores; only sums have a list."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks
from several_hosts import ONE_BY_ONE, PAIR, TWO_BY_TWO, of_layouts, on_layout

ALL_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
MOVED = sorted(ALL_DTYPES - QUANTIZED, key=str)
ONLY_MOVED = [  # the others of an older or newer torch are in MOVED
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.float8_e4m3fnuz,
    torch.bits8,
    torch.bits16,
    torch.complex32,
    torch.int4,
]
SIZE = 1001


def pattern(rank: int, dtype: torch.dtype, num_elems: int = SIZE) -> torch.Tensor:
    generator = np.random.default_rng([rank, num_elems])
    num_values = 2 if dtype == torch.bool else 256
    values = generator.integers(0, num_values, num_elems * dtype.itemsize, np.uint8)
    return torch.from_numpy(values).view(dtype)


def spread(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The same values, `stride` elements apart."""
    memory = pattern(99, tensor.dtype, stride * tensor.numel())[::stride]
    copyable(memory).copy_(copyable(tensor))
    return memory


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Torch has no copies of some dtypes of one byte."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(copyable(tensor).contiguous().view(torch.uint8).numpy())


def moves(rank: Rank, dtype: torch.dtype, stride: int) -> Iterator[tuple[str, bytes]]:
    """Each call, with the bytes that it has received."""
    comm = rank.communicator()
    n, me = rank.world_size, rank.rank
    everyones = torch.cat([copyable(pattern(r, dtype)) for r in range(n)]).view(dtype)
    other = (me + 1) % n

    def own() -> torch.Tensor:
        return spread(pattern(me, dtype), stride)

    def place(num_elems: int = SIZE) -> torch.Tensor:
        return spread(pattern(98, dtype, num_elems), stride)

    for name, broadcast in (("comm", comm.broadcast), ("dist", dist.broadcast)):
        broadcast(tensor := own(), 1)
        yield f"{name} broadcast", bytes_of(tensor)
    comm.all_gather(gathered := place(n * SIZE), own())
    yield "all_gather", bytes_of(gathered)
    dist.all_gather(parts := [place() for _ in range(n)], own())
    yield "dist.all_gather", b"".join(map(bytes_of, parts))
    comm.gather(gathered if me == 1 else None, own(), 1)
    yield "gather", bytes_of(gathered)
    comm.scatter(part := place(), spread(everyones, stride) if me == 1 else None, 1)
    yield "scatter", bytes_of(part)
    comm.all_to_all(shuffled := place(n * 7), spread(pattern(me, dtype, n * 7), stride))
    yield "all_to_all", bytes_of(shuffled)
    dist.all_to_all_single(shuffled := place(n * 7), spread(pattern(me, dtype, n * 7), stride))
    yield "dist.all_to_all", bytes_of(shuffled)
    for name, isend, irecv in (
        ("comm", comm.isend, comm.irecv),
        ("dist", dist.isend, dist.irecv),
    ):
        received = place()
        works = [irecv(received, (me - 1) % n), isend(own(), other)]
        for work in works:
            work.wait()
        yield f"{name} irecv", bytes_of(received)


@of_layouts(PAIR, TWO_BY_TWO)
@on_layout()
def test_every_dtype_of_torch_is_moved(rank: Rank) -> None:
    n, me = rank.world_size, rank.rank
    for dtype in MOVED if rank.layout == PAIR else ONLY_MOVED:
        everyones = b"".join(bytes_of(pattern(r, dtype)) for r in range(n))
        chunks = [pattern(r, dtype, n * 7).view(n, 7)[me] for r in range(n)]
        expected = {
            "broadcast": bytes_of(pattern(1, dtype)),
            "all_gather": everyones,
            "gather": everyones,
            "scatter": bytes_of(pattern(me, dtype)),
            "all_to_all": b"".join(map(bytes_of, chunks)),
            "irecv": bytes_of(pattern((me - 1) % n, dtype)),
        }
        for stride in (1, 2):
            for call, received in moves(rank, dtype, stride):
                kind = call.removeprefix("dist.").removeprefix("dist ").removeprefix("comm ")
                assert received == expected[kind], f"{call} of {dtype}, stride {stride}"


@of_layouts(PAIR, ONE_BY_ONE)
@on_layout()
def test_every_dtype_of_torch_is_kept_in_windows_and_heap_tensors(rank: Rank) -> None:
    rank.init()
    other = 1 - rank.rank
    for dtype in MOVED:
        window = rota.Window(SIZE, dtype=dtype)
        window.put(spread(pattern(rank.rank, dtype), 2), other)
        window.signal(other)
        window.wait_signal(other)
        assert bytes_of(window.view(rank.rank)) == bytes_of(pattern(other, dtype)), dtype
        window.get(copy := spread(pattern(98, dtype), 2), other)
        assert bytes_of(copy) == bytes_of(pattern(rank.rank, dtype)), dtype
        dist.barrier()  # a window that is closed is read by nobody
        window.close()
        tensor = rota.empty(SIZE, dtype=dtype)
        copyable(tensor).copy_(copyable(pattern(rank.rank, dtype)))
        dist.broadcast(tensor, 0)
        assert bytes_of(tensor) == bytes_of(pattern(0, dtype)), dtype


@on_ranks(2)
def test_sum_of_a_dtype_that_is_only_moved_names_those_that_are_summed(rank: Rank) -> None:
    comm = rank.communicator()
    for dtype in ONLY_MOVED:
        for call in (comm.all_reduce, comm.reduce):
            error = error_of(call, pattern(0, dtype))
            check_error(error, "TypeError", "expected one of float32, float64", "bool")
    comm.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [rank.world_size] * 3


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@on_ranks(2)
def test_dtypes_of_one_size_that_differ_between_ranks_are_a_mismatch(rank: Rank) -> None:
    comm = rank.communicator()
    tensor = pattern(0, (torch.float8_e8m0fnu, torch.bits8)[rank.rank])
    errors = [error_of(comm.broadcast, tensor, 0)]
    for pair in (
        ((torch.complex64, 2), (torch.complex128, 1)),
        ((torch.uint8, 4), (torch.float8_e4m3fn, 4)),
        ((torch.complex64, 1), (torch.uint8, 8)),
    ):
        own = pattern(0, *pair[rank.rank])
        assert error_of(comm.broadcast, own, 0)[0] == "Mismatch", pair
    if rank.rank == 0:
        comm.send(tensor, 1)
    else:
        errors.append(error_of(comm.recv, tensor, 0))
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    errors.append(error_of(comm.broadcast, quantized, 0))
    *mismatches, (error, text) = errors
    assert error == "TypeError" and "QInt8" in text and "int_repr()" in text
    for error in mismatches:
        check_error(error, "Mismatch", "float8_e8m0fnu[1001]", "bits8[1001]")
