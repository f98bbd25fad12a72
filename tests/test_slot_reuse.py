"""Two slots of each kind, two mailboxes and two posts suffice: no reader meets an overwritten one.

The arguments stand in schedule/direct.h and beside each executor in csrc/cpu/; here they are
checked on a model of the executors (executor_model.py): all interleavings of small worlds, and the
order that flags guarantee for every world size up to 16. The C++ itself runs under ThreadSanitizer
in test_cpp.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from executor_model import (
    Recorder,
    all_gather,
    broadcast,
    complete_message,
    complete_two_shot_message,
    contribute_message,
    one_shot,
    ordered_ring,
    ring,
    two_shot,
)
from flag_model import Op, check_order, explore

Executor = Callable[..., int]

# In rounds through slots.
EXECUTORS: dict[str, Executor] = {
    "one_shot": one_shot,
    "two_shot": two_shot,
    "ordered_ring": ordered_ring,
    "ring": ring,
    "broadcast": broadcast,
    "all_gather": all_gather,
}
# In one message through a mailbox: the part behind the posts.
MESSAGES: dict[str, Executor] = {
    "message": complete_message,
    "two_shot_message": complete_two_shot_message,
}

# (executor, world size, rounds or chunks): as large as all interleavings stay countable.
SMALL_WORLDS = [
    ("one_shot", 2, 6),
    ("one_shot", 3, 5),
    ("one_shot", 4, 4),
    ("two_shot", 2, 6),
    ("two_shot", 3, 5),
    ("two_shot", 4, 3),
    ("ordered_ring", 2, 6),
    ("ordered_ring", 3, 5),
    ("ordered_ring", 4, 4),
    ("ring", 2, 5),
    ("ring", 3, 4),
    ("ring", 4, 3),
    ("broadcast", 2, 6),
    ("broadcast", 3, 6),
    ("broadcast", 4, 5),
    ("all_gather", 2, 6),
    ("all_gather", 3, 5),
    ("all_gather", 4, 4),
]
each_small_world = pytest.mark.parametrize(
    ("name", "world_size", "num_rounds"),
    SMALL_WORLDS,
    ids=[f"{name}-ws{world_size}-rounds{rounds}" for name, world_size, rounds in SMALL_WORLDS],
)

# Each wait of each executor, in a world that needs it.
PHASES = [
    ("one_shot", "one_shot"),
    ("two_shot", "two_shot reduce"),
    ("two_shot", "two_shot collect"),
    ("ordered_ring", "ordered_ring receive"),
    ("ordered_ring", "ordered_ring send"),
    ("ring", "ring receive"),
    ("ring", "ring send"),
    ("broadcast", "broadcast send"),
    ("broadcast", "broadcast receive"),
    ("all_gather", "all_gather receive"),
]


def record(
    world_size: int, calls: Sequence[tuple[str, dict[str, int]]], **options: Any
) -> list[list[Op]]:
    """Every rank's line through collectives, each a name of EXECUTORS or MESSAGES and arguments."""
    ranks = [Recorder(rank, world_size, **options) for rank in range(world_size)]
    for rank in ranks:
        for name, arguments in calls:
            if name in MESSAGES:
                rank.collective(contribute_message, MESSAGES[name])
            else:
                rank.collective(None, partial(EXECUTORS[name], **arguments))
    return [rank.ops for rank in ranks]


def record_alone(name: str, world_size: int, num_rounds: int, **options: Any) -> list[list[Op]]:
    """One executor without the frame around it, so that its own waits must suffice."""
    ranks = [Recorder(rank, world_size, **options) for rank in range(world_size)]
    for rank in ranks:
        EXECUTORS[name](rank, num_rounds)
    return [rank.ops for rank in ranks]


@each_small_world
def test_slots_every_interleaving_reads_what_was_meant(
    name: str, world_size: int, num_rounds: int
) -> None:
    lines = record_alone(name, world_size, num_rounds)
    assert explore(lines) is None
    assert check_order(lines) is None


@each_small_world
def test_slots_only_one_is_found_overwritten(name: str, world_size: int, num_rounds: int) -> None:
    lines = record_alone(name, world_size, num_rounds, num_slots=1)
    assert explore(lines) is not None
    assert check_order(lines) is not None


@pytest.mark.parametrize(("name", "phase"), PHASES, ids=[p.replace(" ", "-") for _, p in PHASES])
def test_slots_without_one_wait_are_found_overwritten(name: str, phase: str) -> None:
    lines = record_alone(name, 3, 3, without=(phase,))
    assert explore(lines) is not None
    assert check_order(lines) is not None


@pytest.mark.parametrize("world_size", (2, 3), ids=lambda p: f"ws{p}")
@pytest.mark.parametrize("name", MESSAGES)
def test_mailboxes_every_interleaving_reads_what_was_meant(name: str, world_size: int) -> None:
    lines = record(world_size, [(name, {})] * 4)
    assert explore(lines) is None
    assert check_order(lines) is None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("message", {"num_parities": 1}),
        ("message", {"without": ("start",)}),
        ("two_shot_message", {"without": ("start",)}),
        ("two_shot_message", {"without": ("two_shot collect",)}),
    ],
)
def test_mailboxes_wrong_frame_is_found(name: str, wrong: dict[str, Any]) -> None:
    lines = record(3, [(name, {})] * 3, **wrong)
    assert explore(lines) is not None
    assert check_order(lines) is not None


@pytest.mark.parametrize("first", (*EXECUTORS, *MESSAGES))
@pytest.mark.parametrize("second", (*EXECUTORS, *MESSAGES))
def test_collectives_in_turn_every_interleaving_is_safe(first: str, second: str) -> None:
    lines = record(2, [(name, {"num_rounds": 3}) for name in (first, second, first)])
    assert explore(lines) is None
    assert check_order(lines) is None


@pytest.mark.parametrize("world_size", range(1, 17), ids=lambda p: f"ws{p}")
def test_collectives_mixed_are_ordered_by_flags(world_size: int) -> None:
    choose = random.Random(world_size)
    # Alone, a communicator only ever runs one_shot.
    executors = (*EXECUTORS, *MESSAGES) if world_size > 1 else ("one_shot", "broadcast", "message")
    for _ in range(2):
        calls: list[tuple[str, dict[str, int]]] = []
        for name in choose.choices(executors, k=8):
            arguments = {"num_rounds": choose.randrange(5)}
            if name == "broadcast":
                arguments["root"] = choose.randrange(world_size)
            calls.append((name, arguments))
        assert check_order(record(world_size, calls)) is None
