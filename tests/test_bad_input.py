"""Bad arguments: a clear error before anything moves, and the group stays usable."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks, run_ranks


class Case(NamedTuple):
    call: Callable[[rota.Communicator], object]
    error: str
    facts: tuple[str, ...]  # what the text must name


def floats(num_elems: int = 4) -> torch.Tensor:
    return torch.ones(num_elems)


def overlapping() -> torch.Tensor:
    return torch.ones(10).as_strided((4, 4), (2, 1))


NAMES_OF_DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int64", "bool")

CASES: dict[str, Case] = {
    # ---- all_reduce: arguments that are not tensors, or tensors that cannot be reduced
    "list": Case(
        lambda c: c.all_reduce([1.0, 2.0]), "TypeError", ("rota.all_reduce", "list", "torch.Tensor")
    ),
    "none": Case(
        lambda c: c.all_reduce(None), "TypeError", ("rota.all_reduce", "NoneType", "torch.Tensor")
    ),
    "numpy": Case(
        lambda c: c.all_reduce(floats().numpy()),
        "TypeError",
        ("rota.all_reduce", "numpy.ndarray", "torch.Tensor"),
    ),
    "complex": Case(
        lambda c: c.all_reduce(floats().to(torch.complex64)),
        "TypeError",
        ("rota.all_reduce", "Complex", *NAMES_OF_DTYPES),
    ),
    "uint16": Case(
        lambda c: c.all_reduce(floats().to(torch.uint16)),
        "TypeError",
        ("rota.all_reduce", "UInt16", *NAMES_OF_DTYPES),
    ),
    "strange-float8": Case(
        lambda c: c.all_reduce(floats().to(torch.float8_e4m3fnuz)),
        "TypeError",
        ("rota.all_reduce", "Float8", *NAMES_OF_DTYPES),
    ),
    "sparse-coo": Case(
        lambda c: c.all_reduce(torch.eye(3).to_sparse()),
        "TypeError",
        ("rota.all_reduce", "Sparse", "to_dense()"),
    ),
    "sparse-csr": Case(
        lambda c: c.all_reduce(torch.eye(3).to_sparse_csr()),
        "TypeError",
        ("rota.all_reduce", "SparseCsr", "to_dense()"),
    ),
    "meta": Case(
        lambda c: c.all_reduce(torch.ones(3, device="meta")),
        "TypeError",
        ("rota.all_reduce", "meta", "CPU"),
    ),
    "expanded": Case(
        lambda c: c.all_reduce(floats(1).expand(5)),
        "ValueError",
        ("rota.all_reduce", "share memory", "contiguous()"),
    ),
    "overlapping": Case(
        lambda c: c.all_reduce(overlapping()),
        "ValueError",
        ("rota.all_reduce", "share memory", "contiguous()"),
    ),
    # ---- all_reduce: options
    "op": Case(
        lambda c: c.all_reduce(floats(), "median"),
        "ValueError",
        ("rota.all_reduce", "'median'", "sum", "avg", "product", "min", "max", "bxor"),
    ),
    "algorithm": Case(
        lambda c: c.all_reduce(floats(), algorithm="tree"),
        "ValueError",
        ("rota.all_reduce", "'tree'", "one_shot", "two_shot", "ordered_ring", "ring", "auto"),
    ),
    "average-of-bools": Case(
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.bool), "avg"),
        "TypeError",
        ("rota.all_reduce", "avg", "bool", "integers"),
    ),
    "bits-of-floats": Case(
        lambda c: c.all_reduce(floats(), "bxor"),
        "TypeError",
        ("rota.all_reduce", "bxor", "float32", "integer"),
    ),
    "wider-wire": Case(
        lambda c: c.all_reduce(floats().half(), wire_dtype=torch.float32),
        "TypeError",
        ("rota.all_reduce", "wire_dtype", "float32", "float16"),
    ),
    "integer-wire": Case(
        lambda c: c.all_reduce(floats(), wire_dtype=torch.int8),
        "TypeError",
        ("rota.all_reduce", "wire_dtype", "int8", "float32"),
    ),
    "wire-of-integers": Case(
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.int64), wire_dtype=torch.float16),
        "TypeError",
        ("rota.all_reduce", "wire_dtype", "float16", "int64"),
    ),
    "complex-wire": Case(
        lambda c: c.all_reduce(floats(), wire_dtype=torch.complex64),
        "TypeError",
        ("rota.all_reduce", "wire_dtype", "Complex", "float16"),
    ),
    "wire-as-text": Case(
        lambda c: c.all_reduce(floats(), wire_dtype="float16"),
        "TypeError",
        ("rota.all_reduce", "wire_dtype", "str", "torch.dtype"),
    ),
    "hop-as-number": Case(
        lambda c: c.all_reduce(floats(), hop_dtype=16),
        "TypeError",
        ("rota.all_reduce", "hop_dtype", "int", "torch.dtype"),
    ),
    "async-as-number": Case(
        lambda c: c.all_reduce(floats(), async_op=1),
        "TypeError",
        ("rota.all_reduce", "async_op", "int", "bool"),
    ),
    "op-as-number": Case(
        lambda c: c.all_reduce(floats(), 0), "TypeError", ("rota.all_reduce", "op", "int", "str")
    ),
    "torch-op": Case(
        lambda c: c.all_reduce(floats(), dist.ReduceOp.SUM),
        "TypeError",
        ("rota.all_reduce", "op", "str"),
    ),
    "no-tensor": Case(lambda c: c.all_reduce(op="sum"), "TypeError", ("rota.all_reduce", "tensor")),
    "unknown-keyword": Case(
        lambda c: c.all_reduce(floats(), dtype=torch.float16),
        "TypeError",
        ("rota.all_reduce", "'dtype'"),
    ),
    "given-twice": Case(
        lambda c: c.all_reduce(floats(), "sum", op="sum"),
        "TypeError",
        ("rota.all_reduce", "op", "twice"),
    ),
    "too-many": Case(
        lambda c: c.all_reduce(floats(), "sum", "auto", None, None, False, None, "rank", None, 10),
        "TypeError",
        ("rota.all_reduce", "10", "9"),
    ),
    "not-made": Case(
        lambda c: rota.Communicator.all_reduce(
            rota.Communicator.__new__(rota.Communicator), floats()
        ),
        "TypeError",
        ("rota.all_reduce", "__init__"),
    ),
    "op-not-unicode": Case(
        lambda c: c.all_reduce(floats(), "\ud800"), "UnicodeEncodeError", ("surrogates",)
    ),
    "hop-without-ring": Case(
        lambda c: c.all_reduce(floats(), hop_dtype=torch.float32),
        "ValueError",
        ("rota.all_reduce", "hop_dtype", "algorithm='ring'"),
    ),
    "strange-hop": Case(
        lambda c: c.all_reduce(floats(), algorithm="ring", hop_dtype=torch.bfloat16),
        "TypeError",
        ("rota.all_reduce", "hop_dtype", "bfloat16", "float32"),
    ),
    "groups-of-unequal-size": Case(
        lambda c: c.all_reduce(floats(), group_size=3),
        "ValueError",
        ("rota.all_reduce", "group_size is 3", "divisor of world_size 2"),
    ),
    "groups-of-none": Case(
        lambda c: c.all_reduce(floats(), group_size=0), "ValueError", ("rota.all_reduce", "is 0")
    ),
    "groups-of-too-many": Case(
        lambda c: c.all_reduce(floats(), group_size=-(1 << 80)), "ValueError", ("group_size is -9",)
    ),
    "group-as-bool": Case(
        lambda c: c.all_reduce(floats(), group_size=True),
        "TypeError",
        ("rota.all_reduce", "group_size", "bool", "int"),
    ),
    "groups-in-a-ring": Case(
        lambda c: c.all_reduce(floats(), algorithm="ordered_ring", group_size=2),
        "ValueError",
        ("rota.all_reduce", "ordered_ring", "group_size", "two_shot"),
    ),
    "strange-order": Case(
        lambda c: c.all_reduce(floats(), order="hilbert"),
        "ValueError",
        ("rota.all_reduce", "order is 'hilbert'", "rank, tree"),
    ),
    "shards-without-a-tree": Case(
        lambda c: c.all_reduce(floats(), num_shards=4),
        "ValueError",
        ("rota.all_reduce", "num_shards", "order='tree'"),
    ),
    "tree-of-groups": Case(
        lambda c: c.all_reduce(floats(), order="tree", group_size=2),
        "ValueError",
        ("rota.all_reduce", "order='tree'", "group_size"),
    ),
    "tree-in-a-ring": Case(
        lambda c: c.all_reduce(floats(), algorithm="ring", order="tree"),
        "ValueError",
        ("rota.all_reduce", "algorithm='ring'", "order='tree'", "two_shot"),
    ),
    "shards-no-power-of-two": Case(
        lambda c: c.reduce(floats(), order="tree", num_shards=6),
        "ValueError",
        ("rota.reduce", "num_shards is 6", "power of two"),
    ),
    "fewer-shards-than-ranks": Case(
        lambda c: c.reduce_scatter(floats(1), floats(2), order="tree", num_shards=1),
        "ValueError",
        ("rota.reduce_scatter", "num_shards is 1", "at least 2"),
    ),
    # ---- broadcast
    "negative-root": Case(
        lambda c: c.broadcast(floats(), -1), "ValueError", ("rota.broadcast", "-1", "[0, 2)")
    ),
    "large-root": Case(
        lambda c: c.broadcast(floats(), 2), "ValueError", ("rota.broadcast", "2", "[0, 2)")
    ),
    "root-as-text": Case(lambda c: c.broadcast(floats(), "0"), "TypeError", ("broadcast",)),
    "broadcast-sparse": Case(
        lambda c: c.broadcast(torch.eye(3).to_sparse()), "TypeError", ("rota.broadcast", "Sparse")
    ),
    "broadcast-expanded": Case(
        lambda c: c.broadcast(floats(1).expand(5)), "ValueError", ("rota.broadcast", "contiguous()")
    ),
    # ---- all_gather
    "short-output": Case(
        lambda c: c.all_gather(floats(7), floats()),
        "ValueError",
        ("rota.all_gather", "7", "4", "2"),
    ),
    "output-of-other-dtype": Case(
        lambda c: c.all_gather(floats(8), floats().double()),
        "TypeError",
        ("rota.all_gather", "Float", "Double"),
    ),
    "gather-meta": Case(
        lambda c: c.all_gather(floats(8), torch.ones(4, device="meta")),
        "TypeError",
        ("rota.all_gather", "meta"),
    ),
    # ---- the others
    "reduce-root": Case(lambda c: c.reduce(floats(), 2), "ValueError", ("rota.reduce", "[0, 2)")),
    "reduce-op": Case(
        lambda c: c.reduce(floats(), op="mean"), "ValueError", ("rota.reduce", "'mean'", "avg")
    ),
    "gather-root": Case(
        lambda c: c.gather(floats(8), floats(), -1), "ValueError", ("rota.gather", "-1", "[0, 2)")
    ),
    "gather-without-output": Case(
        lambda c: c.gather(None, floats()),
        "ValueError",
        ("rota.gather", "0 output", "world_size = 2"),
    ),
    "gather-output-elsewhere": Case(
        lambda c: c.gather(floats(8), floats(), 1),
        "ValueError",
        ("rota.gather", "output", "root 1"),
    ),
    "gather-output-length": Case(
        lambda c: c.gather(floats(9), floats()), "ValueError", ("rota.gather", "9", "2 * 4")
    ),
    "scatter-input-length": Case(
        lambda c: c.scatter(floats(4), floats(9)), "ValueError", ("rota.scatter", "9", "2 * 4")
    ),
    "scatter-input-elsewhere": Case(
        lambda c: c.scatter(floats(4), floats(8), 1), "ValueError", ("rota.scatter", "root 1")
    ),
    "reduce_scatter-length": Case(
        lambda c: c.reduce_scatter(floats(4), floats(7)),
        "ValueError",
        ("rota.reduce_scatter", "7", "2 * 4"),
    ),
    "reduce_scatter-dtype": Case(
        lambda c: c.reduce_scatter(torch.ones(2, dtype=torch.complex64), torch.ones(4).cfloat()),
        "TypeError",
        ("rota.reduce_scatter", "ComplexFloat", "float32"),
    ),
    "all_to_all-odd": Case(
        lambda c: c.all_to_all(floats(8), floats(7)), "ValueError", ("rota.all_to_all", "7", "2")
    ),
    "all_to_all-sum-of-splits": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[4, 5]),
        "ValueError",
        ("rota.all_to_all", "input splits", "9", "8"),
    ),
    "all_to_all-number-of-splits": Case(
        lambda c: c.all_to_all(floats(8), floats(8), output_splits=[8]),
        "ValueError",
        ("rota.all_to_all", "output splits", "1", "2 ranks"),
    ),
    "all_to_all-negative-split": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[9, -1]),
        "ValueError",
        ("rota.all_to_all", "-1"),
    ),
    "all_to_all-own-part": Case(
        lambda c: c.all_to_all(floats(8), floats(8), input_splits=[3, 5]),
        "ValueError",
        ("rota.all_to_all", "this rank's", "3", "4"),
    ),
}


Refusal = tuple[str, str, list[float]]


def try_everywhere(rank: Rank) -> dict[str, Refusal]:
    """One rank makes a bad call; then all make a good one, which shows that nothing moved."""
    communicator = rank.communicator()
    refusals = {}
    for name, case in CASES.items():
        error = ("", "")
        if rank.rank == 0:
            error = error_of(lambda case=case: case.call(communicator))
        tensor = floats(3)
        communicator.all_reduce(tensor)
        refusals[name] = (*error, tensor.tolist())
    return refusals


@functools.cache
def refusals_of(function: Callable[[Rank], Any]) -> list[dict[Any, Refusal]]:
    """All in one world, for tests that look at one each."""
    return run_ranks(2, function)


@pytest.mark.parametrize("name", CASES)
def test_bad_argument_raises_at_once_and_the_group_goes_on(name: str) -> None:
    results = [refusals[name] for refusals in refusals_of(try_everywhere)]
    assert [tensor for _, _, tensor in results] == [[2.0] * 3] * 2
    error, text, _ = results[0]
    assert error == CASES[name].error, text
    for fact in CASES[name].facts:
        assert fact in text


BACKEND_CALLS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "sparse-average": (
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.AVG),
        ("sparse", "SUM"),
    ),
    "uint16": (lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16)), ("UInt16", "float32")),
    "expanded": (lambda: dist.all_reduce(floats(1).expand(5)), ("contiguous()",)),
    "bool-average": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
        ("avg", "bool"),
    ),
    "integer-premul": (
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist._make_nccl_premul_sum(0.5)),
        ("PREMUL_SUM", "int64", "floats"),
    ),
    "outputs": (lambda: dist.all_gather([floats()], floats()), ("rota.all_gather", "1", "2")),
    "output-length": (
        lambda: dist.all_gather([floats(5), floats()], floats()),
        ("rota.all_gather", "5", "4"),
    ),
}


def try_on_backend(rank: Rank) -> dict[tuple[str, bool], Refusal]:
    rank.init()
    refusals = {}
    for name, async_op in itertools.product(BACKEND_CALLS, (False, True)):
        error = ("", "")
        if rank.rank == 0:
            if async_op:  # an earlier call is queued; the error must still be raised at once
                work: Any = dist.all_reduce(floats(), async_op=True)
            error = error_of(BACKEND_CALLS[name][0])
            if async_op:
                work.wait()
        elif async_op:
            dist.all_reduce(floats())
        tensor = floats(3)
        dist.all_reduce(tensor)
        refusals[name, async_op] = (*error, tensor.tolist())
    return refusals


@pytest.mark.parametrize("async_op", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("name", BACKEND_CALLS)
def test_backend_bad_argument_raises_at_once_and_the_group_goes_on(
    name: str, async_op: bool
) -> None:
    results = [refusals[name, async_op] for refusals in refusals_of(try_on_backend)]
    assert [tensor for _, _, tensor in results] == [[2.0] * 3] * 2
    error, text, _ = results[0]
    assert error in ("TypeError", "ValueError", "RuntimeError", "NotImplementedError"), text
    for fact in BACKEND_CALLS[name][1]:
        assert fact in text


@on_ranks(1, env={"ROTA_ISA": "avx1024"})
def test_unknown_instruction_set_raises_value_error_that_lists_the_known(rank: Rank) -> None:
    error = error_of(lambda: rank.communicator().all_reduce(floats()))
    check_error(error, "ValueError", "ROTA_ISA", "'avx1024'", "portable")


@on_ranks(1)
def test_hook_before_init_raises_value_error(rank: Rank) -> None:
    error = error_of(lambda: rota.allreduce_hook(None, None))
    check_error(error, "ValueError", "init_process_group")
