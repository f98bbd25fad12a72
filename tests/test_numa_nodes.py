"""NUMA nodes as a level of sums: which ranks make one, what it refuses, and the bits of its sums.

Nodes are set by ROTA_NUMA_NODE, so these tests run on any machine.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import rota
from oracle import (
    assert_same,
    contract,
    random_inputs,
)
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.doctor import hosts as doctor_hosts

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


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("bbbaaa", [[0, 1, 2], [3, 4, 5]]),
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


def nodes_of(rank: Rank, layout: Layout) -> list[list[int]]:
    layout.enter(rank)
    return rank.communicator().numa_nodes


@on_ranks(2)
def test_ranks_that_are_not_bound_to_nodes_make_no_level(rank: Rank) -> None:
    os.environ.pop("ROTA_NUMA_NODE", None)
    assert rank.communicator().numa_nodes == []


def error_with_nodes(rank: Rank, nodes: list[str | None]) -> tuple[str, str]:
    node = nodes[rank.rank]
    if node is not None:
        os.environ["ROTA_NUMA_NODE"] = node
    rank.init("gloo")
    return error_of(lambda: rota.Communicator().barrier())


@pytest.mark.parametrize(
    ("nodes", "fact"),
    [
        (["0", None, "1"], "rank 0 has ROTA_NUMA_NODE=0, rank 1 has none"),
        ([None, None, "7"], "rank 0 has none, rank 2 has ROTA_NUMA_NODE=7"),
    ],
)
@on_ranks(3)
def test_node_set_by_hand_on_some_ranks_only_is_an_error_everywhere(
    rank: Rank, nodes: list[str | None], fact: str
) -> None:
    check_error(error_with_nodes(rank, nodes), "TransportError", fact, "for every rank")


@pytest.mark.parametrize("node", ["", "one", "-1", "1.5", "0 "])
@on_ranks(1)
def test_node_that_is_no_number_is_refused(rank: Rank, node: str) -> None:
    fact = f"ROTA_NUMA_NODE is '{node}', expected a number"
    check_error(error_with_nodes(rank, [node]), "TransportError", fact)


# ---- the bits of one level, which test_sum_order.py has for short slots


def check_long(rank: Rank, layout: Layout) -> None:
    """Beyond the length from which "auto" is "two_level", in default slots."""
    layout.enter(rank)
    communicator = rank.communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        inputs = random_inputs(rank.world_size, 3 * LONG + 17, dtype)
        own = inputs[rank.rank]
        for order in ({"group_size": layout.node_size}, {"order": "tree"}):
            expected = contract(inputs, "sum", **order)
            communicator.all_reduce(tensor := own.clone(), **order)
            assert_same(tensor, expected, f"{dtype} {order}")
            root = rank.world_size - 1
            communicator.reduce(tensor := own.clone(), root, **order)
            assert_same(tensor, expected if rank.rank == root else own, f"reduce {dtype} {order}")
        if not dtype.is_floating_point:
            communicator.all_reduce(tensor := own.clone(), algorithm="two_level")
            assert_same(tensor, contract(inputs, "sum"), f"{dtype} in any order")
        dist.all_reduce(tensor := own.clone())
        assert_same(tensor, contract(inputs, "sum"), f"the default order of {dtype}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_long_tensors_have_the_bits_of_one_level(layout: Layout) -> None:
    run_ranks(len(layout.nodes), check_long, layout)


# ---- which algorithm


def error_where_rank_0_calls_another(
    rank: Rank, first: str, others: str, num_elems: int, order: dict[str, Any]
) -> tuple[str, str]:
    TWO_BY_TWO.enter(rank)
    algorithm = others if rank.rank > 0 else first
    tensor = torch.ones(num_elems)
    return error_of(lambda: rank.communicator().all_reduce(tensor, "sum", algorithm, **order))


@pytest.mark.parametrize(
    ("num_elems", "order", "chosen"),
    [
        (LONG, {"group_size": 2}, "two_level"),
        (LONG, {"order": "tree"}, "two_level"),
        (LONG, {}, "two_shot"),
        (1000, {"group_size": 2}, "one_shot"),
    ],
    ids=["groups", "tree", "ascending", "short"],
)
@on_ranks(4)
def test_auto_is_two_level_where_the_order_allows_it(
    rank: Rank, num_elems: int, order: dict[str, Any], chosen: str
) -> None:
    """Ranks that run the same algorithm agree, whoever has chosen it."""
    error = error_where_rank_0_calls_another(rank, "auto", chosen, num_elems, order)
    check_error(error, "nothing")


@on_ranks(4)
def test_mismatch_names_the_nodes(rank: Rank) -> None:
    order = {"group_size": 2}
    error = error_where_rank_0_calls_another(rank, "two_level", "two_shot", 1000, order)
    check_error(error, "Mismatch", "two_level, nodes of 2, groups of 2", "two_shot, groups of 2")


def check_refusal(rank: Rank, layout: Layout, order: dict[str, Any], facts: list[str]) -> None:
    layout.enter(rank)
    communicator = rank.communicator()
    tensor = torch.ones(8)
    error = error_of(communicator.all_reduce, tensor, "sum", "two_level", **order)
    assert torch.equal(tensor, torch.ones(8))
    communicator.all_reduce(tensor)  # the group is usable
    check_error(error, "ValueError", *facts)


@pytest.mark.parametrize(
    ("nodes", "order", "facts"),
    [
        (
            "aabbccdd",
            {},
            [
                "first adds the 2 ranks of each NUMA node, not all ranks one after",
                "pass group_size=2 or order='tree', or use 'two_shot'",
            ],
        ),
        ("aabbccdd", {"group_size": 4}, ["not groups of 4; pass group_size=2"]),
        (
            "aabbcc",
            {"order": "tree"},
            ["which are no subtree of order='tree'; pass group_size=2, or"],
        ),
        ("aa", {"group_size": 2}, ["algorithm='two_level' needs", "ROTA_NUMA_NODE"]),
    ],
    ids=str,
)
def test_two_level_in_an_order_without_the_nodes_is_refused(
    nodes: str, order: dict[str, Any], facts: list[str]
) -> None:
    run_ranks(len(nodes), check_refusal, Layout(nodes), order, facts)


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
