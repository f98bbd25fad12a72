"""The costs of csrc/schedule/cost.h, which are added up step by step, against closed formulas.

Formulas are exact for all ranks together, whatever the size; for one rank where the world size
divides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import rota._C

schedule = rota._C.schedule
Cost = schedule.Cost

WORLD_SIZES = range(1, 17)
GRANULE_ELEMS = 64
SLOT_BYTES = 4096
ODD_SIZES = (0, 1, 63, 65, 1025, 4099, 20_011)

each_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda p: f"ws{p}")


class Widths(NamedTuple):
    """Bytes of an element: in the tensor, of contributions and results, of partial sums."""

    tensor: int
    wire: int
    hop: int


DTYPE_OF_WIDTH = {2: torch.float16, 4: torch.float32, 8: torch.float64}
each_widths = pytest.mark.parametrize(
    "widths",
    (Widths(4, 4, 4), Widths(2, 2, 4), Widths(8, 2, 4)),
    ids=lambda w: "T{}W{}H{}".format(*w),
)


def message_of(num_elems: int, widths: Widths, slot_bytes: int = SLOT_BYTES) -> schedule.Message:
    tensor, wire, hop = (schedule.WireFormat(DTYPE_OF_WIDTH[width]) for width in widths)
    return schedule.Message(
        num_elems=num_elems,
        tensor=tensor,
        wire=wire,
        hop=hop,
        slot_bytes=slot_bytes,
        granule_elems=GRANULE_ELEMS,
    )


def capacity(num_bytes: int, width: int) -> int:
    """Whole granules that num_bytes hold, in elements."""
    return num_bytes // (width * GRANULE_ELEMS) * GRANULE_ELEMS


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


class Expected(NamedTuple):
    """Bytes are totals over all ranks."""

    sent: int
    read_from_peers: int
    tensor_read: int
    tensor_written: int
    kept: int  # partial sums in a rank's own memory
    waits: int


def one_shot(num_elems: int, p: int, widths: Widths) -> Expected:
    rounds = ceil_div(num_elems, capacity(SLOT_BYTES, widths.wire))
    tensors = p * num_elems * widths.tensor
    return Expected(
        sent=p * (p - 1) * num_elems * widths.wire,
        read_from_peers=0,
        tensor_read=tensors * (2 if p > 1 else 1),  # to send it, and to add it
        tensor_written=tensors,
        kept=0,
        waits=rounds if p > 1 else 0,
    )


def low_latency(num_elems: int, p: int, widths: Widths) -> Expected:
    slot_elems = capacity(SLOT_BYTES // 2, widths.wire)
    rounds = ceil_div(num_elems, slot_elems)
    lengths = [
        schedule.piece_of(num_elems, rounds, r, GRANULE_ELEMS).num_elems for r in range(rounds)
    ]
    packets = sum(ceil_div(length * widths.wire, 4) for length in lengths)
    return one_shot(num_elems, p, widths)._replace(
        sent=p * (p - 1) * packets * 8, waits=rounds if p > 1 else 0
    )


def two_shot(num_elems: int, p: int, widths: Widths) -> Expected:
    rounds = ceil_div(num_elems, p * capacity(SLOT_BYTES, widths.wire))
    return Expected(
        sent=2 * (p - 1) * num_elems * widths.wire,
        read_from_peers=0,
        tensor_read=p * num_elems * widths.tensor,
        tensor_written=p * num_elems * widths.tensor,
        kept=0,
        waits=2 * rounds if p > 1 else 0,
    )


def reduce_scatter(num_elems: int, p: int, widths: Widths) -> Expected:
    whole = two_shot(num_elems, p, widths)
    return whole._replace(
        sent=whole.sent // 2, tensor_written=num_elems * widths.tensor, waits=whole.waits // 2
    )


def all_gather(num_elems: int, p: int, widths: Widths) -> Expected:
    whole = two_shot(num_elems, p, widths)
    return whole._replace(
        sent=whole.sent // 2, tensor_read=num_elems * widths.tensor, waits=whole.waits // 2
    )


def two_shot_in_place(num_elems: int, p: int, widths: Widths) -> Expected:
    moved = (p - 1) * num_elems * widths.tensor
    return Expected(
        sent=moved,
        read_from_peers=moved,
        tensor_read=p * num_elems * widths.tensor,
        tensor_written=p * num_elems * widths.tensor,
        kept=0,
        waits=2 if p > 1 and num_elems > 0 else 0,
    )


def ring(num_elems: int, p: int, widths: Widths) -> Expected:
    if p == 1:
        return one_shot(num_elems, p, widths)
    longest = ceil_div(ceil_div(num_elems, p), GRANULE_ELEMS) * GRANULE_ELEMS
    rounds = ceil_div(min(longest, num_elems), capacity(SLOT_BYTES, widths.hop))
    return Expected(
        sent=(p - 1) * num_elems * (widths.hop + widths.wire),
        read_from_peers=0,
        tensor_read=p * num_elems * widths.tensor,
        tensor_written=p * num_elems * widths.tensor,
        kept=0,
        waits=2 * (p - 1) * rounds,
    )


def ordered_ring(num_elems: int, p: int, widths: Widths) -> Expected:
    widest = max(widths.hop, widths.wire)
    num_chunks = ceil_div(num_elems, capacity(SLOT_BYTES // 2, widest))
    # The first step waits for nothing.
    waits = num_chunks + 2 * (p - 1) - 1 if num_chunks > 0 else 0
    return ring(num_elems, p, widths)._replace(waits=waits if p > 1 else 0)


def hierarchical(num_elems: int, p: int, widths: Widths, group_size: int) -> Expected:
    num_groups = p // group_size
    widest = max(widths.hop, widths.wire)
    rounds = ceil_div(num_elems, group_size * capacity(SLOT_BYTES, widest))
    waits_a_round = (2 if group_size > 1 else 0) + (1 if num_groups > 1 else 0)
    within = num_groups * (group_size - 1) * num_elems * widths.wire
    across = num_groups * (num_groups - 1) * num_elems * widths.hop
    return Expected(
        sent=2 * within + across,
        read_from_peers=0,
        tensor_read=p * num_elems * widths.tensor,
        tensor_written=p * num_elems * widths.tensor,
        kept=num_groups * num_elems * widths.hop if num_groups > 1 else 0,
        waits=waits_a_round * rounds,
    )


def broadcast(num_elems: int, p: int, widths: Widths) -> Expected:
    num_chunks = ceil_div(num_elems, capacity(SLOT_BYTES, widths.wire))
    return Expected(
        sent=(p - 1) * num_elems * widths.wire,
        read_from_peers=0,
        tensor_read=num_elems * widths.tensor if p > 1 else 0,
        tensor_written=(p - 1) * num_elems * widths.tensor,
        kept=0,
        waits=num_chunks + p - 2 if p > 1 and num_elems > 0 else 0,
    )


CostOf = Callable[[schedule.Message, int, int], Cost]
Formula = Callable[[int, int, Widths], Expected]

ALGORITHMS: dict[str, tuple[CostOf, Formula]] = {
    "one_shot": (lambda message, _, p: schedule.one_shot_cost(message, p), one_shot),
    "low_latency": (lambda message, _, p: schedule.low_latency_cost(message, p), low_latency),
    "two_shot": (schedule.two_shot_cost, two_shot),
    "two_shot_in_place": (schedule.two_shot_in_place_cost, two_shot_in_place),
    "ring": (schedule.ring_cost, ring),
    "ordered_ring": (schedule.ordered_ring_cost, ordered_ring),
    "reduce_scatter": (schedule.reduce_scatter_cost, reduce_scatter),
    "all_gather": (schedule.all_gather_cost, all_gather),
    "broadcast": (
        lambda message, rank, p: schedule.broadcast_cost(message, rank, p, p // 2),
        broadcast,
    ),
}


def group_sizes(world_size: int) -> list[int]:
    return [size for size in range(1, world_size + 1) if world_size % size == 0]


def total(costs: list[Cost], field: str) -> int:
    return sum(getattr(cost, field) for cost in costs)


def check_totals(costs: list[Cost], expected: Expected, has_slots: bool) -> None:
    """What ranks did together; `has_slots` unless they load and store tensors directly."""
    assert total(costs, "sent_bytes") == expected.sent
    assert total(costs, "received_bytes") == expected.sent
    assert total(costs, "read_from_peers_bytes") == expected.read_from_peers
    assert total(costs, "read_by_peers_bytes") == expected.read_from_peers
    # What arrives in a slot is written once and read once.
    slots = expected.sent if has_slots else 0
    assert total(costs, "hbm_read_bytes") == expected.tensor_read + slots + expected.kept
    assert total(costs, "hbm_written_bytes") == expected.tensor_written + slots + expected.kept
    assert {cost.waits_in_a_row for cost in costs} == {expected.waits}


def check_each_rank(costs: list[Cost], expected: Expected) -> None:
    """Where everything divides, every rank bears the same part."""
    for cost in costs:
        assert cost.sent_bytes * len(costs) == expected.sent
        assert cost.received_bytes * len(costs) == expected.sent
        assert cost.read_from_peers_bytes * len(costs) == expected.read_from_peers
        assert cost.read_by_peers_bytes * len(costs) == expected.read_from_peers
        assert cost.hbm_read_bytes == costs[0].hbm_read_bytes
        assert cost.hbm_written_bytes == costs[0].hbm_written_bytes
        assert cost.num_messages == costs[0].num_messages


@each_widths
@pytest.mark.parametrize("name", ALGORITHMS)
@each_world_size
def test_cost_any_size_all_ranks_as_formula(world_size: int, name: str, widths: Widths) -> None:
    cost_of, formula = ALGORITHMS[name]
    for num_elems in ODD_SIZES:
        message = message_of(num_elems, widths)
        costs = [cost_of(message, rank, world_size) for rank in range(world_size)]
        check_totals(costs, formula(num_elems, world_size, widths), name != "two_shot_in_place")


@each_widths
@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if name not in ("ordered_ring", "broadcast")]
)
@each_world_size
def test_cost_size_that_divides_each_rank_as_formula(
    world_size: int, name: str, widths: Widths
) -> None:
    cost_of, formula = ALGORITHMS[name]
    num_elems = 3 * GRANULE_ELEMS * world_size
    message = message_of(num_elems, widths)
    costs = [cost_of(message, rank, world_size) for rank in range(world_size)]
    check_each_rank(costs, formula(num_elems, world_size, widths))


@each_widths
@each_world_size
def test_cost_hierarchical_any_group_size_as_formula(world_size: int, widths: Widths) -> None:
    one_round = GRANULE_ELEMS * world_size
    for group_size in group_sizes(world_size):
        for num_elems in (*ODD_SIZES, one_round):
            message = message_of(num_elems, widths)
            costs = [
                schedule.hierarchical_cost(message, rank, world_size, group_size)
                for rank in range(world_size)
            ]
            expected = hierarchical(num_elems, world_size, widths, group_size)
            check_totals(costs, expected, has_slots=True)
            if num_elems == one_round:
                check_each_rank(costs, expected)


@each_world_size
def test_cost_hierarchical_of_one_group_is_two_shot(world_size: int) -> None:
    widths = Widths(4, 4, 4)
    for num_elems in ODD_SIZES:
        message = message_of(num_elems, widths)
        for rank in range(world_size):
            one_group = schedule.hierarchical_cost(message, rank, world_size, world_size)
            flat = schedule.two_shot_cost(message, rank, world_size)
            for field in ("sent_bytes", "hbm_read_bytes", "hbm_written_bytes", "waits_in_a_row"):
                assert getattr(one_group, field) == getattr(flat, field)


@each_widths
@pytest.mark.parametrize("name", ("ring", "ordered_ring"))
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:], ids=lambda p: f"ws{p}")
def test_cost_on_the_ring_each_rank_receives_what_the_previous_sends(
    world_size: int, name: str, widths: Widths
) -> None:
    for num_elems in ODD_SIZES:
        message = message_of(num_elems, widths)
        costs = [ALGORITHMS[name][0](message, rank, world_size) for rank in range(world_size)]
        for rank, cost in enumerate(costs):
            previous = costs[schedule.previous_rank(rank, world_size)]
            assert cost.received_bytes == previous.sent_bytes


@each_world_size
def test_cost_one_round_messages_as_formula(world_size: int) -> None:
    peers = world_size - 1
    message = message_of(GRANULE_ELEMS * world_size, Widths(4, 4, 4), slot_bytes=1 << 20)
    expected = {
        "one_shot": peers,
        "low_latency": peers,
        "two_shot": 2 * peers,
        "two_shot_in_place": 2 * peers,  # bare flags
        "ring": 2 * peers,
        "reduce_scatter": peers,
        "all_gather": peers,
    }
    for name, num_messages in expected.items():
        for rank in range(world_size):
            assert ALGORITHMS[name][0](message, rank, world_size).num_messages == num_messages
    for group_size in group_sizes(world_size):
        cost = schedule.hierarchical_cost(message, 0, world_size, group_size)
        assert cost.num_messages == 2 * (group_size - 1) + world_size // group_size - 1
    # Along the ring, each chunk of each kind once over all links but one.
    for name, kinds in (("ordered_ring", 2), ("broadcast", 1)):
        costs = [ALGORITHMS[name][0](message, rank, world_size) for rank in range(world_size)]
        assert total(costs, "num_messages") == kinds * peers


@each_widths
def test_cost_send_and_recv_as_formula(widths: Widths) -> None:
    for num_elems in ODD_SIZES:
        message = message_of(num_elems, widths)
        send, recv = schedule.send_cost(message), schedule.recv_cost(message)
        in_tensor, on_wire = num_elems * widths.tensor, num_elems * widths.wire
        chunks = ceil_div(num_elems, capacity(SLOT_BYTES, widths.wire))
        assert (send.sent_bytes, send.received_bytes) == (on_wire, 0)
        assert (recv.sent_bytes, recv.received_bytes) == (0, on_wire)
        assert (send.hbm_read_bytes, send.hbm_written_bytes) == (in_tensor, 0)
        assert (recv.hbm_read_bytes, recv.hbm_written_bytes) == (on_wire, on_wire + in_tensor)
        assert send.waits_in_a_row == recv.waits_in_a_row == chunks
        assert (send.num_messages, recv.num_messages) == (chunks, 0)


# (wire dtype, elements that share a scale): the bucket kernels' formats.
SCALED_WIRES = ((torch.float16, 64), (torch.float8_e4m3fn, 32), (torch.float8_e5m2, 64))
TILE_ELEMS = 512


@pytest.mark.parametrize(("dtype", "block_elems"), SCALED_WIRES, ids=str)
def test_cost_bucket_kernels_count_scales_and_squares(dtype: torch.dtype, block_elems: int) -> None:
    for num_elems in ODD_SIZES:
        message = schedule.Message(
            num_elems=num_elems,
            tensor=schedule.WireFormat(torch.float32),
            wire=schedule.WireFormat(dtype, True),
            hop=schedule.WireFormat(torch.float32),
            slot_bytes=SLOT_BYTES,
            granule_elems=TILE_ELEMS,
        )
        on_wire = num_elems * dtype.itemsize + ceil_div(num_elems, block_elems)
        squares = 8 * ceil_div(num_elems, 4 * TILE_ELEMS)
        tile_list = 16 * ceil_div(num_elems, TILE_ELEMS)
        pack, unpack = schedule.pack_cost(message), schedule.unpack_cost(message)
        assert pack.hbm_read_bytes == 4 * num_elems + tile_list
        assert pack.hbm_written_bytes == on_wire
        assert unpack.hbm_read_bytes == on_wire + tile_list
        assert unpack.hbm_written_bytes == 4 * num_elems + squares
        for cost in (pack, unpack):
            assert cost.sent_bytes == cost.num_messages == cost.waits_in_a_row == 0
        # Shards are whole blocks, so their scales are those of the whole.
        for world_size in WORLD_SIZES:
            costs = [schedule.two_shot_cost(message, r, world_size) for r in range(world_size)]
            assert total(costs, "sent_bytes") == 2 * (world_size - 1) * on_wire
