"""The other collectives, messages and subgroups of ranks on several hosts, and some on one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import rota
import rota.fsdp
from bucket_oracle import Format
from oracle import (
    FLOAT_DTYPES,
    assert_same,
    random_inputs,
    random_patterns,
)
from random_calls import Call, Case, call_communicator
from ranks import Rank
from several_hosts import (
    INTERLEAVED,
    ONE_HOST,
    STAR_BYTES,
    THREE_UNEVEN,
    TWO_BY_TWO,
    Layout,
    by_hosts,
    default_group,
    of_every_layout,
    of_layouts,
    of_one_host_and_several,
    on_layout,
    rounded,
)

# ---- the other collectives


@of_every_layout
@on_layout()
def test_reduce_and_reduce_scatter_have_the_bits_of_all_reduce(rank: Rank) -> None:
    communicator = rank.communicator()
    n = rank.world_size
    for dtype, part_elems in itertools.product(FLOAT_DTYPES, (0, 1, 63, 513, 40_001)):
        inputs = random_inputs(n, part_elems * n, dtype)
        own = inputs[rank.rank]
        for op in ("sum", "avg"):
            expected = by_hosts(inputs, rank.layout, op)
            part = torch.empty(part_elems, dtype=dtype)
            whole = own.clone()
            communicator.reduce_scatter(part, whole, op)
            assert_same(part, expected[part_elems * rank.rank :][:part_elems], f"scatter {dtype}")
            assert_same(whole, own, "the input is left as it is")
            for root in {0, n // 2, n - 1}:
                communicator.reduce(whole, root, op)
                assert_same(whole, expected if rank.rank == root else own, f"reduce {dtype}")
                whole.copy_(own)
    for dtype in (torch.float32, torch.float16):
        part_elems = 300_007  # more than one chunk
        inputs = random_inputs(n, part_elems * n, dtype)
        whole = inputs[rank.rank].clone()
        place = whole[part_elems * rank.rank :][:part_elems]
        communicator.reduce_scatter(place, whole)  # into the own part of the input
        expected = by_hosts(inputs, rank.layout)
        assert_same(place, expected[part_elems * rank.rank :][:part_elems], f"in place {dtype}")


LENGTHS = (0, 1, 70_001, 20, 300_007, 64)  # of uneven parts, by rank


@of_one_host_and_several
@on_layout()
def test_all_gather_and_reduce_scatter_of_uneven_parts(rank: Rank) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    for dtype, shift in itertools.product((torch.float32, torch.bfloat16, torch.int8), (0, 3)):
        lengths = [LENGTHS[(i + shift) % len(LENGTHS)] for i in range(n)]
        parts = [
            p[:length]
            for p, length in zip(random_patterns(n, max(lengths), dtype), lengths, strict=True)
        ]
        outputs = [torch.zeros(length, dtype=dtype) for length in lengths]
        dist.all_gather(outputs, parts[own_rank])
        for r, output in enumerate(outputs):
            assert_same(output, parts[r], f"all_gather {dtype} {lengths} from {r}")

        inputs = random_inputs(n, sum(lengths), dtype)
        output = torch.zeros(lengths[own_rank], dtype=dtype)
        dist.reduce_scatter(output, list(inputs[own_rank].split(lengths)))
        expected = by_hosts(inputs, rank.layout).split(lengths)[own_rank]
        assert_same(output, expected, f"reduce_scatter {dtype} {lengths}")


@of_every_layout
@on_layout()
def test_fsdp_collectives_round_once_to_the_wire(rank: Rank) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    cases = list(itertools.product(rota.fsdp.PARAMETER_WIRE_DTYPES, (0, 1, 63, 5001)))
    for wire, elems in [*cases, (torch.bfloat16, 600_001)]:
        inputs = random_inputs(n, elems, torch.float32)
        form = Format(wire, wire.itemsize == 1)
        expected = torch.cat([torch.from_numpy(rounded(p.numpy(), form)) for p in inputs])
        output = torch.zeros(n * elems)
        rota.fsdp.AllGather(wire)(output, inputs[own_rank], default_group())
        assert_same(output, expected, f"all_gather {elems} in {wire}")
    for wire, elems in itertools.product(rota.fsdp.GRADIENT_WIRE_DTYPES, (0, 1, 63, 10_001)):
        inputs = random_inputs(n, elems * n, torch.float32)
        for op, reduce_op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
            expected = by_hosts(inputs, rank.layout, op, Format(wire, False))
            output = torch.zeros(elems)
            work = rota.fsdp.ReduceScatter(wire)(
                output, inputs[own_rank], default_group(), reduce_op, async_op=True
            )
            assert work is not None
            work.wait()
            part = expected[elems * own_rank :][:elems]
            assert_same(output, part, f"reduce_scatter {op} {elems} in {wire}")


@of_every_layout
@on_layout()
def test_broadcast_and_all_gather_copy_all_bytes(rank: Rank) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    dtype = torch.int16
    star = STAR_BYTES // dtype.itemsize
    for size in (0, 1, 63, star, star + 1, 1_200_003):
        inputs = random_patterns(n, size, dtype)
        for root in range(n) if size <= star + 1 else (0, n - 1):
            communicator.broadcast(tensor := inputs[own_rank].clone(), root)
            assert_same(tensor, inputs[root], f"broadcast {size} from {root}")
        output = torch.zeros(n * size, dtype=dtype)
        communicator.all_gather(output, inputs[own_rank])
        assert_same(output, torch.cat(inputs), f"all_gather {size}")
        in_place = torch.zeros(n, size, dtype=dtype)
        in_place[own_rank] = inputs[own_rank]
        communicator.all_gather(in_place, in_place[own_rank])
        assert_same(in_place.flatten(), torch.cat(inputs), f"all_gather in place {size}")


def numbers(source: int, target: int, num_elems: int) -> torch.Tensor:
    return torch.arange(num_elems, dtype=torch.float64) + 1e7 * source + 1e9 * target


@of_one_host_and_several
@on_layout()
def test_gather_scatter_and_all_to_all_move_every_part(rank: Rank) -> None:
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    float64 = torch.float64
    for size in (0, 1, 1000, 200_003):
        for collective, num_roots in (("gather", n), ("scatter", n), ("all_to_all", 1)):
            for root in range(num_roots):
                call = Call(collective, float64, size, root=root)
                case = Case(call, size, own_rank, n)
                call_communicator(communicator, call, case.tensors)
                case.check(str(call))
        whole = torch.cat([numbers(own_rank, r, size) for r in range(n)])
        communicator.all_to_all(whole, whole)
        expected = torch.cat([numbers(r, own_rank, size) for r in range(n)])
        assert_same(whole, expected, f"all_to_all {size} in place")

    def length(source: int, target: int) -> int:
        return (source * 7 + target * 3) % 5 * 20_011 if (source + target) % 3 else 0

    sent = [length(own_rank, r) for r in range(n)]
    received = [length(r, own_rank) for r in range(n)]
    whole = torch.cat([numbers(own_rank, r, sent[r]) for r in range(n)])
    output = torch.zeros(sum(received), dtype=float64)
    communicator.all_to_all(output, whole, output_splits=received, input_splits=sent)
    expected = torch.cat([numbers(r, own_rank, received[r]) for r in range(n)])
    assert_same(output, expected, "all_to_all with splits")
    outputs = [torch.zeros(elems, dtype=float64) for elems in received]
    dist.all_to_all(outputs, [numbers(own_rank, r, sent[r]) for r in range(n)])
    assert_same(torch.cat(outputs), expected, "all_to_all of lists")
    communicator.barrier()
    dist.barrier()


def check_futures(own: float, total: float) -> None:
    work = dist.all_reduce(tensor := torch.full((70_001,), own), async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait()[-1].item() == 2 * total
    assert future.wait()[0].data_ptr() == tensor.data_ptr()
    assert work.wait() and work.is_completed() and work.is_success()
    for values in (work.result(), work.get_future().wait()):  # also after the work is done
        assert values[0][0].item() == total


def check_objects(n: int, own_rank: int) -> None:
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": own_rank, "text": "x" * 60_000 * own_rank})
    assert [(one["rank"], len(one["text"])) for one in gathered] == [
        (r, 60_000 * r) for r in range(n)
    ]
    objects = ["from the last", {"a": 1}] if own_rank == n - 1 else [None, None]
    dist.broadcast_object_list(objects, src=n - 1)
    assert objects == ["from the last", {"a": 1}]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(n)] if own_rank == 0 else None)
    assert scattered == [f"for {own_rank}"]
    collected: list[Any] | None = [None] * n if own_rank == 1 else None
    dist.gather_object("x" * own_rank, collected, dst=1)
    assert collected is None or collected == ["x" * r for r in range(n)]


def check_sparse_sums(n: int, own_rank: int) -> None:
    for places in ([], [0], [3, 1, 3]):
        indices = [[[place + r for place in places]] * 2 for r in range(n)]
        values = torch.full((len(places), 2), 3.0)
        shape = (3 + n, 3 + n, 2)
        sparse = [
            torch.sparse_coo_tensor(torch.tensor(i, dtype=torch.int64), values, shape)
            for i in indices
        ]
        dist.all_reduce(tensor := sparse[own_rank].clone())
        assert torch.equal(tensor.to_dense(), torch.stack([s.to_dense() for s in sparse]).sum(0))


@of_layouts(ONE_HOST, TWO_BY_TWO, THREE_UNEVEN, INTERLEAVED)
@on_layout()
def test_backend_async_coalesced_object_and_sparse_calls(rank: Rank) -> None:
    """What DDP, FSDP and users call beside the plain collectives; test_random_mismatches.py has
    calls in flight together, and torch's manager of coalesced ones."""
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    own, total = float(own_rank + 1), n * (n + 1) / 2
    check_futures(own, total)
    dist.all_reduce(premul := torch.full((1000,), own), dist._make_nccl_premul_sum(0.5))
    assert premul.unique().tolist() == [total / 2]
    dist.all_reduce_coalesced(pair := [torch.full((1,), own), torch.full((2,), own)])
    assert [t.tolist() for t in pair] == [[total], [total] * 2]
    check_objects(n, own_rank)
    check_sparse_sums(n, own_rank)


# ---- messages between two ranks


@of_one_host_and_several
@on_layout()
def test_messages_of_every_pair_arrive(rank: Rank) -> None:
    """Both send first. test_random_messages.py has tags, their order, and calls in between."""
    communicator = rank.communicator()
    n, own_rank = rank.world_size, rank.rank
    for size in (0, 1, 63, 5000, 300_001):
        for shift in range(1, n):
            to, source = (own_rank + shift) % n, (own_rank - shift) % n
            work = communicator.isend(numbers(own_rank, to, size), to)
            output = torch.full((size,), -1.0, dtype=torch.float64)
            assert communicator.recv(output, source) == source
            work.wait()
            assert_same(output, numbers(source, own_rank, size), f"{size} from {source}")
    works = [communicator.isend(numbers(own_rank, r, 7), r, 3) for r in range(n) if r != own_rank]
    sources = set()
    for _ in works:
        source = communicator.recv(output := torch.zeros(7, dtype=torch.float64), tag=3)
        assert_same(output, numbers(source, own_rank, 7), f"of any source, from {source}")
        sources.add(source)
    assert sources == set(range(n)) - {own_rank}
    for work in works:
        work.wait()
    objects = [{"from": own_rank}]
    if own_rank == 0:
        dist.send_object_list(objects, dst=n - 1)
        communicator.send(torch.ones(1), n - 1, tag=1)
    elif own_rank == n - 1:
        dist.recv_object_list(objects, src=0)
        assert objects == [{"from": 0}]
    communicator.barrier()  # a short message needs nobody to receive it
    if own_rank == n - 1:
        communicator.recv(one := torch.zeros(1), 0, tag=1)
        assert one.item() == 1


# ---- subgroups


@of_layouts(TWO_BY_TWO, THREE_UNEVEN, INTERLEAVED)
@on_layout()
def test_subgroups_within_and_across_hosts(rank: Rank) -> None:
    rank.init()
    n, own_rank = rank.world_size, rank.rank
    # Within a host, one rank of each host, most of them, and all in another order.
    members_of = [*rank.layout.hosts, [host[0] for host in rank.layout.hosts], list(range(1, n))]
    groups = [dist.new_group(members, backend="rota") for members in members_of]
    for members, group in zip(members_of, groups, strict=True):
        if own_rank not in members:
            continue
        place = {rank.layout.host_of[r] for r in members}
        assert len(rota.Communicator(group).hosts) == len(place)
        inputs = random_inputs(n, 10_001, torch.float32)
        dist.all_reduce(tensor := inputs[own_rank].clone(), group=group)
        part = Layout(tuple(rank.layout.host_of[r] for r in members))
        assert_same(tensor, by_hosts([inputs[r] for r in members], part), f"{members}")
    split = default_group().split_group([0, n - 1], group_name="ends")
    assert (split is None) == (own_rank not in (0, n - 1))
    if split is not None:
        work = split._get_backend(torch.device("cpu")).allreduce([tensor := torch.ones(3)])
        work.wait()
        assert tensor[0].item() == 2
    everyone = [dist.new_group(backend="rota") for _ in range(2)]
    for group in everyone:
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(everyone[0])
    dist.all_reduce(tensor := torch.ones(1))  # the others still work
    dist.all_reduce(tensor, group=everyone[1])
    assert tensor.item() == n * n


@on_layout(TWO_BY_TWO, timeout_s=20)
def test_group_can_be_made_again_over_the_same_store(rank: Rank) -> None:
    """Like torchrun, whose agent keeps one store for all groups."""
    store = rank.make_store()
    for _ in range(3):
        dist.init_process_group("rota", store=store, rank=rank.rank, world_size=rank.world_size)
        group = dist.new_group(backend="rota")
        dist.all_reduce(tensor := torch.ones(2))
        dist.all_reduce(tensor, group=group)
        assert tensor[0].item() == rank.world_size**2
        dist.destroy_process_group()
