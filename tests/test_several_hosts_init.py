"""Groups over several hosts that cannot be made: every rank gets an error, with the hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from hosts import Hosts
from ranks import Rank, check_error, error_of
from several_hosts import TWO_BY_TWO, default_group, on_layout

ODD_RANK = 3
HOSTS_OF_TWO_BY_TWO = "host 0 'host0' (ranks 0 1), host 1 'host1' (ranks 2 3)"


def group_for(device: str, rank: Rank) -> dist.ProcessGroup:
    group = dist.ProcessGroup(rank.make_store(), rank.rank, rank.world_size)
    backend = default_group()._get_backend(torch.device("cpu"))
    group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


ODD_OPTIONS: dict[str, tuple[Callable[[Rank], dict[str, Any]], str, list[str]]] = {
    "engine-size": (
        lambda rank: {"engine": dist.new_group([2, 3])},  # ranks 0 and 1 are no members
        "ValueError",
        ["rank 3 on host 1", "a group of 2 ranks", "expected 4 ranks and rank 3", "pass a group"],
    ),
    "engine-device": (
        lambda rank: {"engine": group_for("xpu", rank)},
        "ValueError",
        ["rank 3 on host 1", "a group for xpu", "expected one for the CPU or CUDA", "cuda:nccl"],
    ),
    "engine-for-cuda-of-one-rank": (
        lambda rank: {"engine": group_for("cuda", rank)},
        "Mismatch",
        [
            "engine=None",
            "rank 3 on host 1 has engine=a group of yours for CUDA tensors",
            "the same",
        ],
    ),
    "engine-of-one-rank": (
        lambda rank: {"engine": default_group()},
        "Mismatch",
        ["rank 0 on host 0 has engine=None", "rank 3 on host 1 has engine=a group", "the same"],
    ),
    "inter_wire_dtype": (
        lambda rank: {"inter_wire_dtype": torch.float16},
        "Mismatch",
        ["rank 0 on host 0 has", "inter_wire_dtype=None", "inter_wire_dtype=float16", "the same"],
    ),
    "inter_block_scaling": (
        lambda rank: {"inter_wire_dtype": torch.float16, "inter_block_scaling": True},
        "Mismatch",
        ["inter_wire_dtype=None", "inter_wire_dtype=float16 in scaled blocks", "the same"],
    ),
    "slot_bytes": (
        lambda rank: {"slot_bytes": 8192},
        "TransportError",
        ["slots of", "8192", "rank 3", "give every rank the same slot_bytes"],
    ),
}


@pytest.mark.parametrize("name", ODD_OPTIONS)
@on_layout(TWO_BY_TWO, timeout_s=25)
def test_options_of_one_rank_are_an_error_on_every_rank(rank: Rank, name: str) -> None:
    rank.init("gloo")
    make_options, kind, facts = ODD_OPTIONS[name]
    options = make_options(rank)  # which may make groups, on all ranks
    error = error_of(lambda: rota.Communicator(**(options if rank.rank == ODD_RANK else {})))
    check_error(error, kind, *facts)
    if name != "slot_bytes":  # which is found before the hosts are
        assert f"rank {rank.rank} of 4 ranks sees {HOSTS_OF_TWO_BY_TWO}" in error[1], error
    rota.Communicator().all_reduce(total := torch.ones(3))
    assert total[0].item() == 4, "the next group of these ranks"


@on_layout(TWO_BY_TWO, timeout_s=25)
def test_options_of_one_rank_fail_init_process_group_on_every_rank(rank: Rank) -> None:
    options = None
    if rank.rank == ODD_RANK:
        options = rota.BackendOptions(inter_wire_dtype=torch.bfloat16)
    error = error_of(lambda: rank.init(pg_options=options))
    check_error(error, "Mismatch", "inter_wire_dtype=bfloat16", HOSTS_OF_TWO_BY_TWO)


@on_layout(TWO_BY_TWO)
def test_dtype_that_nothing_carries_is_refused_at_once(rank: Rank) -> None:
    rank.init("gloo")
    errors = [
        error_of(make, inter_wire_dtype=dtype)
        for dtype in (torch.int8, torch.bool, torch.complex64, torch.float64)
        for make in (rota.Communicator, rota.BackendOptions, rota.HookState)
    ]
    scaled = {"inter_wire_dtype": torch.bfloat16, "inter_block_scaling": True}
    errors.append(error_of(rota.Communicator, **scaled))
    for error, text in errors:
        assert error in ("TypeError", "ValueError"), text
        assert "wire_dtype" in text or "block_scaling" in text, text
        assert "expected" in text or "is for" in text, text


def use_names(rank: Rank, names: list[str]) -> tuple[str, str]:
    os.environ["ROTA_HOST_ID"] = names[rank.rank]
    rank.init("gloo")
    return error_of(lambda: rota.Communicator(timeout=timedelta(seconds=10)))


@pytest.mark.parametrize("names", [["same"] * 3, ["other", "same", "same"]], ids="-".join)
def test_machines_with_one_name_are_an_error_on_every_rank(names: list[str]) -> None:
    with Hosts((1, 1, 1)) as hosts:
        results = hosts.run(use_names, names, timeout_s=40)
    seen = "sees host 0 'other' (ranks 0), host 1 'same' (ranks 1 2)" if "other" in names else ""
    for error in results:
        check_error(error, "TransportError", "do two machines have the same ROTA_HOST_ID", seen)


@on_layout(TWO_BY_TWO, timeout_s=25)
def test_rank_that_does_not_come_is_named(rank: Rank) -> None:
    rank.init("gloo")
    if rank.rank == ODD_RANK:
        for other in range(3):
            rank.await_word(f"rank {other} has waited")
        return
    error = error_of(lambda: rota.Communicator(timeout=timedelta(seconds=1)))
    dist.barrier(dist.new_group([0, 1, 2], use_local_synchronization=True))
    rank.say(f"rank {rank.rank} has waited")
    check_error(error, "TransportError", "still waits for rank 3")
