"""Broadcast, all-gather and barrier of rota.Communicator: bytes must arrive unchanged."""

from __future__ import annotations

import time

import pytest
import torch

from oracle import DTYPES, assert_same, name_of, random_patterns
from ranks import Rank, Ranks, on_ranks, run_ranks

MAILBOX_BYTES = 64 << 10
SLOT_BYTES = 4096
OTHER_DTYPES = (torch.complex64, torch.uint16, torch.uint64)  # moved, never reduced


def sizes_of(dtype: torch.dtype) -> list[int]:
    slot = SLOT_BYTES // dtype.itemsize
    mailbox = MAILBOX_BYTES // dtype.itemsize
    return [0, 1, slot - 1, slot + 1, mailbox, mailbox + 1, mailbox + 5 * slot + 37]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_broadcast(rank: Rank, dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for root in range(rank.world_size):
        for size in sizes_of(dtype):
            inputs = random_patterns(rank.world_size, size, dtype)
            tensor = inputs[rank.rank].clone()
            communicator.broadcast(tensor, root)
            assert_same(as_bytes(tensor), as_bytes(inputs[root]), f"root {root} size {size}")


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES], ids=name_of)
def test_broadcast_every_root_and_size_copies_its_bytes(dtype: torch.dtype) -> None:
    run_ranks(3, check_broadcast, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 4, 16], ids="ws{}".format)
def test_broadcast_every_world_size_copies_its_bytes(world_size: int) -> None:
    run_ranks(world_size, check_broadcast, torch.float32)


def check_all_gather(rank: Rank, dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(dtype):
        inputs = random_patterns(rank.world_size, size, dtype)
        output = torch.zeros(rank.world_size * size, dtype=dtype)
        communicator.all_gather(output, inputs[rank.rank])
        assert_same(as_bytes(output), torch.cat([as_bytes(t) for t in inputs]), f"size {size}")


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHER_DTYPES], ids=name_of)
def test_all_gather_every_size_copies_all_bytes(dtype: torch.dtype) -> None:
    run_ranks(3, check_all_gather, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 4, 16], ids="ws{}".format)
def test_all_gather_every_world_size_copies_all_bytes(world_size: int) -> None:
    run_ranks(world_size, check_all_gather, torch.float32)


@on_ranks(3)
def test_all_gather_input_inside_output_copies_all_bytes(rank: Rank) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(torch.float32):
        inputs = random_patterns(rank.world_size, size, torch.float32)
        output = torch.zeros(rank.world_size, size)
        output[rank.rank] = inputs[rank.rank]
        communicator.all_gather(output, output[rank.rank])
        assert_same(output.flatten(), torch.cat(inputs), f"size {size}")


@on_ranks(2)
def test_copies_of_strided_tensors_follow_logical_order(rank: Rank) -> None:
    communicator = rank.communicator()
    values = torch.arange(12.0).reshape(3, 4) + 100 * rank.rank
    communicator.broadcast(column := values.clone()[:, 1], 1)
    assert_same(column, torch.tensor([101.0, 105.0, 109.0]), "broadcast of a column")

    output = torch.zeros(2, 4, 3)
    communicator.all_gather(output, values.t())
    expected = torch.stack([(torch.arange(12.0).reshape(3, 4) + 100 * r).t() for r in range(2)])
    assert_same(output.flatten(), expected.flatten(), "all_gather of a transpose")


def wait_for_the_last(rank: Rank) -> None:
    communicator = rank.communicator()
    communicator.barrier()
    rank.tell()
    if rank.rank == rank.world_size - 1:
        rank.hear()
    communicator.barrier()
    rank.tell(time.monotonic())


@pytest.mark.parametrize("world_size", [2, 3], ids="ws{}".format)
def test_barrier_nobody_leaves_before_the_last_has_entered(world_size: int) -> None:
    with Ranks(world_size, wait_for_the_last) as ranks:
        ranks.hear_all()
        time.sleep(0.1)  # a rank that does not wait would leave too early
        last_enters = time.monotonic()
        ranks.tell(world_size - 1)
        left = [ranks.hear(rank) for rank in range(world_size)]
        ranks.results()
    assert min(left) >= last_enters


@pytest.mark.parametrize("world_size", [2, 3, 4], ids="ws{}".format)
@on_ranks()
def test_mixed_collectives_do_not_disturb_each_other(rank: Rank) -> None:
    """The parity of posts, mailboxes and slots changes from one iteration to the next."""
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    world_size = rank.world_size
    for turn in range(60):
        size = [1, 1023, 1025, 20_000][turn % 4]
        root = turn % world_size
        tensor = torch.full((size,), float(rank.rank + turn))
        communicator.broadcast(tensor, root)
        assert_same(tensor, torch.full((size,), float(root + turn)), f"broadcast, turn {turn}")

        algorithm = ["one_shot", "two_shot", "ordered_ring", "ring"][turn % 4]
        tensor = torch.full((20_000 - size,), float(rank.rank + turn))
        communicator.all_reduce(tensor, "max", algorithm)
        expected = torch.full_like(tensor, float(world_size - 1 + turn))
        assert_same(tensor, expected, f"{algorithm}, turn {turn}")

        if turn % 3 == 0:
            communicator.barrier()
        output = torch.empty(world_size, size)
        communicator.all_gather(output, torch.full((size,), float(rank.rank - turn)))
        expected = torch.arange(float(world_size)).sub(turn).repeat_interleave(size)
        assert_same(output.flatten(), expected, f"all_gather, turn {turn}")
