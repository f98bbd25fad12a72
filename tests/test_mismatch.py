"""Ranks that call different collectives: an error on all, no output, and a usable group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks, run_ranks

ODD_RANK = 1  # calls something other than the rest
PROMPT_S = 5.0  # the contract says 10 ms; on a busy machine, a test can only rule out a time-out


class Call(NamedTuple):
    """A collective, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, list[torch.Tensor]], object]
    sizes: tuple[int, ...]  # of its tensors
    dtype: torch.dtype = torch.float32


def reduce_call(text: str, num_elems: int, dtype: torch.dtype, **options: object) -> Call:
    def run(communicator: rota.Communicator, tensors: list[torch.Tensor]) -> object:
        return communicator.all_reduce(tensors[0], **options)

    return Call(f"all_reduce({text}", run, (num_elems,), dtype)


def broadcast_call(num_elems: int, root: int) -> Call:
    text = f"broadcast(float32[{num_elems}], root {root})"
    return Call(text, lambda c, tensors: c.broadcast(tensors[0], root), (num_elems,))


def gather_call(num_elems: int) -> Call:
    text = f"all_gather(float32[{num_elems}])"
    return Call(text, lambda c, tensors: c.all_gather(*tensors), (3 * num_elems, num_elems))


def bucket_call(text: str, num_elems: int = 8, num_residuals: int = 0, **options: object) -> Call:
    def run(communicator: rota.Communicator, tensors: list[torch.Tensor]) -> object:
        choices: dict[str, object] = {"wire_dtype": torch.float16, "block_scaling": False}
        residual = tensors[1] if num_residuals else None
        stats = torch.zeros(2, dtype=torch.float64)
        return communicator.reduce_bucket(
            tensors[0], stats, residual=residual, **(choices | options)
        )

    sizes = (num_elems, num_residuals) if num_residuals else (num_elems,)
    return Call(f"reduce_bucket(float32[{num_elems}], {text}", run, sizes)


BARRIER = Call("barrier()", lambda c, tensors: c.barrier(), ())
SUM = reduce_call("sum, float32[8]", 8, torch.float32)
LARGE_SUM = reduce_call("sum, float32[100000]", 100_000, torch.float32)
HALF_WIRE = {"wire_dtype": torch.float16}

CASES = {
    "op": (SUM, reduce_call("max, float32[8]", 8, torch.float32, op="max")),
    "dtype": (SUM, reduce_call("sum, float64[8]", 8, torch.float64)),
    "dtype-of-same-size": (SUM, reduce_call("sum, int32[8]", 8, torch.int32)),
    "num_elems": (SUM, reduce_call("sum, float32[9]", 9, torch.float32)),
    "no-elems": (SUM, reduce_call("sum, float32[0]", 0, torch.float32)),
    "num_elems-large": (LARGE_SUM, reduce_call("sum, float32[100001]", 100_001, torch.float32)),
    "small-and-large": (SUM, LARGE_SUM),
    "algorithm": (
        reduce_call("sum, float32[8], two_shot)", 8, torch.float32, algorithm="two_shot"),
        reduce_call("sum, float32[8], ring)", 8, torch.float32, algorithm="ring"),
    ),
    "wire": (SUM, reduce_call("sum, float32[8]", 8, torch.float32, **HALF_WIRE)),
    "hop": (
        reduce_call("sum, float16[8], ring)", 8, torch.float16, algorithm="ring"),
        reduce_call(
            "sum, float16[8], ring, hop float16)",
            8,
            torch.float16,
            algorithm="ring",
            hop_dtype=torch.float16,
        ),
    ),
    "bucket-wire": (
        bucket_call("one_shot, wire float16, 1 *"),
        bucket_call("one_shot, wire bfloat16, 1 *", wire_dtype=torch.bfloat16),
    ),
    "bucket-block_scaling": (
        bucket_call("one_shot, wire float16, 1 *"),
        bucket_call("one_shot, wire float16 in scaled blocks, 1 *", block_scaling=True),
    ),
    "bucket-contribution_factor": (
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 1)"),
        bucket_call("one_shot, wire float16, 0.5 * sum / 1 * 1)", contribution_factor=0.5),
    ),
    "bucket-divisor": (
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 1)"),
        bucket_call("one_shot, wire float16, 1 * sum / 3 * 1)", divisor=3.0),
    ),
    "bucket-result_factor": (
        # factors so close that six digits would not distinguish them
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 0.1)", result_factor=0.1),
        bucket_call(
            "one_shot, wire float16, 1 * sum / 1 * 0.10000001)", result_factor=0.1 * (1 + 2**-23)
        ),
    ),
    "bucket-seed": (
        bucket_call(
            "one_shot, wire float16, 1 * sum / 1 * 1, stochastic_seed 0)", stochastic_seed=0
        ),
        bucket_call(
            "one_shot, wire float16, 1 * sum / 1 * 1, stochastic_seed 18446744073709551615)",
            stochastic_seed=2**64 - 1,
        ),
    ),
    "bucket-rounding": (
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 1)"),
        bucket_call(
            "one_shot, wire float16, 1 * sum / 1 * 1, stochastic_seed 0)", stochastic_seed=0
        ),
    ),
    "bucket-residual": (
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 1, residual)", num_residuals=8),
        bucket_call("one_shot, wire float16, 1 * sum / 1 * 1)"),
    ),
    "bucket-or-all_reduce": (bucket_call("one_shot, wire float16"), SUM),
    "root": (broadcast_call(8, 0), broadcast_call(8, 2)),
    "broadcast-length": (broadcast_call(50_000, 0), broadcast_call(50_001, 0)),
    "gather-length": (gather_call(8), gather_call(9)),
    "all_reduce-or-broadcast": (SUM, broadcast_call(8, 0)),
    "all_gather-or-barrier": (gather_call(8), BARRIER),
    "barrier-or-all_reduce": (BARRIER, LARGE_SUM),
}


def call_differently(rank: Rank, name: str) -> tuple[list[tuple[str, str]], bool, float, float]:
    """Three mismatches, each followed by a call that all ranks agree on."""
    communicator = rank.communicator()
    call = CASES[name][1 if rank.rank == ODD_RANK else 0]
    errors = []
    untouched = True
    slowest = 0.0
    for _ in range(3):
        tensors = [torch.full((size,), rank.rank + 1, dtype=call.dtype) for size in call.sizes]
        communicator.barrier()
        start = time.monotonic()
        errors.append(error_of(lambda call=call, tensors=tensors: call.run(communicator, tensors)))
        slowest = max(slowest, time.monotonic() - start)
        untouched &= all(bool((tensor == rank.rank + 1).all()) for tensor in tensors)
        total = torch.full((50_000,), float(rank.rank))
        communicator.all_reduce(total)
    return errors, untouched, slowest, total[-1].item()


@pytest.mark.parametrize("name", CASES)
def test_mismatch_raises_on_every_rank_and_the_group_goes_on(name: str) -> None:
    results = run_ranks(3, call_differently, name)
    usual, odd = CASES[name]
    for errors, untouched, slowest, total in results:
        for error in errors:
            check_error(
                error, "Mismatch", f"ranks 0, 2 called {usual.text}", f"rank 1 called {odd.text}"
            )
        assert untouched
        assert slowest < PROMPT_S
        assert total == 3.0


def test_mismatch_of_wire_names_it() -> None:
    for errors, *_ in run_ranks(2, call_differently, "wire"):
        assert all("wire float16" in text for _, text in errors)


@on_ranks(4)
def test_mismatch_of_group_size_names_it(rank: Rank) -> None:
    communicator = rank.communicator()
    group_size = 2 if rank.rank == ODD_RANK else None
    error = error_of(lambda: communicator.all_reduce(torch.ones(8), group_size=group_size))
    check_error(
        error, "Mismatch", "rank 1 called all_reduce(sum, float32[8], one_shot, groups of 2)"
    )


def move_unnamed_dtypes(
    rank: Rank, first: tuple[torch.dtype, int], second: tuple[torch.dtype, int]
) -> tuple[str, str]:
    communicator = rank.communicator()
    dtype, num_elems = (first, second)[rank.rank]
    return error_of(lambda: communicator.broadcast(torch.ones(num_elems, dtype=dtype), 0))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((torch.complex64, 2), (torch.complex128, 1)),
        ((torch.uint8, 4), (torch.float8_e4m3fn, 4)),
        ((torch.complex64, 1), (torch.uint8, 8)),
    ],
    ids=["complex64-complex128", "uint8-float8", "complex64-uint8"],
)
def test_mismatch_of_dtypes_that_are_only_copied_raises(
    first: tuple[torch.dtype, int], second: tuple[torch.dtype, int]
) -> None:
    results = run_ranks(2, move_unnamed_dtypes, first, second)
    assert [error for error, _ in results] == ["Mismatch"] * 2


@on_ranks(2)
def test_backend_mismatch_raises_from_call_wait_and_future(rank: Rank) -> None:
    rank.init()
    tensor = torch.ones(8 + rank.rank)
    errors = [error_of(lambda: dist.all_reduce(tensor))]
    work = dist.all_reduce(tensor, async_op=True)
    errors.append(error_of(work.wait))
    errors.append(error_of(work.get_future().wait))
    good = torch.ones(3)
    behind = dist.all_reduce(good, async_op=True)
    errors.append(error_of(lambda: dist.broadcast(tensor, rank.rank)))
    behind.wait()
    for error in errors:
        check_error(error, "Mismatch", "rank 0 called", "rank 1 called")
    assert good.tolist() == [2.0, 2.0, 2.0]


@on_ranks(2)
def test_backend_mismatch_inside_coalesced_call_ends_it_on_every_rank(rank: Rank) -> None:
    """The first tensor agrees, the second does not: the first is reduced, the others stay."""
    rank.init()
    tensors = [torch.ones(4), torch.ones(5 + rank.rank), torch.ones(6)]
    error = error_of(lambda: dist.all_reduce_coalesced(tensors))
    again = torch.ones(2)
    dist.all_reduce(again)
    check_error(error, "Mismatch")
    assert [float(tensor[0]) for tensor in tensors] == [2.0, 1.0, 1.0]
    assert again.tolist() == [2.0, 2.0]
