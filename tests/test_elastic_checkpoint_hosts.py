"""rota.checkpoint.Checkpoint on several hosts, made by ROTA_HOST_ID: replicas of lost hosts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist

import rota
from checkpoints import (
    ELEMS,
    load_step,
    open_checkpoint,
    save_steps,
    wait_until_ended,
)
from ranks import Rank, Ranks, check_error, error_of, on_ranks, run_ranks
from rota.checkpoint.replicas import replica_holders
from rota.checkpoint.session import RankClaim
from rota.engine import Engine
from test_elastic_checkpoint_failures import die_at

pytestmark = pytest.mark.same_in_every_build


def enter_host(rank: Rank, hosts: str) -> None:
    """hosts: a letter for each rank."""
    os.environ["ROTA_HOST_ID"] = hosts[rank.rank]


def claims_on(hosts: str) -> list[RankClaim]:
    return [RankClaim(rank, len(hosts), "load", {}, host=host) for rank, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "holders"),
    [
        ("aaa", {}),
        ("ab", {0: 1, 1: 0}),
        ("aabb", {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abab", {0: 1, 2: 3, 1: 0, 3: 2}),
        ("aaab", {0: 3, 1: 3, 2: 3, 3: 0}),
        ("abc", {0: 1, 1: 2, 2: 0}),
    ],
)
def test_replicas_lie_on_the_next_host(hosts: str, holders: dict[int, int]) -> None:
    assert replica_holders(claims_on(hosts)) == holders


def save(rank: Rank, job: str, hosts: str, num_steps: int) -> None:
    enter_host(rank, hosts)
    checkpoint = open_checkpoint(rank, job)
    save_steps(checkpoint, rank.rank, range(num_steps), ELEMS)
    rank.tell(checkpoint.keeper_pid)
    rank.hear()


def load(rank: Rank, job: str, hosts: str, close: bool = True) -> Any:
    enter_host(rank, hosts)
    checkpoint = open_checkpoint(rank, job)
    found = load_step(checkpoint, rank.rank)
    if found is not None:
        save_steps(checkpoint, rank.rank, range(found + 1, found + 4), ELEMS)
        assert load_step(checkpoint, rank.rank) == found + 3
    pid = checkpoint.keeper_pid
    checkpoint.close(keep=not close)
    return found, pid


def lose(ranks: Ranks, hosts: str, lost: str) -> None:
    """Kills all ranks, and the keepers of the lost hosts."""
    pids = dict(zip(hosts, ranks.hear_all(), strict=True))
    for rank in range(len(hosts)):
        ranks.kill(rank, joins=True)
    for host in lost:
        kill_keeper(pids[host])


def kill_keeper(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until_ended(pid)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abab", "aaab"])
def test_lost_host_gets_its_states_from_the_next_one(hosts: str) -> None:
    job = uuid4().hex
    for lost in "ab":
        with Ranks(len(hosts), save, job, hosts, 3) as ranks:
            lose(ranks, hosts, lost)
        # Twice: what has come from the other host and was saved since is kept here as well.
        results = run_ranks(len(hosts), load, job, hosts, False)
        assert [step for step, _ in results] == [2] * len(hosts)
        kill_keeper(results[hosts.index("ab".replace(lost, ""))][1])
        assert [step for step, _ in run_ranks(len(hosts), load, job, hosts)] == [5] * len(hosts)


def test_ranks_that_start_again_on_other_hosts_get_their_states(job: str) -> None:
    with Ranks(3, save, job, "abc", 2) as ranks:
        lose(ranks, "abc", "c")
    assert [step for step, _ in run_ranks(3, load, job, "bca")] == [1] * 3


def save_and_look(rank: Rank, job: str, hosts: str) -> list[int]:
    enter_host(rank, hosts)
    checkpoint = open_checkpoint(rank, job)
    checkpoint.load()
    save_steps(checkpoint, rank.rank, range(10, 14))
    owners = sorted(checkpoint._holdings.identities())
    checkpoint.load()  # all have looked
    checkpoint.close()
    return owners


def test_what_is_left_of_ranks_that_have_moved_is_freed(job: str) -> None:
    with Ranks(4, save, job, "abcd", 2) as ranks:
        lose(ranks, "abcd", "")
    # Each host has the state of its rank and of the rank of the host before.
    assert run_ranks(4, save_and_look, job, "badc") == [[0, 3], [0, 1], [1, 2], [2, 3]]


def test_two_lost_hosts_of_two_leave_nothing(job: str) -> None:
    with Ranks(2, save, job, "ab", 2) as ranks:
        lose(ranks, "ab", "ab")
    assert [step for step, _ in run_ranks(2, load, job, "ab")] == [None] * 2


@on_ranks(2)
def test_rank_with_nothing_to_load_stays_until_all_have_connected(rank: Rank, job: str) -> None:
    """Rank 1 takes long to connect its engine."""
    enter_host(rank, "ab")
    checkpoint, store = open_checkpoint(rank, job), rank.make_store()
    choose = checkpoint._choose_engine

    def choose_slow(*args: int) -> Engine:
        engine = choose(*args)

        def connect(of_engine: dist.Store) -> Any:
            result = engine.connect(of_engine)
            time.sleep(0.3)
            store.set("connected", str(time.monotonic()))
            return result

        return engine._replace(connect=connect)

    if rank.rank == 1:
        checkpoint._choose_engine = choose_slow
    assert checkpoint.load() is None
    returned = time.monotonic()
    checkpoint.close()
    assert returned > float(store.get("connected"))


def save_until_dead(rank: Rank, job: str, stage: int) -> None:
    """Rank 0 and its keeper end at a stage of the third save, which also sends to host b."""
    enter_host(rank, "ab")
    checkpoint = open_checkpoint(rank, job)
    save_steps(checkpoint, rank.rank, range(2), ELEMS)
    rank.tell(checkpoint.keeper_pid)
    rank.hear()
    if rank.rank == 0:
        die_at(stage)
    save_steps(checkpoint, rank.rank, range(2, 100), ELEMS)


# The next host's stages count as well: the head of its replica is cleared here, too.
@pytest.mark.parametrize("stage", range(9))
def test_host_lost_at_any_stage_leaves_a_whole_version_on_the_next(stage: int, job: str) -> None:
    with Ranks(2, save_until_dead, job, stage) as ranks:
        pid, _ = ranks.hear_all()
        ranks.tell_all()
        ranks._processes[0].join()
        kill_keeper(pid)
        if stage == 0:
            with pytest.raises(
                AssertionError, match=r"PeerFailed: .* rank 0/2 \(pid \d+\) on anoth"
            ):
                ranks.results(killed={0})
    steps = [step for step, _ in run_ranks(2, load, job, "ab")]
    assert steps[0] == steps[1] and steps[0] >= 1


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("backend", ["gloo", "rota"])
@on_ranks(2)
def test_engine_may_be_any_group(rank: Rank, job: str, backend: str, replicate: bool) -> None:
    rank.init(backend)
    enter_host(rank, "ab")
    options = {"engine": dist.group.WORLD, "replicate": replicate}
    with rota.checkpoint.Checkpoint(dist.group.WORLD, job=job, **options) as checkpoint:
        assert checkpoint.load() is None
        save_steps(checkpoint, rank.rank, range(3))
        assert load_step(checkpoint, rank.rank) == 2
        assert len(checkpoint._holdings.identities()) == (2 if replicate else 1)
        # All have failed, and each raises its own error, not that its replica is missing.
        check_error(error_of(checkpoint.save, 2, {}), "ValueError", "steps must grow")
        dist.barrier()
