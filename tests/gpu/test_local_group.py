"""LocalGroup: ranks of one process on one GPU, against the CPU's bits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import rota
from on_gpu import DEVICE, MAX_LOW_LATENCY_BYTES, SIZES, Guarded, capture, check_each, check_refused
from oracle import (
    DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    contract,
    exact,
    exact_inputs,
    name_of,
    ops_of,
    random_inputs,
    random_patterns,
)
from ranks import check_error, error_of
from rota.gpu import LocalGroup

CANONICAL = ("auto", "low_latency", "one_shot", "two_shot", "two_shot_in_place", "ordered_ring")
ALGORITHMS = (*CANONICAL, "ring")
WORLDS = (2, 3, 4)


GroupOf = Callable[[int], LocalGroup]


@pytest.fixture(scope="module")
def groups() -> dict[int, LocalGroup]:
    """The groups made so far, by number of ranks."""
    return {}


@pytest.fixture
def group_of(request: pytest.FixtureRequest, groups: dict[int, LocalGroup]) -> Iterator[GroupOf]:
    """One group per number of ranks, shared by the tests, so that each finds flags of earlier ones.
    After a failed test new groups are made, because a group that timed out stays unusable."""
    num_failed = request.session.testsfailed

    def get(world_size: int) -> LocalGroup:
        if world_size not in groups:
            groups[world_size] = LocalGroup(world_size, DEVICE)
        return groups[world_size]

    yield get
    if request.session.testsfailed > num_failed:
        groups.clear()


worlds = pytest.mark.parametrize("world_size", WORLDS, ids="ws{}".format)


@functools.cache
def known(
    world_size: int, size: int, dtype: torch.dtype, op: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Exact inputs and their result; shared by many tests, which must not write to them."""
    inputs = exact_inputs(world_size, size, dtype, op)
    return inputs, exact(inputs, op)


def check_sum(
    group: LocalGroup,
    inputs: list[torch.Tensor],
    expected: torch.Tensor,
    op: str = "sum",
    algorithm: str = "auto",
    **order: Any,
) -> None:
    guarded = [Guarded(tensor) for tensor in inputs]
    group.all_reduce([one.tensor for one in guarded], op, algorithm, **order)
    case = f"{op} of {inputs[0].numel()} {name_of(inputs[0].dtype)} by {algorithm} {order}"
    check_each(guarded, expected, case)


def fits(algorithm: str, size: int, dtype: torch.dtype) -> bool:
    return algorithm != "low_latency" or size * dtype.itemsize <= MAX_LOW_LATENCY_BYTES


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@worlds
def test_local_all_reduce_every_size_and_op_equals_oracle(
    group_of: GroupOf, world_size: int, algorithm: str, dtype: torch.dtype
) -> None:
    group = group_of(world_size)
    for op in ops_of(dtype):
        sizes = SIZES if op == "sum" else (513, 65_537)
        inputs, expected = known(world_size, max(sizes), dtype, op)
        for size in sizes:
            if not fits(algorithm, size, dtype):
                continue
            check_sum(group, [tensor[:size] for tensor in inputs], expected[:size], op, algorithm)


@pytest.mark.parametrize("dtype", (*FLOAT_DTYPES, *FLOAT8_DTYPES), ids=name_of)
@pytest.mark.parametrize("algorithm", CANONICAL)
@worlds
def test_local_all_reduce_random_inputs_follow_contract(
    group_of: GroupOf, world_size: int, algorithm: str, dtype: torch.dtype
) -> None:
    group = group_of(world_size)
    makers = [random_patterns] if dtype in FLOAT8_DTYPES else [random_inputs, random_patterns]
    for make in makers:
        for size in (1023, 66_001):
            if not fits(algorithm, size, dtype):
                continue
            inputs = make(world_size, size, dtype)
            for op in ("sum", "avg"):
                check_sum(group, inputs, contract(inputs, op), op, algorithm)


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_local_all_reduce_misaligned_storage_equals_oracle(
    group_of: GroupOf, algorithm: str, offset: int
) -> None:
    for dtype in (torch.float16, torch.float32, torch.int8):
        inputs = exact_inputs(3, 2049, dtype)
        guarded = [Guarded(tensor, offset + rank) for rank, tensor in enumerate(inputs)]
        group_of(3).all_reduce([one.tensor for one in guarded], "sum", algorithm)
        check_each(guarded, exact(inputs, "sum"), f"{algorithm} {dtype} offset {offset}")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=name_of)
@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "two_shot_in_place"])
def test_local_all_reduce_in_groups_sums_groups_first(
    group_of: GroupOf, algorithm: str, group_size: int, dtype: torch.dtype
) -> None:
    for size in (1, 513, 66_001):
        inputs = random_inputs(4, size, dtype)
        for op in ("sum", "avg"):
            expected = contract(inputs, op, group_size=group_size)
            check_sum(group_of(4), inputs, expected, op, algorithm, group_size=group_size)


@pytest.mark.parametrize(
    "dtype", (torch.float16, torch.float64, torch.float8_e5m2, torch.int8), ids=name_of
)
@pytest.mark.parametrize("world_size", [4, 5, 8, 16])
def test_local_sums_in_a_tree_follow_contract(
    group_of: GroupOf, world_size: int, dtype: torch.dtype
) -> None:
    group = group_of(world_size)
    inputs = random_inputs(world_size, 22_001 * world_size, dtype)
    expected = contract(inputs, "sum", order="tree")
    for algorithm in ("auto", "one_shot", "two_shot"):
        check_sum(group, inputs, expected, "sum", algorithm, order="tree")
    outputs = [Guarded(torch.zeros(22_001).to(dtype)) for _ in inputs]
    group.reduce_scatter(
        [one.tensor for one in outputs], [t.to(DEVICE) for t in inputs], "sum", order="tree"
    )
    check_each(outputs, list(expected.chunk(world_size)), "reduce_scatter")


@pytest.mark.parametrize("num_channels", [1, 3], ids="{}-channels".format)
@pytest.mark.parametrize("slot_bytes", [4096, 65_536], ids="{}-bytes".format)
def test_local_sums_in_a_tree_ignore_algorithm_slots_and_channels(
    slot_bytes: int, num_channels: int
) -> None:
    tuning = tuning_with(8, slot_bytes=slot_bytes, num_channels=num_channels)
    group = LocalGroup(8, DEVICE, tuning=tuning)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for algorithm in ("low_latency", "one_shot", "two_shot", "two_shot_in_place"):
            inputs = random_inputs(8, 501 if algorithm == "low_latency" else 20_003, dtype)
            expected = contract(inputs, "avg", order="tree")
            check_sum(group, inputs, expected, "avg", algorithm, order="tree")


def test_local_algorithm_that_adds_along_no_tree_refuses_one(group_of: GroupOf) -> None:
    group = group_of(3)
    tensors = [torch.ones(4, device=DEVICE) for _ in range(3)]
    for algorithm in ("ring", "ordered_ring", "hierarchical"):
        error = error_of(group.all_reduce, tensors, "sum", algorithm, order="tree")
        fact = f"{algorithm} does not add along a tree; use one_shot or two_shot"
        check_error(error, "ValueError", fact)
    error = error_of(group.all_reduce, tensors, order="tree", group_size=3)
    check_error(error, "ValueError", "knows no group_size")


@worlds
def test_local_copying_collectives_move_every_bit(group_of: GroupOf, world_size: int) -> None:
    group = group_of(world_size)
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        for size in (0, 1, 5, 513, 66_001):
            case = f"{dtype} size {size}"
            inputs = random_patterns(world_size, size, dtype)
            on_gpu = [Guarded(tensor) for tensor in inputs]
            outputs = [Guarded(torch.zeros(size * world_size, dtype=dtype)) for _ in inputs]
            group.all_gather([one.tensor for one in outputs], [one.tensor for one in on_gpu])
            check_each(outputs, torch.cat(inputs), f"all_gather {case}")
            check_each(on_gpu, inputs, f"all_gather's inputs {case}")

            root = world_size - 1
            group.broadcast([one.tensor for one in on_gpu], root)
            check_each(on_gpu, inputs[root], f"broadcast {case}")

            pair = [Guarded(tensor) for tensor in inputs]
            group.send_recv(0, root, [one.tensor for one in pair])
            check_each(pair, [*inputs[:root], inputs[0]], f"send_recv {case}")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@worlds
def test_local_reduce_scatter_gives_each_rank_its_shard(
    group_of: GroupOf, world_size: int, dtype: torch.dtype
) -> None:
    for size in (0, 1, 5, 513, 22_001):
        inputs = exact_inputs(world_size, size * world_size, dtype)
        outputs = [Guarded(torch.zeros(size).to(dtype)) for _ in inputs]
        on_gpu = [Guarded(tensor) for tensor in inputs]
        group_of(world_size).reduce_scatter(
            [one.tensor for one in outputs], [one.tensor for one in on_gpu], "sum"
        )
        shards = list(exact(inputs, "sum").split(size)) if size else [torch.zeros(0).to(dtype)] * 4
        check_each(outputs, shards[:world_size], f"size {size}")


# ---- tunings


def tuning_with(world_size: int, **fields: int) -> rota._C.GpuTuning:
    """The table's row with some fields replaced."""
    tuning = rota._C.gpu_tuning(torch.cuda.get_device_name(), "local", world_size)
    for field, value in fields.items():
        setattr(tuning, field, value)
    return tuning


@pytest.mark.parametrize(
    "fields",
    [
        {"max_low_latency_bytes": 1 << 30, "max_one_shot_bytes": 1 << 30},
        {"max_one_shot_bytes": 1 << 30},
        {"num_channels": 2, "slot_bytes": 4096},
        {"free_chunk_bytes": 4096, "free_threads": 32},
        {"free_chunk_bytes": 65_536, "free_threads": 512},
    ],
    ids=lambda fields: "-".join(f"{field}={value}" for field, value in fields.items()),
)
def test_local_group_any_tuning_gives_the_same_bits(fields: dict[str, int]) -> None:
    group = LocalGroup(3, DEVICE, tuning=tuning_with(3, **fields))
    for algorithm in CANONICAL:
        for size in (1, 1023, 66_001):
            if not fits(algorithm, size, torch.float32):
                continue
            inputs = random_inputs(3, size, torch.float32)
            check_sum(group, inputs, contract(inputs, "sum"), "sum", algorithm)


def test_local_group_channels_are_the_arguments_else_the_tunings() -> None:
    tuning = tuning_with(2, num_channels=3)
    assert LocalGroup(2, DEVICE, tuning=tuning).num_channels == 3
    assert LocalGroup(2, DEVICE, num_channels=1, tuning=tuning).num_channels == 1
    tuning.num_channels = 0
    all_resident = LocalGroup(2, DEVICE, tuning=tuning).num_channels
    group = LocalGroup(2, DEVICE)
    assert group.num_channels == all_resident > 3
    assert (group.world_size, torch.device(group.device)) == (2, DEVICE)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("free_threads", 0, "a multiple of 32 from 32 to 512"),
        ("free_threads", 48, "a multiple of 32 from 32 to 512"),
        ("free_threads", 1024, "a multiple of 32 from 32 to 512"),
        ("slot_bytes", 0, "a multiple of 128 from 4096"),
        ("slot_bytes", 8191, "a multiple of 128 from 4096"),
        ("free_chunk_bytes", 64, "a multiple of 128 from 4096"),
        ("num_channels", -1, "expected 0"),
        ("num_channels", 10_000, "multiprocessors"),
    ],
)
def test_local_group_refuses_tunings_that_cannot_work(
    field: str, value: int, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}, .*{expected}"):
        LocalGroup(2, DEVICE, tuning=tuning_with(2, **{field: value}))


# ---- streams and graphs


@pytest.mark.order
@pytest.mark.parametrize("algorithm", ["auto", "low_latency", "two_shot"])
def test_local_all_reduce_waits_for_the_current_stream_and_is_awaited_by_it(
    group_of: GroupOf, algorithm: str
) -> None:
    """Inputs and results are copied on the caller's stream, and the host never waits."""
    inputs = [tensor.pin_memory() for tensor in exact_inputs(2, 2000, torch.float32)]
    expected = exact(inputs, "sum")
    results = [[torch.empty(2000).pin_memory() for _ in inputs] for _ in range(20)]
    tensors = [torch.zeros(2000).to(DEVICE) for _ in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for result in results:
            for tensor, source in zip(tensors, inputs, strict=True):
                tensor.copy_(source, non_blocking=True)
            group_of(2).all_reduce(tensors, "sum", algorithm)
            for tensor, copied in zip(tensors, result, strict=True):
                copied.copy_(tensor, non_blocking=True)
    stream.synchronize()
    for result in results:
        for copied in result:
            assert torch.equal(copied, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@worlds
def test_local_all_reduce_replays_with_other_values(
    group_of: GroupOf, world_size: int, algorithm: str
) -> None:
    group = group_of(world_size)
    size = 1500
    tensors = [torch.zeros(size).to(DEVICE) for _ in range(world_size)]
    group.all_reduce(tensors, "sum", algorithm)  # loads its kernels

    def twice() -> None:
        group.all_reduce(tensors, "sum", algorithm)
        group.all_reduce(tensors, "sum", algorithm)

    graph = capture(twice)
    for replay in range(6):
        inputs = [tensor + replay for tensor in exact_inputs(world_size, size, torch.float32)]
        for tensor, source in zip(tensors, inputs, strict=True):
            tensor.copy_(source)
        graph.replay()
        if replay % 2:  # outside of the graph, in between
            group.all_reduce(tensors, "sum", algorithm)
        factor = world_size ** (2 if replay % 2 else 1)
        for tensor in tensors:
            assert torch.equal(tensor.cpu(), exact(inputs, "sum") * factor), f"replay {replay}"


@pytest.mark.order
@pytest.mark.parametrize("is_captured_first", [False, True])
def test_local_all_reduce_and_a_graph_on_another_stream_wait_for_each_other(
    is_captured_first: bool,
) -> None:
    """Both use the group's links, and only the group orders them."""
    group, (inputs, total) = LocalGroup(2, DEVICE), known(2, 3000, torch.float32, "sum")
    captured, direct = ([tensor.to(DEVICE) for tensor in inputs] for _ in range(2))
    if not is_captured_first:
        group.all_reduce(direct)

    def three_times() -> None:
        for _ in range(3):
            group.all_reduce(captured)

    graph, stream = capture(three_times), torch.cuda.Stream()
    for _ in range(10):
        for tensors in (captured, direct):
            for tensor, source in zip(tensors, inputs, strict=True):
                tensor.copy_(source)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        group.all_reduce(direct)
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        for factor, tensors in ((32, captured), (1, direct)):
            for tensor in tensors:
                assert torch.equal(tensor.cpu(), total * factor)


def test_two_local_groups_side_by_side_do_not_disturb_each_other() -> None:
    groups = [LocalGroup(2, DEVICE, num_channels=2) for _ in range(2)]
    inputs = exact_inputs(2, 5000, torch.float32)
    per_group = [[Guarded(tensor) for tensor in inputs] for _ in groups]
    for group, guarded in zip(groups, per_group, strict=True):
        group.all_reduce([one.tensor for one in guarded])
    for guarded in per_group:
        check_each(guarded, exact(inputs, "sum"), "of two groups")


def test_local_group_may_rest_longer_than_its_timeout() -> None:
    group = LocalGroup(2, DEVICE, timeout=timedelta(seconds=1))
    inputs = exact_inputs(2, 1000, torch.float32)
    for _ in range(2):
        check_sum(group, inputs, exact(inputs, "sum"))
        time.sleep(1.2)


# ---- bad input


def test_local_group_refuses_what_cannot_work(group_of: GroupOf) -> None:
    group = group_of(2)
    good = [torch.zeros(8).to(DEVICE) for _ in range(2)]
    bad_calls: dict[str, Callable[[], object]] = {
        "one tensor": lambda: group.all_reduce(good[:1]),
        "other sizes": lambda: group.all_reduce([good[0], good[1][:4]]),
        "other dtypes": lambda: group.all_reduce(
            [good[0], torch.zeros(8, dtype=torch.float16).to(DEVICE)]
        ),
        "on the CPU": lambda: group.all_reduce([good[0], torch.zeros(8)]),
        "the same twice": lambda: group.all_reduce([good[0], good[0]]),
        "no such algorithm": lambda: group.all_reduce(good, "sum", "quick"),
        "no such op": lambda: group.all_reduce(good, "mean"),
        "groups of 3": lambda: group.all_reduce(good, "sum", "hierarchical", group_size=3),
        "too long for low_latency": lambda: group.all_reduce(
            [torch.zeros(1 << 26).to(DEVICE) for _ in range(2)], "sum", "low_latency"
        ),
        "root 2": lambda: group.broadcast(good, 2),
        "to itself": lambda: group.send_recv(1, 1, good),
        "short output": lambda: group.all_gather(good, good),
    }
    check_refused(bad_calls, "ValueError", "TypeError", "RotaError")
    inputs = exact_inputs(2, 100, torch.float32)
    check_sum(group, inputs, exact(inputs, "sum"))


def test_local_group_refuses_channels_ranks_and_devices_that_cannot_be() -> None:
    for num_channels in (10_000, 0, -1):  # the first would not be resident
        with pytest.raises(ValueError, match="channels"):
            LocalGroup(4, DEVICE, num_channels=num_channels)
    for world_size in (0, -1, 1, 17):
        with pytest.raises(ValueError, match="world_size"):
            LocalGroup(world_size, DEVICE)
    for device in ("cpu", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises((ValueError, rota.RotaError)):
            LocalGroup(2, device)
