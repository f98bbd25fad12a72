"""ParameterServer refuses what it cannot do, on all ranks, before anything has moved."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from parameter_servers import OPTIMIZERS, init
from ranks import Rank, check_error, error_of, on_ranks
from rota.parameter_server import ParameterServer
from rota.parameter_server.arguments import named_parameters

pytestmark = pytest.mark.same_in_every_build

BAD_OPTIONS: list[tuple[Any, ...]] = [
    (dict(mode="stale", staleness=-1), "ValueError", "staleness is -1", "0 or more"),
    (dict(mode="stale"), "ValueError", "staleness is None", "0 or more"),
    (dict(staleness=2), "ValueError", "staleness is 2", "mode='sync'"),
    (dict(mode="hogwild"), "ValueError", "'hogwild'", "'sync', 'async', 'stale'"),
    (dict(servers=[0, 5]), "ValueError", "[5]", "0 to 1"),
    (dict(servers=[]), "ValueError", "one or more ranks"),
    (dict(servers=[0, 0]), "ValueError", "comes twice"),
    (dict(servers=[1, 0]), "ValueError", "2 of the group's 2", "servers=None"),
    (dict(wire_dtype=torch.int8), "TypeError", "rota.ParameterServer", "torch.int8"),
    (dict(block_scaling=True), "ValueError", "rounds nothing"),
    (
        dict(error_feedback=True, wire_dtype=torch.float32),
        "ValueError",
        "rounds nothing",
        "torch.float32",
    ),
    (dict(delay_compensation=0.1), "ValueError", "delay_compensation is 0.1", "expected 0"),
    (dict(mode="async", delay_compensation=math.nan), "ValueError", "delay_compensation is nan"),
    (dict(replicas=2), "ValueError", "replicas is 2", "expected 0, 1 or None"),
    (dict(servers=[1], replicas=1), "ValueError", "replicas is 1, but there is 1 server"),
    (dict(average_weights=True), "ValueError", "make_optimizer"),
    (dict(make_optimizer=None), "TypeError", "make_optimizer is None"),
    (dict(parameters_or_module=[]), "ValueError", "no parameter"),
    (dict(parameters_or_module=torch.zeros(3)), "TypeError", "is a tensor, expected a module"),
    (
        dict(parameters_or_module=[torch.zeros(3, dtype=torch.float64)]),
        "TypeError",
        "torch.float64",
        "float32 copies",
    ),
    (
        dict(parameters_or_module=nn.Linear(2, 2).requires_grad_(False)),
        "ValueError",
        "requires a gradient",
    ),
    (
        dict(make_optimizer=lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)),
        "ValueError",
        "not the 1 given to it",
    ),
    (dict(make_optimizer=len), "TypeError", "of type int"),
]


def make(**changes: Any) -> ParameterServer:
    options = {
        "parameters_or_module": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))],
        "make_optimizer": OPTIMIZERS["sum"],
    }
    return ParameterServer(**(options | changes))


@on_ranks(2, timeout_s=180)
def test_bad_option_raises_on_all_ranks(rank: Rank) -> None:
    init(rank)
    for changes, kind, *facts in BAD_OPTIONS:
        error = error_of(make, **changes)
        check_error(error, kind, *facts)
        assert error[1].startswith("rota.ParameterServer"), error
        make().close()  # nothing is left behind


@on_ranks(2)
def test_bad_option_on_one_rank_is_named_on_the_others(rank: Rank) -> None:
    init(rank)
    error = error_of(make, **({"mode": "stale", "staleness": -1} if rank.rank == 0 else {}))
    make().close()
    if rank.rank == 0:
        check_error(error, "ValueError", "staleness is -1")
    else:
        check_error(error, "TransportError", "rank 0 failed: ", "staleness is -1")


@on_ranks(2)
def test_shards_are_refused(rank: Rank) -> None:
    init(rank)
    error = error_of(make, parameters_or_module=fully_shard(nn.Linear(2, 2)))
    check_error(error, "TypeError", "weight is a DTensor")


def test_frozen_parameters_of_a_list_are_left_out() -> None:
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    assert named_parameters(layer.parameters()) == {"parameter 1": layer.bias}


@on_ranks(3)
def test_ranks_that_disagree_raise_mismatch_with_both_sides(rank: Rank) -> None:
    init(rank)
    stale = {"mode": "stale", "staleness": 1}
    of_longer = {"parameters_or_module": [nn.Parameter(torch.ones(4))]}
    cases: list[tuple[Any, Any, str, str]] = [
        ({"mode": "async"}, {}, "mode", "rank 0 has async; rank 1, 2 has sync"),
        (stale | {"staleness": 2}, stale, "staleness", "rank 0 has 2; rank 1, 2 has 1"),
        ({"servers": [1]}, {}, "servers", "rank 0 has [1]; rank 1, 2 has [0, 1, 2]"),
        ({"wire_dtype": torch.float16}, {}, "wire_dtype", "torch.float16"),
        (
            of_longer,
            {},
            "the parameters",
            "rank 0 has [4] torch.float32; rank 1, 2 has [3] torch.float32",
        ),
    ]
    for of_first, of_others, key, sides in cases:
        error = error_of(make, **(of_first if rank.rank == 0 else of_others))
        check_error(error, "Mismatch", f"disagree on {key}", sides)


@on_ranks(2)
def test_bad_push_names_both_sides_and_moves_nothing(rank: Rank) -> None:
    init(rank)
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 4))]
    server = ParameterServer(parameters, OPTIMIZERS["sum"])
    first, second = good = [torch.ones(3), torch.ones(2, 4)]
    for bad, kind, *facts in (
        ([first], "ValueError", "1 tensors, expected 2"),
        ([first, torch.ones(4, 2)], "ValueError", "parameter 1", "[4, 2]", "[2, 4]"),
        ([first, second.double()], "TypeError", "torch.float64", "torch.float32"),
        ([first.to_sparse(), second], "TypeError", "torch.sparse_coo"),
        ([1.0, second], "TypeError", "float"),
    ):
        check_error(error_of(server.push, bad), kind, *facts)
    assert server.clock == 0
    server.step(good)
    assert all((parameter == 0).all() for parameter in parameters)
    server.close()
    server.close()
    for call in (server.push, server.pull, server.serve):
        check_error(error_of(call), "RotaError", "closed")


@on_ranks(2)
def test_calls_of_the_other_kind_of_rank_are_refused(rank: Rank) -> None:
    init(rank)
    server = make(servers=[1])
    if rank.rank == 0:
        check_error(error_of(server.serve), "RuntimeError", "rank 0 works")
        check_error(error_of(lambda: server.delays), "RuntimeError", "expected one of [1]")
    else:
        for call in (server.push, server.pull, server.flush):
            fact = "only serves, expected one of the workers [0]"
            check_error(error_of(call), "RuntimeError", fact)
        server.serve()
    server.close()


@on_ranks(2)
def test_rank_outside_the_group_and_rank_that_does_not_come(rank: Rank) -> None:
    init(rank)
    group = dist.new_group([1])
    if rank.rank == 0:
        check_error(error_of(make, group=group), "ValueError", "not in the group")
    else:
        check_error(error_of(make, timeout=timedelta(seconds=0.3)), "Timeout", "for rank 0")


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        make()
