"""NUMA nodes as a level of sums: which ranks make one, what it refuses, and the bits of its sums.

Nodes are set by ROTA_NUMA_NODE, so these tests run on any machine.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from bucket_sums import check_bucket_sums
from oracle import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    assert_same,
    contract,
    name_of,
    ops_of,
    random_inputs,
)
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.doctor import hosts as doctor_hosts

SLOT_BYTES = 4096
# Shards of which some are empty, and several rounds through short slots.
LENGTHS = (129, 20_003)
LONG = 1 << 17  # float32, beyond where "auto" is "two_level"


class Layout(NamedTuple):
    """One letter for each rank: its node."""

    nodes: str

    @property
    def node_size(self) -> int:
        return self.nodes.count(self.nodes[0])

    def enter(self, rank: Rank) -> None:
        os.environ["ROTA_NUMA_NODE"] = str(ord(self.nodes[rank.rank]) - ord("a"))

    def __str__(self) -> str:
        return self.nodes


TWO_BY_TWO = Layout("aabb")
LAYOUTS = [TWO_BY_TWO, Layout("aaabbb"), Layout("aabbccdd")]


# ---- which ranks make a level


def nodes_of(rank: Rank, layout: Layout) -> list[list[int]]:
    layout.enter(rank)
    return rank.communicator().numa_nodes


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("bbbaaa", [[0, 1, 2], [3, 4, 5]]),
        ("aabbcc", [[0, 1], [2, 3], [4, 5]]),
        ("aaaa", []),
        ("abab", []),
        ("aaab", []),
        ("abcd", []),
    ],
)
def test_nodes_are_a_level_if_each_has_as_many_consecutive_ranks(
    nodes: str, expected: list[list[int]]
) -> None:
    assert run_ranks(len(nodes), nodes_of, Layout(nodes)) == [expected] * len(nodes)


@on_ranks(2)
def test_ranks_that_are_not_bound_to_nodes_make_no_level(rank: Rank) -> None:
    os.environ.pop("ROTA_NUMA_NODE", None)
    result = rank.communicator().numa_nodes
    assert result == []


def error_with_nodes(rank: Rank, nodes: list[str | None]) -> tuple[str, str]:
    node = nodes[rank.rank]
    if node is not None:
        os.environ["ROTA_NUMA_NODE"] = node
    rank.init("gloo")
    return error_of(lambda: rota.Communicator().barrier())


@pytest.mark.parametrize(
    ("nodes", "parts"),
    [
        (["0", None, "1"], ("rank 0 has ROTA_NUMA_NODE=0, rank 1 has none", "for every rank")),
        ([None, None, "7"], ("rank 0 has none, rank 2 has ROTA_NUMA_NODE=7", "for every rank")),
    ],
)
def test_node_set_by_hand_on_some_ranks_only_is_an_error_everywhere(
    nodes: list[str | None], parts: tuple[str, ...]
) -> None:
    for error in run_ranks(3, error_with_nodes, nodes):
        check_error(error, "TransportError", *parts)


@pytest.mark.parametrize("node", ["", "one", "-1", "1.5", "0 "])
def test_node_that_is_no_number_is_refused(node: str) -> None:
    error = run_ranks(1, error_with_nodes, [node])[0]
    check_error(error, "TransportError", f"ROTA_NUMA_NODE is '{node}', expected a number")


# ---- the bits of one level


def orders_of(layout: Layout, dtype: torch.dtype) -> list[dict[str, Any]]:
    orders: list[dict[str, Any]] = [{"group_size": layout.node_size}, {"order": "tree"}]
    return orders if dtype.is_floating_point else [*orders, {}]


def check_all_reduce(rank: Rank, layout: Layout, dtype: torch.dtype) -> None:
    layout.enter(rank)
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    wires = (None, torch.float16) if dtype == torch.float32 else (None,)
    for length, order in itertools.product(LENGTHS, orders_of(layout, dtype)):
        inputs = random_inputs(rank.world_size, length, dtype)
        own = inputs[rank.rank]
        for op, wire_dtype in itertools.product(ops_of(dtype), wires):
            expected = contract(inputs, op, wire_dtype, **order)
            # Each after the other, so that slots and flags carry over.
            for algorithm in ("two_level", "one_shot", "two_level", "two_shot"):
                tensor = own.clone()
                communicator.all_reduce(tensor, op, algorithm, wire_dtype, **order)
                assert_same(tensor, expected, f"{op} {algorithm} {order} {wire_dtype} {length}")


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, FLOAT8_DTYPES[0], torch.int8], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_reduce_has_the_bits_of_one_level(layout: Layout, dtype: torch.dtype) -> None:
    run_ranks(len(layout.nodes), check_all_reduce, layout, dtype)


def check_bucket(rank: Rank, layout: Layout) -> None:
    layout.enter(rank)
    communicator = rank.communicator(slot_bytes=SLOT_BYTES)
    for order in orders_of(layout, torch.float32):
        check_bucket_sums(communicator, LENGTHS, ("two_level", "two_shot"), order)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bucket_has_the_bits_of_one_level(layout: Layout) -> None:
    run_ranks(len(layout.nodes), check_bucket, layout)


def check_long(rank: Rank, layout: Layout) -> None:
    """Beyond the length from which "auto" is "two_level", in default slots."""
    layout.enter(rank)
    communicator = rank.communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        inputs = random_inputs(rank.world_size, 3 * LONG + 17, dtype)
        own = inputs[rank.rank]
        for order in orders_of(layout, dtype):
            expected = contract(inputs, "sum", **order)
            communicator.all_reduce(tensor := own.clone(), **order)
            assert_same(tensor, expected, f"{dtype} {order}")
            root = rank.world_size - 1
            communicator.reduce(tensor := own.clone(), root, **order)
            assert_same(tensor, expected if rank.rank == root else own, f"reduce {dtype} {order}")
        dist.all_reduce(tensor := own.clone())
        assert_same(tensor, contract(inputs, "sum"), f"the default order of {dtype}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_long_tensors_have_the_bits_of_one_level(layout: Layout) -> None:
    run_ranks(len(layout.nodes), check_long, layout)


# ---- which algorithm


def call_with_algorithms(
    rank: Rank, algorithms: dict[str, str], num_elems: int, order: dict[str, Any]
) -> tuple[str, str]:
    TWO_BY_TWO.enter(rank)
    algorithm = algorithms["others"] if rank.rank > 0 else algorithms["first"]
    tensor = torch.ones(num_elems)
    return error_of(lambda: rank.communicator().all_reduce(tensor, "sum", algorithm, **order))


@pytest.mark.parametrize(
    ("num_elems", "order", "is_two_level"),
    [
        (LONG, {"group_size": 2}, True),
        (LONG, {"order": "tree"}, True),
        (LONG, {}, False),
        (1000, {"group_size": 2}, False),
    ],
    ids=["groups", "tree", "ascending", "short"],
)
def test_auto_is_two_level_where_the_order_allows_it(
    num_elems: int, order: dict[str, Any], is_two_level: bool
) -> None:
    """Ranks that run the same algorithm agree, whoever has chosen it."""
    algorithms = {"first": "auto", "others": "two_level" if is_two_level else "two_shot"}
    if num_elems < LONG:
        algorithms["others"] = "one_shot"
    for error in run_ranks(4, call_with_algorithms, algorithms, num_elems, order):
        check_error(error, "nothing")


def test_mismatch_names_the_nodes() -> None:
    algorithms = {"first": "two_level", "others": "two_shot"}
    for error in run_ranks(4, call_with_algorithms, algorithms, 1000, {"group_size": 2}):
        check_error(
            error, "Mismatch", "two_level, nodes of 2, groups of 2", "two_shot, groups of 2"
        )


def refusals(rank: Rank, layout: Layout, orders: list[dict[str, Any]]) -> list[tuple[str, str]]:
    layout.enter(rank)
    communicator = rank.communicator()
    tensor = torch.ones(8)
    errors = [
        error_of(lambda order=order: communicator.all_reduce(tensor, "sum", "two_level", **order))
        for order in orders
    ]
    assert torch.equal(tensor, torch.ones(8))
    communicator.all_reduce(tensor)  # the group is usable
    return errors


def test_two_level_in_an_order_without_the_nodes_is_refused() -> None:
    orders: list[dict[str, Any]] = [{}, {"group_size": 4}]
    for plain, groups in run_ranks(8, refusals, Layout("aabbccdd"), orders):
        assert plain[0] == groups[0] == "ValueError"
        assert "first adds the 2 ranks of each NUMA node, not all ranks one after" in plain[1]
        assert "pass group_size=2 or order='tree', or use 'two_shot'" in plain[1]
        assert "not groups of 4; pass group_size=2" in groups[1]
    for ((error, text),) in run_ranks(6, refusals, Layout("aabbcc"), [{"order": "tree"}]):
        assert error == "ValueError"
        assert "which are no subtree of order='tree'; pass group_size=2, or" in text


def test_two_level_without_nodes_is_refused() -> None:
    for ((error, text),) in run_ranks(2, refusals, Layout("aa"), [{"group_size": 2}]):
        assert error == "ValueError"
        assert "algorithm='two_level' needs" in text and "ROTA_NUMA_NODE" in text


# ---- a rank that is lost


def reduce_until_error(rank: Rank, num_elems: int) -> list[tuple[str, str]]:
    TWO_BY_TWO.enter(rank)
    communicator = rank.communicator()
    tensor = torch.zeros(num_elems)
    for _ in range(20):
        communicator.all_reduce(tensor, "sum", "two_level", group_size=2)
    rank.tell()

    def loop() -> None:
        while True:
            communicator.all_reduce(tensor, "sum", "two_level", group_size=2)

    return [error_of(loop), error_of(communicator.barrier)]


@pytest.mark.parametrize("num_elems", [5, 3_000_000], ids=["short", "long"])
@pytest.mark.parametrize("dead", [0, 1, 3], ids="rank{}".format)
def test_rank_killed_during_two_level_raises_peer_failed(dead: int, num_elems: int) -> None:
    with Ranks(4, reduce_until_error, num_elems) as ranks:
        results = ranks.results_without(dead)
        pid = ranks.pid(dead)
    for rank in set(range(4)) - {dead}:
        (error, text), (later, later_text) = results[rank]
        assert error == later == "PeerFailed"
        assert text.startswith(f"rota.all_reduce: rank {rank}/4")
        assert f"rank {dead} (pid {pid}) has died" in text
        assert "epoch" in text and "step" in text
        assert "the group is dead" in later_text


# ---- doctor


def ask_doctor(rank: Rank, layout: Layout) -> str:
    layout.enter(rank)
    assert _C.numa_node() == ord(layout.nodes[rank.rank]) - ord("a")
    rank.init("gloo")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert doctor_hosts.run() == 0
    return output.getvalue()


def test_doctor_says_whether_nodes_are_a_level_of_sums() -> None:
    text = run_ranks(4, ask_doctor, TWO_BY_TWO)[0]
    assert "    NUMA node 0: ranks 0 1\n    NUMA node 1: ranks 2 3\n" in text
    assert "NUMA nodes are a level of sums: all_reduce with group_size=2" in text
    text = run_ranks(4, ask_doctor, Layout("abab"))[0]
    assert "NUMA nodes are no level of sums" in text
