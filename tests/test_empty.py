"""rota.empty: collectives on tensors that peers read in place, and their memory."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch
import torch.distributed as dist

import rota
from heap import heap_bytes
from oracle import DTYPES, assert_same, exact_inputs, name_of, ops_of, random_patterns
from ranks import Rank, kill_self, on_ranks

SLOT_BYTES = 4096
MAILBOX_BYTES = 64 << 10
LONG = 3 * MAILBOX_BYTES + 260  # bytes; ends in the middle of a round, on a whole element


def in_heap(tensor: torch.Tensor) -> torch.Tensor:
    copy = rota.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@on_ranks(3)
def test_all_reduce_in_place_gives_the_bits_of_slots(rank: Rank, dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for op in ops_of(dtype):
        for num_elems in (0, 1, MAILBOX_BYTES // dtype.itemsize + 1, LONG // dtype.itemsize):
            inputs = random_patterns(rank.world_size, num_elems, dtype)
            expected = inputs[rank.rank].clone()
            communicator.all_reduce(expected, op=op, algorithm="two_shot")
            tensor = in_heap(inputs[rank.rank])
            communicator.all_reduce(tensor, op=op, algorithm="two_shot")
            assert_same(tensor, expected, f"{op} of {num_elems}")


@pytest.mark.parametrize("world_size", [1, 2, 5], ids="ws{}".format)
@on_ranks()
def test_every_call_of_tensors_in_the_heap(rank: Rank) -> None:
    """Parts of tensors, several groups, asynchronous calls, and calls that go through slots.

    test_overlaps.py has the other collectives.
    """
    rank.init()
    subgroup = dist.new_group(backend="rota")
    whole = rota.empty(2, LONG // 4 + 5)
    inputs = exact_inputs(rank.world_size, LONG // 4, torch.float32, "sum")
    total = torch.stack(list(inputs)).sum(0)
    for group in (None, subgroup):
        part = whole[1, 5:]
        part.copy_(inputs[rank.rank])
        dist.all_reduce(part, group=group, async_op=True).wait()
        assert torch.equal(part, total)
        assert whole[0].count_nonzero() == 0 and whole[1, :5].count_nonzero() == 0

    communicator = rota.Communicator()
    for algorithm in ("one_shot", "ordered_ring", "ring"):
        tensor = in_heap(inputs[rank.rank])
        communicator.all_reduce(tensor, algorithm=algorithm)
        assert torch.equal(tensor, total), algorithm
    tensor = in_heap(inputs[rank.rank])
    communicator.all_reduce(tensor, wire_dtype=torch.float16)
    expected = inputs[rank.rank].clone()
    communicator.all_reduce(expected, wire_dtype=torch.float16)
    assert torch.equal(tensor, expected)


@on_ranks(3)
def test_some_ranks_in_the_heap_and_some_not(rank: Rank) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    inputs = exact_inputs(rank.world_size, LONG // 4, torch.float32, "sum")
    for ranks_in_heap in range(1 << rank.world_size):
        own = inputs[rank.rank]
        is_in_heap = bool(ranks_in_heap >> rank.rank & 1)
        tensor = in_heap(own) if is_in_heap else own.clone()
        communicator.all_reduce(tensor)
        assert torch.equal(tensor, torch.stack(list(inputs)).sum(0))
        output = torch.zeros(rank.world_size, LONG // 4)
        communicator.all_gather(output, in_heap(own) if is_in_heap else own)
        assert torch.equal(output, torch.stack(list(inputs)))


def limit_addresses(num_bytes: int) -> None:
    """As `ulimit -v`: what this process may map from now on."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, hard))


@on_ranks(3)
def test_a_rank_without_addresses_for_heaps_goes_through_slots(rank: Rank) -> None:
    """Rank 1 cannot map its peers' heaps, so no rank reads in place; its own heap is smaller."""
    if rank.rank == 1:
        limit_addresses(1 << 30)
    communicator = rank.communicator()
    tensor = in_heap(torch.ones(LONG // 4))
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((LONG // 4,), 3.0))
    if rank.rank == 1:
        need = (
            r"cannot reserve 943718400 bytes .* in a heap of \d+ bytes; \d+ bytes free\); raise `"
        )
        with pytest.raises(rota.TransportError, match=need + "ulimit -v"):
            rota.empty(900 << 20, dtype=torch.uint8)


@on_ranks(1)
def test_addresses_that_are_limited_later_are_named(rank: Rank) -> None:
    rank.communicator()
    limit_addresses(64 << 20)
    text = (
        r"cannot reserve 40 bytes .* takes \d+ bytes of addresses, of which \d+ are left; .*raise"
    )
    with pytest.raises(rota.TransportError, match=text + " `ulimit -v`"):
        rota.empty(10)


# ---- the memory ----------------------------------------------------------------------------------


def test_size_and_dtype_are_those_of_torch_empty() -> None:
    for size in [((),), (0,), (3,), (2, 3), ((2, 3),), ([4],), (torch.Size([5, 0]),)]:
        tensor = rota.empty(*size)
        assert tensor.shape == torch.empty(*size).shape
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert tensor.count_nonzero() == 0
    assert rota.empty(7, dtype=torch.float8_e4m3fn).dtype == torch.float8_e4m3fn


def test_memory_goes_back_and_is_found_again() -> None:
    rota.empty(1)  # makes the heap, which has a page of its own
    before = heap_bytes()
    first, second = rota.empty(1 << 20, dtype=torch.uint8), rota.empty(3)
    view = first[5:].view(torch.int8)
    assert heap_bytes() - before == (1 << 20) + resource.getpagesize()
    address = first.data_ptr()
    del first
    assert heap_bytes() - before == (1 << 20) + resource.getpagesize()  # the view still holds it
    view.fill_(1)
    del view
    assert heap_bytes() - before == resource.getpagesize()
    again = rota.empty(1 << 20, dtype=torch.uint8)
    assert again.data_ptr() == address and again.count_nonzero() == 0
    assert second.count_nonzero() == 0


@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        ((-1,), {}, ValueError, "a length of -1, expected 0 or more"),
        ((1 << 40, 1 << 40), {}, ValueError, "more bytes than 64 bits can count"),
        ((1 << 50,), {}, rota.TransportError, "cannot reserve 4503599627370496 bytes"),
        ((2.5,), {}, TypeError, "expected ints, or one sequence of them"),
        ((2, "3"), {}, TypeError, "expected ints, or one sequence of them"),
        ((2,), {"dtype": "float32"}, TypeError, "expected a torch.dtype or None"),
    ],
)
def test_bad_sizes_are_refused(
    size: tuple[int, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rota.empty(*size, **options)


@on_ranks(2)
def test_forked_child_shares_tensors_and_makes_its_own(rank: Rank) -> None:
    communicator = rank.communicator()
    tensor = rota.empty(LONG // 4)
    pid = os.fork()
    if pid == 0:
        tensor += 2  # shared, as after share_memory_()
        own = rota.empty(LONG // 4)
        assert own.count_nonzero() == 0
        del tensor, own
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(tensor, torch.full_like(tensor, 2))
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, 4))


@on_ranks(1)
def test_torch_allocates_through_the_backend(rank: Rank) -> None:
    rank.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    cpu = torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu)
    before = heap_bytes()
    tensor = backend.allocate_tensor(1 << 20, dtype=torch.int8, device=cpu)
    assert heap_bytes() - before == 1 << 20 and tensor.shape == (1 << 20,)
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="a tensor on cuda:0, expected the CPU"):
        backend.allocate_tensor(1, dtype=torch.int8, device=torch.device("cuda", 0))


# ---- failures ------------------------------------------------------------------------------------


@on_ranks(2)
def test_mismatch_writes_nothing_and_the_group_goes_on(rank: Rank) -> None:
    communicator = rank.communicator()
    tensor = rota.empty(LONG + rank.rank).fill_(7)
    with pytest.raises(rota.Mismatch, match="nothing was written"):
        communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, 7))
    same = rota.empty(LONG).fill_(1)
    communicator.all_reduce(same)
    assert torch.equal(same, torch.full_like(same, rank.world_size))


@on_ranks(3, killed=[1])
def test_death_of_a_peer_is_an_error(rank: Rank) -> None:
    communicator = rank.communicator(timeout_s=30)
    tensor = rota.empty(LONG)
    communicator.all_reduce(tensor)
    if rank.rank == 1:
        time.sleep(0.1)  # the others wait for it
        kill_self()
    with pytest.raises(rota.PeerFailed, match=r"rank 1 \(pid \d+\) has died"):
        communicator.all_reduce(tensor)
    # The memory is still there, and other groups may use it.
    assert rota.empty(LONG).count_nonzero() == 0
