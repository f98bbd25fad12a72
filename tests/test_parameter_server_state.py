"""ParameterServer saves its whole state on a worker, and goes on from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import make_model
from parameter_servers import OPTIMIZERS, backward, flat, init
from ranks import Rank, check_error, error_of, kill_self, on_ranks, run_ranks
from rota.parameter_server import ParameterServer
from rota.parameter_server.shard import ServerShard

pytestmark = pytest.mark.same_in_every_build

STOP_AT, NUM_STEPS = 3, 6
SERVED = "served"


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Groups with options of their own, in another order than the parameters."""
    biases = [p for p in parameters if p.dim() < 2]
    weights = [p for p in parameters if p.dim() >= 2]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def decay(update: int) -> float:
    return 1 / (1 + update)


def train(rank: Rank, servers: list[int] | None, start: int, path: str, case: str) -> Any:
    """Trains on from a state that was saved after `start` steps, and saves one at STOP_AT."""
    init(rank)
    model, options = make_model(), CASES[case][0]
    server = ParameterServer(model, servers=servers, **options)
    worker = server.workers.index(rank.rank) if server.is_worker else 0
    own_path = f"{path}-{worker if options.get('error_feedback') else 0}"
    if start > 0:
        server.load_state_dict(torch.load(own_path))
    if not server.is_worker:
        server.serve()
        return SERVED
    for step in range(start, NUM_STEPS):
        backward(model, worker, step)
        if options.get("average_weights"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        server.step()
        if step + 1 == STOP_AT:
            saved = server.state_dict()
            assert saved["num_updates"] == STOP_AT
            if worker == 0 or options.get("error_feedback"):
                torch.save(saved, own_path)
    server.close()
    return flat(model.parameters()).tolist()


EVERY, ONE, TWO = (2, None), (3, [1]), (4, [0, 3])
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, list[int] | None]]]] = {
    "momentum": (
        {"make_optimizer": OPTIMIZERS["momentum"], "lr_lambda": decay},
        [EVERY, EVERY, ONE],
    ),
    "adamw": ({"make_optimizer": OPTIMIZERS["adamw"]}, [ONE, TWO]),
    "grouped": ({"make_optimizer": grouped}, [TWO, EVERY]),
    "weights": ({"make_optimizer": None, "average_weights": True}, [EVERY, ONE]),
    "feedback": (
        {
            "make_optimizer": OPTIMIZERS["momentum"],
            "wire_dtype": torch.bfloat16,
            "error_feedback": True,
        },
        [EVERY, TWO],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_with_its_bits_on_any_number_of_servers(case: str, tmp_path: Path) -> None:
    _, layouts = CASES[case]
    results = [
        run_ranks(world_size, train, servers, STOP_AT * (i > 0), str(tmp_path / "state"), case)
        for i, (world_size, servers) in enumerate(layouts)
    ]
    trained = [[result for result in of_ranks if result != SERVED] for of_ranks in results]
    assert trained == [[trained[0][0]] * 2] * len(layouts)


# ---- servers that die

SERVERS, WORKERS = [0, 2], [1, 3]


@pytest.mark.parametrize("dies_in", ["_step", "_save"])
@on_ranks(4, killed=[0])
def test_replica_goes_on_from_the_state_that_was_loaded(rank: Rank, dies_in: str) -> None:
    """The first server of a state that was loaded dies, before it has made an update of its own or
    when a worker asks for its save."""
    init(rank)

    def make() -> tuple[list[nn.Parameter], ParameterServer]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (7, 50)]
        return parameters, ParameterServer(parameters, OPTIMIZERS["momentum"], servers=SERVERS)

    def push(server: ParameterServer, steps: range) -> None:
        for step in steps:
            server.step([torch.full((size,), step + rank.rank / 4) for size in (7, 50)])

    saved: list[Any] = [None]
    parameters, server = make()
    if server.is_worker:
        push(server, range(3))
        saved[0] = server.state_dict()
        push(server, range(3, 6))
        expected = flat(parameters)
        server.close()
    else:
        server.serve()
    dist.broadcast_object_list(saved, WORKERS[0])
    parameters, server = make()
    server.load_state_dict(saved[0])
    if rank.rank == SERVERS[0]:
        setattr(ServerShard, dies_in, lambda *_: kill_self())
    if not server.is_worker:
        return server.serve()
    if dies_in == "_save":
        assert torch.equal(flat(server.state_dict()["parameters"].values()), flat(parameters))
    push(server, range(3, 6))
    assert torch.equal(flat(parameters), expected)
    assert server.state_dict()["num_updates"] == 6
    server.close()


# ---- what is refused


def make(**options: Any) -> tuple[nn.Module, ParameterServer]:
    model = make_model()
    return model, ParameterServer(
        model, options.pop("make_optimizer", OPTIMIZERS["adamw"]), **options
    )


def bad_states(saved: Any) -> Iterator[tuple[Any, ...]]:
    """Each with the error, and what it says."""

    def edited(edit: Callable[[Any, Any, Any], object]) -> Any:
        state = copy.deepcopy(saved)
        edit(state, state["parameters"], state["optimizer"])
        return state

    def edit_each(kind: str, edit: Callable[[Any], object]) -> Any:
        return edited(lambda s, p, o: [edit(entry) for entry in o[kind].values()])

    yield [1], "TypeError", "state_dict is of type list"
    yield edited(lambda s, p, o: s.pop("optimizer")), "ValueError", "lacks ['optimizer']"
    yield edited(lambda s, p, o: s.update(num_updates=-1)), "ValueError", "num_updates is -1"
    renamed = edited(lambda s, p, o: p.update(bias=p.pop("0.bias")))
    yield renamed, "ValueError", "lacks ['0.bias'] and has ['bias']"
    short = edited(lambda s, p, o: p.update({"2.bias": torch.zeros(3)}))
    yield short, "ValueError", "2.bias has shape [3]", "[48]"
    half = edited(lambda s, p, o: p.update({"2.bias": torch.zeros(48).half()}))
    yield half, "TypeError", "2.bias is torch.float16"
    yield edited(lambda s, p, o: s.update(optimizer=None)), "ValueError", "without an optimizer"
    yield edited(lambda s, p, o: o.pop("state")), "ValueError", "lacks ['state']"
    without = edited(lambda s, p, o: o["state"].pop("4.bias"))
    yield without, "ValueError", "lacks ['4.bias'] and has []"
    of_sgd = edit_each("param_groups", lambda options: options.update(nesterov=False))
    yield of_sgd, "ValueError", "options ['nesterov']"
    without = edit_each("state", lambda of: of.pop("exp_avg"))
    yield without, "ValueError", "lacks ['exp_avg']"
    short = edit_each("state", lambda of: of.update(exp_avg=of["exp_avg"][:1]))
    yield short, "ValueError", "exp_avg of", "shape [1"


@on_ranks(2)
def test_state_of_something_else_is_refused_on_all_ranks_and_changes_nothing(rank: Rank) -> None:
    init(rank)
    model, server = make()
    backward(model, rank.rank, 0)
    server.step()
    saved = server.state_dict()
    expected = flat(model.parameters())
    check_error(error_of(server.load_state_dict, saved), "RuntimeError", "has pushed 1 times")
    server.close()
    model, server = make()
    before = flat(model.parameters())
    for state, kind, *facts in bad_states(saved):
        error = error_of(server.load_state_dict, state if rank.rank == 0 else saved)
        if rank.rank == 0:
            check_error(error, kind, *facts)
        else:
            check_error(error, "TransportError", "rank 0 failed: ", *facts)
    error = error_of(server.load_state_dict, {**saved, "num_updates": rank.rank})
    check_error(error, "Mismatch", "rank 0 has 0; rank 1 has 1")
    server.pull()
    assert torch.equal(flat(model.parameters()), before)
    server.load_state_dict(saved)  # nothing is left behind
    assert torch.equal(flat(model.parameters()), expected)
    server.close()


class Unsavable(torch.optim.SGD):
    """Its state has what cannot be pickled."""

    def step(self, closure: object = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["function"] = lambda: None


@on_ranks(2)
def test_what_cannot_be_saved_or_asked_for_is_an_error_of_the_caller(rank: Rank) -> None:
    init(rank)
    model, server = make(make_optimizer=lambda p: Unsavable(p, lr=0.1), servers=[1], mode="async")
    if not server.is_worker:
        check_error(error_of(server.state_dict), "RuntimeError", "rank 1 only serves")
        return server.serve()
    backward(model, 0, 0)
    server.step()
    facts = ("server rank 1 cannot save", "pickle")
    check_error(error_of(server.state_dict), "TransportError", *facts)
    check_error(error_of(server.load_state_dict, {}), "RuntimeError", "rank 1 is in serve()")
    server.step()  # the server goes on
    server.flush()
    server.close()
    check_error(error_of(server.state_dict), "RotaError")
