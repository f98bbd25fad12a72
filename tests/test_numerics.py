"""The numeric contract (DESIGN.md section 3): bit-exact results for all inputs."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

import rota
from oracle import (
    ALGORITHMS,
    CANONICAL_ALGORITHMS,
    DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    assert_same,
    bits_of,
    contract,
    name_of,
    ops_of,
    random_inputs,
    random_patterns,
    rounding_traps,
    special_values,
)
from ranks import Rank, on_ranks

pytestmark = pytest.mark.same_in_every_build

SLOT_BYTES = 4096
WIRES = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e5m2),
    (torch.float64, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float8_e5m2, torch.float8_e4m3fn),
]


def sizes_of(dtype: torch.dtype) -> list[int]:
    """Sizes for one mailbox message and for several rounds through slots."""
    slot = SLOT_BYTES // dtype.itemsize
    return [129, (64 << 10) // dtype.itemsize + 3 * slot + 37]


def wire_name(pair: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(name_of(dtype) for dtype in pair)


def check_contract(
    rank: Rank,
    communicator: rota.Communicator,
    inputs: list[torch.Tensor],
    op: str,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Compares every algorithm of the canonical order with the oracle."""
    expected = contract(inputs, op, wire_dtype)
    for algorithm in CANONICAL_ALGORITHMS:
        tensor = inputs[rank.rank].clone()
        communicator.all_reduce(tensor, op, algorithm, wire_dtype)
        assert_same(tensor, expected, f"{op} {algorithm} wire {wire_dtype} size {len(tensor)}")


WORLDS = [(world_size, dtype) for world_size in (1, 2, 3, 4) for dtype in DTYPES + FLOAT8_DTYPES]
# Larger groups outnumber the cores of most machines; they get fewer calls.
WORLDS += [(world_size, dtype) for world_size in (8, 16) for dtype in FLOAT_DTYPES[::2]]


@pytest.mark.parametrize(
    ("world_size", "dtype"), WORLDS, ids=[f"ws{w}-{name_of(d)}" for w, d in WORLDS]
)
@on_ranks()
def test_all_reduce_random_inputs_follow_contract(rank: Rank, dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(dtype):
        for op in ops_of(dtype):
            check_contract(rank, communicator, random_inputs(rank.world_size, size, dtype), op)


@pytest.mark.parametrize("pair", WIRES, ids=wire_name)
@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_all_reduce_wire_dtype_follows_contract(
    rank: Rank, pair: tuple[torch.dtype, torch.dtype]
) -> None:
    dtype, wire_dtype = pair
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(wire_dtype):
        for make in (random_inputs, random_patterns):
            inputs = make(rank.world_size, size, dtype)
            for op in ("sum", "avg", "product", "max"):
                check_contract(rank, communicator, inputs, op, wire_dtype)


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16, *FLOAT8_DTYPES], ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_all_reduce_float64_to_narrow_wire_rounds_once(rank: Rank, wire_dtype: torch.dtype) -> None:
    inputs = rounding_traps(rank.world_size, wire_dtype)
    check_contract(rank, rank.communicator(), inputs, "sum", wire_dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES + FLOAT8_DTYPES, ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
@on_ranks()
def test_all_reduce_nan_inf_zero_and_denormals_follow_contract(
    rank: Rank, dtype: torch.dtype
) -> None:
    communicator = rank.communicator()
    digest = hashlib.sha256()
    for inputs in (
        special_values(rank.world_size, dtype),
        random_patterns(rank.world_size, 4099, dtype),
    ):
        for op in ops_of(dtype):
            check_contract(rank, communicator, inputs, op)
            for algorithm in ALGORITHMS:
                tensor = inputs[rank.rank].clone()
                communicator.all_reduce(tensor, op, algorithm)
                digest.update(bits_of(tensor).numpy().tobytes())
    dist.all_gather_object(digests := [""] * rank.world_size, digest.hexdigest())
    assert len(set(digests)) == 1, "ranks got different bits, the payload of a NaN included"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=name_of)
@on_ranks(2)
def test_all_reduce_keeps_denormals_and_the_callers_flush_mode(
    rank: Rank, dtype: torch.dtype
) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    cases = []
    for inputs in (
        special_values(rank.world_size, dtype),
        random_patterns(rank.world_size, sizes_of(dtype)[1], dtype),
    ):
        for op in ops_of(dtype):
            cases += [
                (op, algorithm, inputs, contract(inputs, op)) for algorithm in ("auto", "two_shot")
            ]
    torch.set_flush_denormal(True)
    is_flushed = []
    for op, algorithm, inputs, expected in cases:
        for async_op in (False, True):
            tensor = inputs[rank.rank].clone()
            work = communicator.all_reduce(tensor, op, algorithm, async_op=async_op)
            if work is not None:
                work.wait()
            assert_same(tensor, expected, f"{op} {algorithm} async_op {async_op}")
        is_flushed.append(torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0)
    torch.set_flush_denormal(False)
    assert all(is_flushed)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [0, 1, 1, 1]), ("product", [0, 0, 0, 1]), ("bxor", [0, 1, 1, 0])],
)
@on_ranks(2)
def test_all_reduce_bool_bytes_beyond_1_count_as_true(
    rank: Rank, op: str, expected: list[int]
) -> None:
    communicator = rank.communicator()
    results = []
    for algorithm in ALGORITHMS:
        own = [[0, 2, 0, 255], [0, 0, 128, 1]][rank.rank]
        tensor = torch.tensor(own, dtype=torch.uint8).view(torch.bool)
        communicator.all_reduce(tensor, op, algorithm)
        results.append(tensor.view(torch.uint8).tolist())
    assert results == [expected] * len(ALGORITHMS)
