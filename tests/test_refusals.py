"""What one rank refuses in making something together is an error on all ranks, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rota
from ranks import Rank, check_error, error_of, on_ranks
from rota.local_sgd import DiLoCo, LocalSGD
from rota.parameter_server import ParameterServer
from rota.weights import WeightStore

# A group's timeout: a rank that waits so long is hung.
LONG_S = 300.0
BAD_SLOTS = "slot_bytes is 7"
WIRE = "inter_wire_dtype is "


def window(**options: Any) -> rota.Window:
    return rota.Window(4, **options)


def local_sgd(sync_every: Any = 2, device: str = "cpu", **options: Any) -> LocalSGD:
    return LocalSGD(nn.Linear(2, 2, device=device), sync_every, **options)


def diloco(make_optimizer: Any = None) -> DiLoCo:
    model = nn.Linear(2, 2)
    optimizer = (make_optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.7)))(
        model.parameters()
    )
    return DiLoCo(model, optimizer, 2)


def server(has_parameters: bool = True, **options: Any) -> ParameterServer:
    parameters: Any = [nn.Parameter(torch.ones(3))] if has_parameters else None
    return ParameterServer(parameters, lambda p: torch.optim.SGD(p, 1.0), **options)


def hook_state(**options: Any) -> rota.HookState:
    return rota.HookState(model_group=dist.group.WORLD, **options)


# What makes something of all ranks, a bad argument, and what the rank that passes it raises.
CASES: list[tuple[Callable[..., object], dict[str, Any], str, str]] = [
    (rota.Communicator, {"slot_bytes": 7}, "ValueError", BAD_SLOTS),
    (rota.Communicator, {"timeout": 5}, "TypeError", "timeout is 5"),
    (rota.Communicator, {"timeout": timedelta(0)}, "ValueError", "timeout is 0:00:00"),
    (rota.Communicator, {"inter_wire_dtype": torch.float64}, "TypeError", WIRE + "torch.float64"),
    (rota.Communicator, {"inter_wire_dtype": "x"}, "TypeError", WIRE + "'x'"),
    (rota.Communicator, {"inter_wire_dtype": torch.int8}, "TypeError", WIRE + "torch.int8"),
    (rota.Communicator, {"inter_block_scaling": "a"}, "TypeError", "inter_block_scaling is 'a'"),
    (rota.Communicator, {"engine": 3}, "TypeError", "engine is of type int"),
    (window, {"num_channels": 0}, "ValueError", "num_channels is 0"),
    (window, {"device": "tpu"}, "ValueError", "device is 'tpu'"),
    (window, {"device": "cuda"}, "Mismatch", "rank 1 asked for cuda"),
    (window, {"timeout": timedelta(-1)}, "ValueError", "timeout is -1 day"),
    (window, {"timeout": 1.5}, "TypeError", "timeout is 1.5"),
    (window, {"engine": "gloo"}, "Mismatch", "one of its own"),
    (local_sgd, {"sync_every": 0}, "ValueError", "sync_every is 0"),
    (local_sgd, {"state": 1}, "TypeError", "expected a HookState"),
    (local_sgd, {"fragment_update_alpha": "x"}, "TypeError", "LocalSGD: fragment_update_alpha is"),
    (local_sgd, {"device": "meta"}, "TypeError", "'weight' is on meta"),
    (diloco, {"make_optimizer": list}, "TypeError", "outer_optimizer is of type list"),
    (server, {"timeout": 3}, "TypeError", "timeout is 3"),
    (server, {"has_parameters": False}, "TypeError", "of type NoneType"),
    (server, {"delay_compensation": "a"}, "TypeError", "delay_compensation is 'a'"),
    (hook_state, {"inter_wire_dtype": torch.int8}, "TypeError", WIRE + "torch.int8"),
    (hook_state, {"replicas": 3}, "TypeError", "replicas is 3"),
    (hook_state, {"seed": -1}, "ValueError", "seed is -1"),
    (hook_state, {"model": 3}, "TypeError", "int"),
]


@on_ranks(3)
def test_bad_argument_of_one_rank_is_raised_by_all(rank: Rank) -> None:
    """Rank 1 passes a bad argument; then all pass what is right, and use what they get."""
    rank.init("gloo", timeout_s=LONG_S)
    for make, bad, kind, text in CASES:
        error = error_of(lambda: make(**(bad if rank.rank == 1 else {})))  # noqa: B023
        if rank.rank == 1:
            check_error(error, kind, text)
        else:
            of_peer = "Mismatch" if kind == "Mismatch" else "TransportError"
            check_error(error, of_peer, "rank 1", text)
        made = make()
        if isinstance(made, LocalSGD):
            made.step()
        elif isinstance(made, rota.Communicator):
            made.barrier()
        elif isinstance(made, ParameterServer):
            made.close()


@on_ranks(3)
def test_bad_options_of_one_rank_are_raised_by_all_in_its_group(rank: Rank) -> None:
    """Groups of the backend: the default one, over one store after the other, and a subgroup."""
    bad = rota.BackendOptions(slot_bytes=7)
    store = rank.make_store(LONG_S)

    def init(options: object) -> None:
        dist.init_process_group(
            "rota",
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=LONG_S),
            pg_options=options,
        )

    def use_subgroup(options: object) -> None:
        dist.barrier(dist.new_group(pg_options=options))

    def check_refusal(call: Callable[[object], None], wrong: object, kind: str, cause: str) -> None:
        error = error_of(lambda: call(wrong if rank.rank == 1 else None))
        if rank.rank == 1:
            check_error(error, kind)
        else:
            check_error(error, "TransportError", "rank 1 failed", cause)

    check_refusal(init, bad, "ValueError", BAD_SLOTS)
    gloos = dist.ProcessGroupGloo._Options()
    check_refusal(init, gloos, "TypeError", "expected rota.BackendOptions")
    init(None)
    check_refusal(use_subgroup, bad, "ValueError", BAD_SLOTS)
    use_subgroup(None)


PUBLISHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"wire_dtype": torch.int8}, "ValueError", "wire_dtype is torch.int8"),
    ({"rank": 3}, "ValueError", "rank and num_publishers follow from group"),
    ({"shards": 3}, "TypeError", "shards is of type int"),
]


@on_ranks(3)
def test_bad_argument_of_one_publisher_is_raised_by_all(rank: Rank) -> None:
    rank.init("gloo", timeout_s=LONG_S)
    store = rank.make_store(LONG_S)

    def publish(**options: Any) -> WeightStore:
        weights = WeightStore(store, group=dist.group.WORLD, **options)
        weights.publish(1, {f"of rank {rank.rank}": torch.ones(2)})
        return weights

    for bad, kind, cause in PUBLISHERS:
        error = error_of(lambda: publish(**(bad if rank.rank == 1 else {})))  # noqa: B023
        if rank.rank == 1:
            check_error(error, kind, cause)
        else:
            check_error(error, "TransportError", "publisher 1/3", cause)
        dist.barrier()
        made = publish()
        dist.barrier()
        made.close()
        dist.barrier()


@on_ranks(2)
def test_communicator_has_the_timeout_of_its_group(rank: Rank) -> None:
    """The group's timeout is not that of its store, which is the default group's."""
    rank.init("gloo", timeout_s=LONG_S)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    communicator = rota.Communicator(group)
    communicator.barrier()
    if rank.rank == 1:
        rank.await_word()
        return
    error = error_of(communicator.barrier)
    rank.say()
    check_error(error, "Timeout", "rank 1")


@on_ranks(2)
def test_ranks_meet_again_after_a_call_that_one_did_not_make(rank: Rank) -> None:
    """Rank 1's first call never counts; or comes too late, when the others do not wait any more."""
    rank.init("gloo", timeout_s=LONG_S)
    short = {"timeout": timedelta(seconds=0.5)}
    tries: dict[str, list[tuple[str, str]]] = {}
    for make in (rota.Communicator, window):
        for bad in ({"unknown": 1}, {"group": "x"}):
            own = tries.setdefault(f"{make.__name__} {bad}", [])
            for given in ({**short, **bad} if rank.rank == 1 else short, {}):
                own.append(error_of(lambda: make(**given)))  # noqa: B023
                dist.barrier()
        own = tries.setdefault(f"{make.__name__} late", [])
        if rank.rank == 1:
            rank.await_word(make.__name__)
            time.sleep(0.1)
        own.append(error_of(lambda: make(**short)))  # noqa: B023
        if rank.rank == 0:
            rank.say(make.__name__)
        dist.barrier()
        own.append(error_of(make))
    for case, (first, second) in tries.items():
        assert first[0] in ("Timeout", "TransportError", "TypeError"), (case, first)
        assert second[0] == "nothing", (case, second)
