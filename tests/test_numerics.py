"""The numeric contract (DESIGN.md section 3): bit-exact results for all inputs."""

from __future__ import annotations

import hashlib

import pytest
import torch

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
from ranks import Rank, isas_of_this_cpu, on_ranks, run_ranks

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


def check_random(rank: Rank, dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(dtype):
        for op in ops_of(dtype):
            check_contract(rank, communicator, random_inputs(rank.world_size, size, dtype), op)


@pytest.mark.parametrize("dtype", DTYPES + FLOAT8_DTYPES, ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="ws{}".format)
def test_all_reduce_random_inputs_follow_contract(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, check_random, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize("world_size", [8, 16], ids="ws{}".format)
def test_all_reduce_random_inputs_of_large_world_follow_contract(
    world_size: int, dtype: torch.dtype
) -> None:
    run_ranks(world_size, check_random, dtype)


def check_wire(rank: Rank, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for size in sizes_of(wire_dtype):
        for make in (random_inputs, random_patterns):
            inputs = make(rank.world_size, size, dtype)
            for op in ("sum", "avg", "product", "max"):
                check_contract(rank, communicator, inputs, op, wire_dtype)


@pytest.mark.parametrize("pair", WIRES, ids=wire_name)
@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
def test_all_reduce_wire_dtype_follows_contract(
    world_size: int, pair: tuple[torch.dtype, torch.dtype]
) -> None:
    run_ranks(world_size, check_wire, *pair)


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16, *FLOAT8_DTYPES], ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2], ids="ws{}".format)
@on_ranks()
def test_all_reduce_float64_to_narrow_wire_rounds_once(rank: Rank, wire_dtype: torch.dtype) -> None:
    inputs = rounding_traps(rank.world_size, wire_dtype)
    check_contract(rank, rank.communicator(), inputs, "sum", wire_dtype)


def check_special(rank: Rank, dtype: torch.dtype) -> str:
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
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES + FLOAT8_DTYPES, ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2, 3], ids="ws{}".format)
def test_all_reduce_nan_inf_zero_and_denormals_follow_contract(
    world_size: int, dtype: torch.dtype
) -> None:
    digests = run_ranks(world_size, check_special, dtype)
    assert len(set(digests)) == 1, "ranks got different bits, the payload of a NaN included"


def min_and_max_with_nan(rank: Rank) -> list[list[float]]:
    communicator = rank.communicator()
    results = []
    for op in ("min", "max"):
        tensor = torch.tensor([[torch.nan, 1.0, 1.0], [1.0, torch.nan, 2.0]][rank.rank])
        communicator.all_reduce(tensor, op)
        results.append([*tensor.isnan().tolist(), tensor[2].item()])
    return results


def test_all_reduce_nan_wins_min_and_max_whichever_rank_has_it() -> None:
    expected = [[True, True, False, 1.0], [True, True, False, 2.0]]
    assert run_ranks(2, min_and_max_with_nan) == [expected, expected]


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


def digest_of_results(rank: Rank) -> tuple[str, str]:
    """A digest of all dtypes and ops on random bit patterns, at sizes that end inside a vector."""
    communicator = rank.communicator()
    digest = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor = tensor.double()  # exact, and masked_fill supports it
            tensor = tensor.masked_fill(tensor.isnan(), torch.nan)  # payloads are unspecified
        digest.update(bits_of(tensor).numpy().tobytes())

    for dtype in DTYPES + FLOAT8_DTYPES:
        tensor = random_patterns(rank.world_size, 4099, dtype)[rank.rank]
        for op in ops_of(dtype):
            for size in (1, 15, 4099):
                part = tensor[:size].clone()
                communicator.all_reduce(part, op)
                add(part)
    for dtype, wire_dtype in WIRES:
        tensor = random_patterns(rank.world_size, 4099, dtype)[rank.rank]
        for op in ("sum", "avg"):
            part = tensor.clone()
            communicator.all_reduce(part, op, wire_dtype=wire_dtype)
            add(part)
    return rota._C.isa(), digest.hexdigest()


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_all_reduce_instruction_sets_give_the_same_bits(isa: str) -> None:
    if isa not in isas_of_this_cpu():
        pytest.skip(f"this CPU has no {isa}")
    portable = run_ranks(2, digest_of_results, env={"ROTA_ISA": "portable"})
    vectors = run_ranks(2, digest_of_results, env={"ROTA_ISA": isa})
    assert [name for name, _ in portable + vectors] == ["portable", "portable", isa, isa]
    assert len({digest for _, digest in portable + vectors}) == 1
