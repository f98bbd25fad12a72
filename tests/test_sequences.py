"""Random sequences of calls on one communicator: no call may disturb the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch

from oracle import ALGORITHMS, DTYPES, assert_same, exact, exact_inputs, ops_of
from ranks import Rank, on_ranks

T = TypeVar("T")

NUM_CALLS = 250
SLOT_BYTES = 4096
# Message sizes in bytes: zero, within a mailbox, around its end, and many rounds.
SIZES = (0, 8, 72, 4000, 4104, 20_000, 65_536, 65_600, 150_000)
NUM_IN_FLIGHT = 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 5], ids="ws{}".format)
@on_ranks()
def test_random_sequence_of_calls_gives_exact_results(rank: Rank, seed: int) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    choose = np.random.default_rng(seed)  # the same choices on every rank
    pending: list[Callable[[], None]] = []

    def one_of(options: Sequence[T]) -> T:
        return options[int(choose.integers(len(options)))]

    def reduce(case: str) -> None:
        dtype = one_of(DTYPES)
        op = one_of(ops_of(dtype))
        algorithm = one_of(ALGORITHMS)
        async_op = one_of((False, True))
        num_elems = one_of(SIZES) // dtype.itemsize
        inputs = exact_inputs(rank.world_size, num_elems, dtype, op)
        tensor = inputs[rank.rank].clone()
        work = communicator.all_reduce(tensor, op, algorithm, async_op=async_op)

        def check() -> None:
            if work is not None:
                work.wait()
            what = f"{case}: {op} {dtype}[{len(tensor)}] {algorithm} async {async_op}"
            assert_same(tensor, exact(inputs, op), what)

        pending.append(check)

    def broadcast(case: str) -> None:
        root = int(choose.integers(rank.world_size))
        inputs = exact_inputs(rank.world_size, one_of(SIZES), torch.uint8)
        tensor = inputs[rank.rank].clone()
        communicator.broadcast(tensor, root)
        assert_same(tensor, inputs[root], f"{case}: broadcast of {len(tensor)} from {root}")

    def all_gather(case: str) -> None:
        inputs = exact_inputs(rank.world_size, one_of(SIZES), torch.uint8)
        output = torch.empty(rank.world_size * len(inputs[0]), dtype=torch.uint8)
        communicator.all_gather(output, inputs[rank.rank])
        assert_same(output, torch.cat(inputs), f"{case}: all_gather of {len(inputs[0])}")

    def barrier(_: str) -> None:
        communicator.barrier()

    calls = (reduce, reduce, reduce, broadcast, all_gather, barrier)
    for number in range(NUM_CALLS):
        one_of(calls)(f"seed {seed} call {number}")
        while len(pending) > choose.integers(NUM_IN_FLIGHT):
            pending.pop(int(choose.integers(len(pending))))()
    for check in pending:
        check()
