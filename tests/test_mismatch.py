"""Ranks that call different collectives: an error on all, no output, and a usable group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import rota
from ranks import Rank, check_error, error_of, on_ranks

ODD_RANK = 1  # calls something other than the rest
PROMPT_S = 5.0  # the contract says 10 ms; on a busy machine, a test can only rule out a time-out


class Call(NamedTuple):
    """A collective, and how the error describes it."""

    text: str
    run: Callable[[rota.Communicator, list[torch.Tensor]], object]
    sizes: tuple[int, ...] = (8,)  # of its tensors
    dtype: torch.dtype = torch.float32


def reduce_call(text: str, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return Call(f"all_reduce({text}", lambda c, t: c.all_reduce(t[0], **options), dtype=dtype)


def bucket_call(text: str, *, has_residual: bool = False, **options: Any) -> Call:
    options = {"wire_dtype": torch.float16, "block_scaling": False} | options

    def run(communicator: rota.Communicator, tensors: list[torch.Tensor]) -> object:
        bucket, *residual = tensors
        stats = torch.zeros(2, dtype=torch.float64)
        return communicator.reduce_bucket(bucket, stats, residual=(*residual, None)[0], **options)

    return Call(f"reduce_bucket(float32[8], one_shot, wire {text}", run, (8,) * (1 + has_residual))


BARRIER = Call("barrier()", lambda c, tensors: c.barrier(), ())
SUM = reduce_call("sum, float32[8]")
BUCKET = bucket_call("float16, 1 * sum / 1 * 1)")
AT_RANDOM = bucket_call("float16, 1 * sum / 1 * 1, stochastic_seed 0)", stochastic_seed=0)
# test_random_mismatches.py has calls of other collectives, ops, dtypes, lengths and roots.
CASES = {
    "op": (SUM, reduce_call("max, float32[8]", op="max")),
    "algorithm": (
        reduce_call("sum, float32[8], two_shot)", algorithm="two_shot"),
        reduce_call("sum, float32[8], ring)", algorithm="ring"),
    ),
    "group_size": (SUM, reduce_call("sum, float32[8], one_shot, groups of 2)", group_size=2)),
    "num_shards": (
        reduce_call("sum, float32[8], one_shot, tree of 4 shards)", order="tree", num_shards=4),
        reduce_call("sum, float32[8], one_shot, tree of 8 shards)", order="tree", num_shards=8),
    ),
    "order": (
        reduce_call("sum, float32[8], one_shot, tree of 4 shards)", order="tree", num_shards=4),
        reduce_call("sum, float32[8], one_shot)", order="rank"),
    ),
    "wire": (SUM, reduce_call("sum, float32[8], one_shot, wire float16", wire_dtype=torch.float16)),
    "hop": (
        reduce_call("sum, float16[8], ring)", torch.float16, algorithm="ring"),
        reduce_call(
            "sum, float16[8], ring, hop float16)",
            torch.float16,
            algorithm="ring",
            hop_dtype=torch.float16,
        ),
    ),
    "bucket-wire": (BUCKET, bucket_call("bfloat16, 1 *", wire_dtype=torch.bfloat16)),
    "bucket-block_scaling": (
        BUCKET,
        bucket_call("float16 in scaled blocks, 1 *", block_scaling=True),
    ),
    "bucket-contribution_factor": (
        BUCKET,
        bucket_call("float16, 0.5 * sum / 1 * 1)", contribution_factor=0.5),
    ),
    "bucket-divisor": (BUCKET, bucket_call("float16, 1 * sum / 3 * 1)", divisor=3.0)),
    "bucket-result_factor": (
        # factors so close that six digits would not distinguish them
        bucket_call("float16, 1 * sum / 1 * 0.1)", result_factor=0.1),
        bucket_call("float16, 1 * sum / 1 * 0.10000001)", result_factor=0.1 * (1 + 2**-23)),
    ),
    "bucket-seed": (
        AT_RANDOM,
        bucket_call(
            f"float16, 1 * sum / 1 * 1, stochastic_seed {2**64 - 1})", stochastic_seed=2**64 - 1
        ),
    ),
    "bucket-rounding": (BUCKET, AT_RANDOM),
    "bucket-residual": (
        bucket_call("float16, 1 * sum / 1 * 1, residual)", has_residual=True),
        BUCKET,
    ),
    "bucket-or-all_reduce": (BUCKET, SUM),
    "barrier-or-all_reduce": (BARRIER, SUM),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_mismatch_raises_on_every_rank_and_the_group_goes_on(rank: Rank, name: str) -> None:
    """Three mismatches, each followed by a call that all ranks agree on."""
    communicator = rank.communicator()
    usual, odd = CASES[name]
    call = odd if rank.rank == ODD_RANK else usual
    for _ in range(3):
        tensors = [torch.full((size,), rank.rank + 1, dtype=call.dtype) for size in call.sizes]
        communicator.barrier()
        start = time.monotonic()
        error = error_of(call.run, communicator, tensors)
        assert time.monotonic() - start < PROMPT_S
        check_error(
            error, "Mismatch", f"ranks 0, 2, 3 called {usual.text}", f"rank 1 called {odd.text}"
        )
        assert all(bool((tensor == rank.rank + 1).all()) for tensor in tensors)
        communicator.all_reduce(total := torch.full((50_000,), float(rank.rank)))
        assert total[-1].item() == 6.0
