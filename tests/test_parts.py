"""Collectives with a root or with a part for each rank: as on Gloo, for every size and split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from oracle import name_of, random_inputs
from ranks import Rank, on_ranks, run_ranks

# In a mailbox, in one slot, in many rounds; small slots make all of it cheap.
SLOT_BYTES = 4096
SIZES = [0, 1, 5, 1000, 3000, 40_001]
DTYPES = [torch.float32, torch.float16, torch.int64]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums are exact, so that Gloo's have the same bits."""
    return torch.randint(-8, 8, (size,)).to(dtype)


class Both:
    """Runs calls of torch.distributed on rota and on Gloo, and compares what they wrote."""

    def __init__(self, rank: Rank) -> None:
        rank.init()
        torch.manual_seed(rank.rank)
        self.gloo = dist.new_group(backend="gloo")

    def check(
        self,
        collective: Callable[..., object],
        *arguments: object,
        writes: Sequence[torch.Tensor],
        **options: object,
    ) -> None:
        before = [tensor.clone() for tensor in writes]
        results = []
        for group in (None, self.gloo):
            for tensor, value in zip(writes, before, strict=True):
                tensor.copy_(value)
            collective(*arguments, group=group, **options)
            results.append([tensor.clone() for tensor in writes])
        for of_rota, of_gloo in zip(*results, strict=True):
            assert torch.equal(of_rota, of_gloo)


def with_roots(rank: Rank, dtype: torch.dtype) -> None:
    both, n = Both(rank), rank.world_size
    for size in SIZES:
        for root in range(n):
            is_root = rank.rank == root
            tensor, sent = values(size, dtype), values(size, dtype)
            reduced = sent.clone()
            both.check(dist.reduce, reduced, root, writes=[reduced] if is_root else [])
            if not is_root:  # Gloo overwrites it
                dist.reduce(reduced := sent.clone(), root)
                assert torch.equal(reduced, sent), "only the root receives"
            else:
                dist.reduce(sent.clone(), root)
            parts = [values(size, dtype) for _ in range(n)]
            listed = parts if is_root else None
            both.check(dist.gather, sent, listed, root, writes=parts)
            both.check(dist.scatter, tensor, listed, root, writes=[tensor])


def with_parts(rank: Rank, dtype: torch.dtype) -> None:
    both, n = Both(rank), rank.world_size
    for size in SIZES:
        part, parts, whole = (values(length, dtype) for length in (size, size * n, size * n))
        listed, outputs = list(parts.view(n, size)), list(whole.view(n, size))
        both.check(dist.reduce_scatter_tensor, part, parts, writes=[part])
        both.check(dist.reduce_scatter, part, listed, writes=[part])
        both.check(dist.all_to_all_single, whole, parts, writes=[whole])
        dist.all_to_all(outputs, listed)  # which Gloo does not have
        of_single = torch.empty_like(parts)
        dist.all_to_all_single(of_single, parts)
        assert torch.equal(whole, of_single)


# The length of the part that rank a sends to rank b. With the last two, the parts of some ranks
# travel in one message while those of others need many rounds.
LENGTHS: list[Callable[[int, int, int], int]] = [
    lambda size, a, b: size + a + b,
    lambda size, a, b: a * 10 + b * size,
    lambda size, a, b: 0 if a == 0 else size,
]


def with_splits(rank: Rank, dtype: torch.dtype) -> None:
    both, n = Both(rank), rank.world_size
    for size in SIZES:
        for length in LENGTHS:
            sent = [length(size, rank.rank, peer) for peer in range(n)]
            received = [length(size, peer, rank.rank) for peer in range(n)]
            parts, whole = values(sum(sent), dtype), values(sum(received), dtype)
            both.check(dist.all_to_all_single, whole, parts, received, sent, writes=[whole])


def with_unequal_parts(rank: Rank, dtype: torch.dtype) -> None:
    both, n = Both(rank), rank.world_size
    for size in SIZES:
        own = values(size + 3 * rank.rank, dtype)
        gathered = [torch.empty(size + 3 * peer, dtype=dtype) for peer in range(n)]
        dist.all_gather(gathered, own)
        for peer, part in enumerate(gathered):
            expected = own.clone() if peer == rank.rank else torch.empty_like(part)
            dist.broadcast(expected, peer, group=both.gloo)
            assert torch.equal(part, expected)
        sum_of_own = torch.empty(size + rank.rank, dtype=dtype)
        parts = [values(size + peer, dtype) for peer in range(n)]
        dist.reduce_scatter(sum_of_own, parts)
        for part in parts:
            dist.all_reduce(part, group=both.gloo)
        assert torch.equal(sum_of_own, parts[rank.rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ws{}".format)
@pytest.mark.parametrize("check", [with_roots, with_parts, with_splits, with_unequal_parts])
def test_backend_collective_equals_gloo(
    check: Callable[[Rank, torch.dtype], None], world_size: int
) -> None:
    run_ranks(world_size, check, DTYPES[world_size % len(DTYPES)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=name_of)
@on_ranks(3)
def test_communicator_collective_moves_every_part(rank: Rank, dtype: torch.dtype) -> None:
    communicator, n = rank.communicator(slot_bytes=SLOT_BYTES), rank.world_size
    for size in SIZES:
        inputs = [torch.arange(size * n).add(100 * peer).to(dtype) for peer in range(n)]
        own, total = inputs[rank.rank], torch.stack(inputs).sum(0).to(dtype)
        for root in range(n):
            is_root = rank.rank == root
            communicator.reduce(tensor := own.clone(), root)
            assert torch.equal(tensor, total if is_root else own)
            gathered = torch.zeros(n, size * n, dtype=dtype)
            communicator.gather(gathered if is_root else None, own, root)
            if is_root:
                assert torch.equal(gathered, torch.stack(inputs))
            part = torch.zeros(size, dtype=dtype)
            communicator.scatter(part, own if is_root else None, root)
            assert torch.equal(part, inputs[root].view(n, size)[rank.rank])
            for begin in (size // 2, size, size + size // 2):  # the root's output lies in its input
                sent = inputs[root].clone()
                part = sent[begin : begin + size] if is_root else torch.zeros(size, dtype=dtype)
                communicator.scatter(part, sent if is_root else None, root)
                assert torch.equal(part, inputs[root].view(n, size)[rank.rank])
        communicator.reduce_scatter(part, own)
        assert torch.equal(part, total.view(n, size)[rank.rank])
        communicator.all_to_all(whole := torch.zeros_like(own), own)
        expected = torch.cat([source.view(n, size)[rank.rank] for source in inputs])
        assert torch.equal(whole, expected)
        communicator.all_to_all(own_changed := own.clone(), own_changed)  # in place
        assert torch.equal(own_changed, expected)


@on_ranks(2)
def test_parts_of_strided_tensors_follow_logical_order(rank: Rank) -> None:
    communicator = rank.communicator()
    values = torch.arange(8.0).view(4, 2) + 10 * rank.rank
    communicator.all_to_all(output := torch.zeros(2, 4).t(), values.t().contiguous().t())
    expected = torch.stack(
        [torch.arange(8.0).view(2, 4)[rank.rank] + 10 * peer for peer in range(2)]
    )
    assert torch.equal(output.reshape(2, 4), expected)
    communicator.reduce_scatter(column := torch.zeros(2, 2)[:, 0], values[:, 0].contiguous())
    assert torch.equal(column, torch.tensor([0.0, 2.0]) * 2 + 10 + (8.0 if rank.rank else 0.0))


@on_ranks(3)
def test_reduce_and_reduce_scatter_have_the_bits_of_all_reduce(rank: Rank) -> None:
    """Sums in another order would differ: 16-bit sums that round once, in ascending rank. So would
    averages of integers that are divided more than once, or before they wrap."""
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.int8, "avg")):
        own = random_inputs(3, 3 * 5000, dtype)[rank.rank]
        communicator.all_reduce(total := own.clone(), op)
        communicator.reduce_scatter(part := torch.empty(5000, dtype=dtype), own, op)
        assert torch.equal(part, total.view(3, 5000)[rank.rank])
        for root in range(3):
            communicator.reduce(tensor := own.clone(), root, op)
            assert torch.equal(tensor, total if rank.rank == root else own)


@on_ranks(2)
def test_backend_premul_sum_multiplies_each_contribution(rank: Rank) -> None:
    rank.init()
    for factor in (0.5, torch.tensor(0.5)):
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(tensor := torch.full((5,), 4.0 + rank.rank), op)
        assert tensor.tolist() == [4.5] * 5
        source = torch.full((5,), 4.0 + rank.rank)
        dist.reduce_scatter_tensor(part := torch.zeros(2), source[:4], op)
        assert part.tolist() == [4.5] * 2
        assert source.tolist() == [4.0 + rank.rank] * 5, "the input is not changed"
    work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), async_op=True)
    work.wait()
    assert tensor.tolist() == [18.0] * 5


@on_ranks(2)
def test_backend_coalesced_calls_equal_single_ones(rank: Rank) -> None:
    rank.init()
    tensors = [torch.full((size,), float(rank.rank + size)) for size in (1, 70_000)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [tensor[0].item() for tensor in tensors] == [3.0, 140_001.0]
    parts = [torch.zeros(1), torch.zeros(35_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part, tensor in zip(parts, (torch.ones(2), torch.ones(70_000)), strict=True):
            dist.reduce_scatter_tensor(part, tensor)
    manager.wait()
    assert [part[0].item() for part in parts] == [2.0, 2.0]


@on_ranks(3)
def test_backend_object_collectives_move_objects(rank: Rank) -> None:
    rank.init()
    own, n = {"rank": rank.rank, "text": "x" * 100_000 * rank.rank}, rank.world_size
    gathered: list[dict[str, object] | None] = [None] * n
    dist.all_gather_object(gathered, own)
    assert [each["rank"] for each in gathered if each] == list(range(n))
    at_root = [None] * n if rank.rank == 1 else None
    dist.gather_object(own, at_root, dst=1)
    assert at_root is None or at_root == gathered
    received = [None]
    dist.scatter_object_list(received, [f"for {peer}" for peer in range(n)], src=0)
    assert received == [f"for {rank.rank}"]
    shared = [own if rank.rank == 2 else None]
    dist.broadcast_object_list(shared, src=2)
    assert shared == [gathered[2]]
