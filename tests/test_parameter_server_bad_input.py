"""ParameterServer refuses what it cannot do, on all ranks, before anything has moved."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from parameter_servers import OPTIMIZERS, init
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota.parameter_server import ParameterServer
from rota.parameter_server.arguments import named_parameters

pytestmark = pytest.mark.same_in_every_build

BAD_OPTIONS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "staleness-negative": (
        {"mode": "stale", "staleness": -1},
        "ValueError",
        ["staleness is -1", "0 or more"],
    ),
    "staleness-missing": ({"mode": "stale"}, "ValueError", ["staleness is None", "0 or more"]),
    "staleness-float": ({"mode": "stale", "staleness": 1.5}, "ValueError", ["staleness is 1.5"]),
    "staleness-of-sync": ({"staleness": 2}, "ValueError", ["staleness is 2", "mode='sync'"]),
    "mode": ({"mode": "hogwild"}, "ValueError", ["'hogwild'", "'sync', 'async', 'stale'"]),
    "server-outside": ({"servers": [0, 5]}, "ValueError", ["[5]", "0 to 1"]),
    "servers-empty": ({"servers": []}, "ValueError", ["one or more ranks"]),
    "servers-twice": ({"servers": [0, 0]}, "ValueError", ["comes twice"]),
    "servers-all": ({"servers": [1, 0]}, "ValueError", ["2 of the group's 2", "servers=None"]),
    "wire": ({"wire_dtype": torch.int8}, "TypeError", ["rota.ParameterServer", "torch.int8"]),
    "scaling-of-float32": ({"block_scaling": True}, "ValueError", ["rounds nothing"]),
    "feedback-of-float32": (
        {"error_feedback": True, "wire_dtype": torch.float32},
        "ValueError",
        ["rounds nothing", "torch.float32"],
    ),
    "compensation-of-sync": (
        {"delay_compensation": 0.1},
        "ValueError",
        ["delay_compensation is 0.1", "expected 0"],
    ),
    "compensation-nan": (
        {"mode": "async", "delay_compensation": float("nan")},
        "ValueError",
        ["delay_compensation is nan"],
    ),
    "replicas": ({"replicas": 2}, "ValueError", ["replicas is 2", "expected 0, 1 or None"]),
    "replica-of-one-server": (
        {"servers": [1], "replicas": 1},
        "ValueError",
        ["replicas is 1, but there is 1 server"],
    ),
    "weights-with-optimizer": ({"average_weights": True}, "ValueError", ["make_optimizer"]),
    "no-optimizer": ({"make_optimizer": None}, "TypeError", ["make_optimizer is None"]),
    "no-parameters": ({"parameters_or_module": []}, "ValueError", ["no parameter"]),
    "a-tensor": (
        {"parameters_or_module": torch.zeros(3)},
        "TypeError",
        ["is a tensor, expected a module"],
    ),
    "float64": (
        {"parameters_or_module": [torch.zeros(3, dtype=torch.float64)]},
        "TypeError",
        ["torch.float64", "float32 copies"],
    ),
    "frozen": (
        {"parameters_or_module": nn.Linear(2, 2).requires_grad_(False)},
        "ValueError",
        ["requires a gradient"],
    ),
    "other-parameters": (
        {"make_optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)},
        "ValueError",
        ["not the 1 given to it"],
    ),
    "no-torch-optimizer": ({"make_optimizer": len}, "TypeError", ["of type int"]),
}


def make(**changes: Any) -> ParameterServer:
    options = {
        "parameters_or_module": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))],
        "make_optimizer": OPTIMIZERS["sum"],
    }
    return ParameterServer(**(options | changes))


def make_each_badly(rank: Rank) -> dict[str, tuple[str, str]]:
    """Makes a good one after each: nothing is left behind."""
    init(rank)
    errors = {}
    for case, (changes, *_) in BAD_OPTIONS.items():
        errors[case] = error_of(lambda changes=changes: make(**changes))
        make().close()
    return errors


@functools.cache
def errors_of_bad_options() -> list[dict[str, tuple[str, str]]]:
    return run_ranks(2, make_each_badly)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option_raises_on_all_ranks(case: str) -> None:
    _, expected, facts = BAD_OPTIONS[case]
    for errors in errors_of_bad_options():
        error, text = errors[case]
        assert error == expected and text.startswith("rota.ParameterServer"), text
        assert all(fact in text for fact in facts), text


@on_ranks(2)
def test_bad_option_on_one_rank_is_named_on_the_others(rank: Rank) -> None:
    init(rank)
    changes = BAD_OPTIONS["staleness-negative"][0] if rank.rank == 0 else {}
    error = error_of(lambda: make(**changes))
    make().close()
    if rank.rank == 0:
        check_error(error, "ValueError", "staleness is -1")
    else:
        check_error(error, "TransportError", "rank 0 failed: ", "staleness is -1")


@on_ranks(2)
def test_shards_are_refused(rank: Rank) -> None:
    init(rank)
    error = error_of(lambda: make(parameters_or_module=fully_shard(nn.Linear(2, 2))))
    check_error(error, "TypeError", "weight is a DTensor")


def test_frozen_parameters_of_a_list_are_left_out() -> None:
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    assert named_parameters(layer.parameters()) == {"parameter 1": layer.bias}


def make_differently(rank: Rank) -> list[tuple[str, str]]:
    init(rank)
    of_first: list[dict[str, Any]] = [
        {"mode": "async"},
        {"mode": "stale", "staleness": 2},
        {"servers": [1]},
        {"wire_dtype": torch.float16},
        {"parameters_or_module": [nn.Parameter(torch.ones(4))]},
    ]
    of_others = [{}, {"mode": "stale", "staleness": 1}, {}, {}, {}]
    options = of_first if rank.rank == 0 else of_others
    return [error_of(functools.partial(make, **changes)) for changes in options]


def test_ranks_that_disagree_raise_mismatch_with_both_sides() -> None:
    facts = [
        ("mode", "rank 0 has async; rank 1, 2 has sync"),
        ("staleness", "rank 0 has 2; rank 1, 2 has 1"),
        ("servers", "rank 0 has [1]; rank 1, 2 has [0, 1, 2]"),
        ("wire_dtype", "torch.float16"),
        ("the parameters", "rank 0 has [4] torch.float32; rank 1, 2 has [3] torch.float32"),
    ]
    for errors in run_ranks(3, make_differently):
        for (error, text), (key, sides) in zip(errors, facts, strict=True):
            assert error == "Mismatch", text
            assert f"disagree on {key}" in text and sides in text


def push_badly(rank: Rank) -> list[tuple[str, str]]:
    init(rank)
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 4))]
    server = ParameterServer(parameters, OPTIMIZERS["sum"])
    good = [torch.ones(3), torch.ones(2, 4)]
    bad: list[Any] = [
        good[:1],
        [good[0], torch.ones(4, 2)],
        [good[0], torch.ones(2, 4, dtype=torch.float64)],
        [good[0].to_sparse(), good[1]],
        [1.0, good[1]],
    ]
    errors = [error_of(lambda pushed=pushed: server.push(pushed)) for pushed in bad]
    assert server.clock == 0
    server.step(good)
    assert all((parameter == 0).all() for parameter in parameters)
    server.close()
    server.close()
    return [*errors, *(error_of(call) for call in (server.push, server.pull, server.serve))]


def test_bad_push_names_both_sides_and_moves_nothing() -> None:
    facts = [
        ("ValueError", ["1 tensors, expected 2"]),
        ("ValueError", ["parameter 1", "[4, 2]", "[2, 4]"]),
        ("TypeError", ["torch.float64", "torch.float32"]),
        ("TypeError", ["torch.sparse_coo"]),
        ("TypeError", ["float"]),
        *[("RotaError", ["closed"])] * 3,
    ]
    for errors in run_ranks(2, push_badly):
        for (error, text), (expected, words) in zip(errors, facts, strict=True):
            assert error == expected and all(word in text for word in words), text


def call_on_the_wrong_rank(rank: Rank) -> list[tuple[str, str]]:
    init(rank)
    server = make(servers=[1])
    if rank.rank == 0:
        errors = [error_of(server.serve), error_of(lambda: server.delays)]
    else:
        errors = [error_of(call) for call in (server.push, server.pull, server.flush)]
    if rank.rank == 1:
        server.serve()
    server.close()
    return errors


def test_calls_of_the_other_kind_of_rank_are_refused() -> None:
    worker, server = run_ranks(2, call_on_the_wrong_rank)
    assert [error for error, _ in worker] == ["RuntimeError"] * 2
    assert "rank 0 works" in worker[0][1] and "expected one of [1]" in worker[1][1]
    assert [error for error, _ in server] == ["RuntimeError"] * 3
    assert all("only serves, expected one of the workers [0]" in text for _, text in server)


def come_alone(rank: Rank) -> tuple[str, str] | None:
    init(rank)
    group = dist.new_group([1])
    if rank.rank == 0:
        return error_of(lambda: make(group=group))
    error = error_of(lambda: make(timeout=timedelta(seconds=0.3)))
    return error


def test_rank_outside_the_group_and_rank_that_does_not_come() -> None:
    outside, alone = run_ranks(2, come_alone)
    assert outside == ("ValueError", outside[1]) and "not in the group" in outside[1]
    assert alone is not None and alone[0] == "Timeout" and "for rank 0" in alone[1]


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        make()
