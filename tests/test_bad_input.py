"""Bad arguments: a clear error before anything moves, and the group stays usable."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks


class Case(NamedTuple):
    call: Callable[[rota.Communicator], object]
    error: str
    facts: str  # what the text must name, with bars between them


def floats(num_elems: int = 4) -> torch.Tensor:
    return torch.ones(num_elems)


def all_reduce(error: str, facts: str, **options: Any) -> Case:
    """A call with these options, and a tensor of floats if they have none."""
    options = {"tensor": floats()} | options
    return Case(lambda c: c.all_reduce(**options), error, f"rota.all_reduce | {facts}")


OVERLAPPING = torch.ones(10).as_strided((4, 4), (2, 1))
INTEGERS, BOOLS = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
SPARSE = torch.eye(3).to_sparse()
DTYPES = "float32 | float64 | float16 | bfloat16 | uint8 | int64 | bool"

CASES: dict[str, Case] = {
    # ---- all_reduce: arguments that are not tensors, or tensors that cannot be reduced
    "list": all_reduce("TypeError", "list | torch.Tensor", tensor=[1.0, 2.0]),
    "complex": all_reduce("TypeError", f"Complex | {DTYPES}", tensor=floats().cfloat()),
    "uint16": all_reduce("TypeError", f"UInt16 | {DTYPES}", tensor=floats().to(torch.uint16)),
    "sparse-coo": all_reduce("TypeError", "Sparse | to_dense()", tensor=SPARSE),
    "sparse-csr": all_reduce("TypeError", "SparseCsr | to_dense()", tensor=SPARSE.to_sparse_csr()),
    "meta": all_reduce("TypeError", "meta | CPU", tensor=torch.ones(3, device="meta")),
    "expanded": all_reduce("ValueError", "share memory | contiguous()", tensor=floats(1).expand(5)),
    "overlapping": all_reduce("ValueError", "share memory | contiguous()", tensor=OVERLAPPING),
    # ---- all_reduce: options
    "op": all_reduce(
        "ValueError", "'median' | sum | avg | product | min | max | bxor", op="median"
    ),
    "algorithm": all_reduce(
        "ValueError",
        "'tree' | one_shot | two_shot | ordered_ring | ring | auto",
        algorithm="tree",
    ),
    "average-of-bools": all_reduce("TypeError", "avg | bool | integers", tensor=BOOLS, op="avg"),
    "bits-of-floats": all_reduce("TypeError", "bxor | float32 | integer", op="bxor"),
    "wider-wire": all_reduce(
        "TypeError",
        "wire_dtype | float32 | float16",
        tensor=floats().half(),
        wire_dtype=torch.float32,
    ),
    "integer-wire": all_reduce("TypeError", "wire_dtype | int8 | float32", wire_dtype=torch.int8),
    "wire-of-integers": all_reduce(
        "TypeError", "wire_dtype | float16 | int64", tensor=INTEGERS, wire_dtype=torch.float16
    ),
    "wire-as-text": all_reduce("TypeError", "wire_dtype | str | torch.dtype", wire_dtype="float16"),
    "hop-as-number": all_reduce("TypeError", "hop_dtype | int | torch.dtype", hop_dtype=16),
    "async-as-number": all_reduce("TypeError", "async_op | int | bool", async_op=1),
    "op-as-number": all_reduce("TypeError", "op | int | str", op=0),
    "torch-op": all_reduce("TypeError", "op | str", op=dist.ReduceOp.SUM),
    "no-tensor": Case(lambda c: c.all_reduce(op="sum"), "TypeError", "rota.all_reduce | tensor"),
    "unknown-keyword": all_reduce("TypeError", "'dtype'", dtype=torch.float16),
    "given-twice": Case(
        lambda c: c.all_reduce(floats(), "sum", op="sum"),
        "TypeError",
        "rota.all_reduce | op | twice",
    ),
    "too-many": Case(
        lambda c: c.all_reduce(floats(), "sum", "auto", None, None, False, None, "rank", None, 10),
        "TypeError",
        "rota.all_reduce | 10 | 9",
    ),
    "not-made": Case(
        lambda c: rota.Communicator.all_reduce(
            rota.Communicator.__new__(rota.Communicator), floats()
        ),
        "TypeError",
        "rota.all_reduce | __init__",
    ),
    "op-not-unicode": Case(
        lambda c: c.all_reduce(floats(), "\ud800"), "UnicodeEncodeError", "surrogates"
    ),
    "hop-without-ring": all_reduce(
        "ValueError", "hop_dtype | algorithm='ring'", hop_dtype=torch.float32
    ),
    "strange-hop": all_reduce(
        "TypeError",
        "hop_dtype | bfloat16 | float32",
        algorithm="ring",
        hop_dtype=torch.bfloat16,
    ),
    "groups-of-unequal-size": all_reduce(
        "ValueError", "group_size is 3 | divisor of world_size 2", group_size=3
    ),
    "groups-of-none": all_reduce("ValueError", "is 0", group_size=0),
    "groups-of-too-many": all_reduce("ValueError", "group_size is -9", group_size=-(1 << 80)),
    "group-as-bool": all_reduce("TypeError", "group_size | bool | int", group_size=True),
    "groups-in-a-ring": all_reduce(
        "ValueError",
        "ordered_ring | group_size | two_shot",
        algorithm="ordered_ring",
        group_size=2,
    ),
    "strange-order": all_reduce("ValueError", "order is 'hilbert' | rank, tree", order="hilbert"),
    "shards-without-a-tree": all_reduce("ValueError", "num_shards | order='tree'", num_shards=4),
    "tree-of-groups": all_reduce(
        "ValueError", "order='tree' | group_size", order="tree", group_size=2
    ),
    "tree-in-a-ring": all_reduce(
        "ValueError",
        "algorithm='ring' | order='tree' | two_shot",
        algorithm="ring",
        order="tree",
    ),
    # ---- the others
    "shards-no-power-of-two": Case(
        lambda c: c.reduce(floats(), order="tree", num_shards=6),
        "ValueError",
        "rota.reduce | num_shards is 6 | power of two",
    ),
    "fewer-shards-than-ranks": Case(
        lambda c: c.reduce_scatter(floats(1), floats(2), order="tree", num_shards=1),
        "ValueError",
        "rota.reduce_scatter | num_shards is 1 | at least 2",
    ),
    "negative-root": Case(
        lambda c: c.broadcast(floats(), -1), "ValueError", "rota.broadcast | -1 | [0, 2)"
    ),
    "large-root": Case(
        lambda c: c.broadcast(floats(), 2), "ValueError", "rota.broadcast | 2 | [0, 2)"
    ),
    "root-as-text": Case(lambda c: c.broadcast(floats(), "0"), "TypeError", "broadcast"),
    "broadcast-sparse": Case(lambda c: c.broadcast(SPARSE), "TypeError", "rota.broadcast | Sparse"),
    "broadcast-expanded": Case(
        lambda c: c.broadcast(floats(1).expand(5)), "ValueError", "rota.broadcast | contiguous()"
    ),
    "short-output": Case(
        lambda c: c.all_gather(floats(7), floats()), "ValueError", "rota.all_gather | 7 | 4 | 2"
    ),
    "output-of-other-dtype": Case(
        lambda c: c.all_gather(floats(8), floats().double()),
        "TypeError",
        "rota.all_gather | Float | Double",
    ),
    "gather-meta": Case(
        lambda c: c.all_gather(floats(8), torch.ones(4, device="meta")),
        "TypeError",
        "rota.all_gather | meta",
    ),
    "reduce-root": Case(lambda c: c.reduce(floats(), 2), "ValueError", "rota.reduce | [0, 2)"),
    "reduce-op": Case(
        lambda c: c.reduce(floats(), op="mean"), "ValueError", "rota.reduce | 'mean' | avg"
    ),
    "gather-root": Case(
        lambda c: c.gather(floats(8), floats(), -1), "ValueError", "rota.gather | -1 | [0, 2)"
    ),
    "gather-without-output": Case(
        lambda c: c.gather(None, floats()), "ValueError", "rota.gather | 0 output | world_size = 2"
    ),
    "gather-output-elsewhere": Case(
        lambda c: c.gather(floats(8), floats(), 1), "ValueError", "rota.gather | output | root 1"
    ),
    "gather-output-length": Case(
        lambda c: c.gather(floats(9), floats()), "ValueError", "rota.gather | 9 | 2 * 4"
    ),
    "scatter-input-length": Case(
        lambda c: c.scatter(floats(4), floats(9)), "ValueError", "rota.scatter | 9 | 2 * 4"
    ),
    "scatter-input-elsewhere": Case(
        lambda c: c.scatter(floats(4), floats(8), 1), "ValueError", "rota.scatter | root 1"
    ),
    "reduce_scatter-length": Case(
        lambda c: c.reduce_scatter(floats(4), floats(7)),
        "ValueError",
        "rota.reduce_scatter | 7 | 2 * 4",
    ),
    "reduce_scatter-dtype": Case(
        lambda c: c.reduce_scatter(floats(2).cfloat(), floats(4).cfloat()),
        "TypeError",
        "rota.reduce_scatter | ComplexFloat | float32",
    ),
    "all_to_all-odd": Case(
        lambda c: c.all_to_all(floats(8), floats(7)), "ValueError", "rota.all_to_all | 7 | 2"
    ),
    "all_to_all-sum-of-splits": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[4, 5]),
        "ValueError",
        "rota.all_to_all | input splits | 9 | 8",
    ),
    "all_to_all-number-of-splits": Case(
        lambda c: c.all_to_all(floats(8), floats(8), output_splits=[8]),
        "ValueError",
        "rota.all_to_all | output splits | 1 | 2 ranks",
    ),
    "all_to_all-negative-split": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[9, -1]),
        "ValueError",
        "rota.all_to_all | -1",
    ),
    "all_to_all-own-part": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[3, 5]),
        "ValueError",
        "rota.all_to_all | this rank's | 3 | 4",
    ),
}


@on_ranks(2)
def test_bad_argument_raises_at_once_and_the_group_goes_on(rank: Rank) -> None:
    """One rank makes a bad call; then all make a good one, which shows that nothing moved."""
    communicator = rank.communicator()
    for name, case in CASES.items():
        if rank.rank == 0:
            check_error(error_of(case.call, communicator), case.error, *case.facts.split(" | "))
        communicator.all_reduce(tensor := floats(3))
        assert tensor.tolist() == [2.0] * 3, name


BACKEND_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "sparse-average": (lambda: dist.all_reduce(SPARSE, dist.ReduceOp.AVG), "sparse | SUM"),
    "uint16": (lambda: dist.all_reduce(floats().to(torch.uint16)), "UInt16 | float32"),
    "expanded": (lambda: dist.all_reduce(floats(1).expand(5)), "contiguous()"),
    "bool-average": (lambda: dist.all_reduce(BOOLS, dist.ReduceOp.AVG), "avg | bool"),
    "bits-of-floats": (lambda: dist.all_reduce(floats(), dist.ReduceOp.BAND), "rota."),
    "reduce-bits-of-floats": (lambda: dist.reduce(floats(), 0, dist.ReduceOp.BXOR), "rota."),
    "integer-premul": (
        lambda: dist.all_reduce(INTEGERS, dist._make_nccl_premul_sum(0.5)),
        "PREMUL_SUM | int64 | floats",
    ),
    "outputs": (lambda: dist.all_gather([floats()], floats()), "rota.all_gather | 1 | 2"),
    "output-length": (
        lambda: dist.all_gather([floats(5), floats()], floats()),
        "rota.all_gather | 5 | 4",
    ),
}


@on_ranks(2)
def test_backend_bad_argument_raises_at_once_and_the_group_goes_on(rank: Rank) -> None:
    """Of an idle group, and of one with an earlier call in its queue."""
    rank.init()
    for (call, facts), is_busy in itertools.product(BACKEND_CALLS.values(), (False, True)):
        work = dist.all_reduce(floats(), async_op=True) if is_busy else None
        if rank.rank == 0:
            kind, text = error_of(call)
            assert kind in ("TypeError", "ValueError", "RuntimeError", "NotImplementedError"), text
            assert all(fact in text for fact in facts.split(" | ")), text
        if work is not None:
            work.wait()
        dist.all_reduce(tensor := floats(3))
        assert tensor.tolist() == [2.0] * 3, facts


@on_ranks(1, env={"ROTA_ISA": "avx1024"})
def test_unknown_instruction_set_raises_value_error_that_lists_the_known(rank: Rank) -> None:
    error = error_of(lambda: rank.communicator().all_reduce(floats()))
    check_error(error, "ValueError", "ROTA_ISA", "'avx1024'", "portable")


@on_ranks(1)
def test_hook_before_init_raises_value_error(rank: Rank) -> None:
    error = error_of(rota.allreduce_hook, None, None)
    check_error(error, "ValueError", "init_process_group")
