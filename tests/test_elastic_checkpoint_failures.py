"""rota.checkpoint.Checkpoint while its ranks and its keeper are killed, and start again."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist

import rota
from checkpoints import (
    ELEMS,
    alone,
    load_and_check,
    load_step,
    open_checkpoint,
    save_steps,
    state_of,
    wait_until_ended,
)
from programs import run_python
from ranks import Rank, Ranks, check_error, error_of, kill_self, on_ranks, run_ranks
from rota import _C
from rota.checkpoint.link import KeeperLink
from rota.checkpoint.session import RankClaim, Session, Sessions
from rota.checkpoint.version import Memory

pytestmark = pytest.mark.same_in_every_build

# Whatever a save() does that others can see; a rank that is killed dies before one of these.
STAGES: list[tuple[object, str]] = [
    (_C, "copy_with_checksum"),
    (Memory, "clear_head"),
    (Memory, "write_head"),
    (Memory, "reserve"),
    (KeeperLink, "keep"),
    (Session, "publish"),
]
NUM_ROUNDS = 6


def die_at(number: int) -> None:
    """Lets this process kill itself before the stage with this number that it comes to."""
    left = number

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                kill_self()
            left -= 1
            return function(*args, **kwargs)

        return run

    for owner, name in STAGES:
        setattr(owner, name, dying(getattr(owner, name)))


def save_for_ever(
    rank: Rank, job: str, dying: list[int], stage: int, num_before: int, loads: bool
) -> None:
    checkpoint = open_checkpoint(rank, job)
    save_steps(checkpoint, rank.rank, range(num_before), ELEMS)
    if loads:
        checkpoint.close(keep=True)
        checkpoint = open_checkpoint(rank, job)
        assert checkpoint.load() is not None
    if rank.rank in dying:
        die_at(stage)
    for step in range(num_before, 10**6):
        with contextlib.suppress(rota.PeerFailed):
            checkpoint.save(step, state_of(rank.rank, step))
            continue
        rank.tell(checkpoint.keeper_pid)
        rank.hear()


# Six stages in a save that uses memory again, which has two buckets; eight in one that reserves it.
@pytest.mark.parametrize("stage", range(8))
@pytest.mark.parametrize(
    ("num_before", "loads"),
    [(0, False), (3, False), (3, True), (4, True)],
    ids=["first", "fourth", "after-load", "after-load-in-other-slot"],
)
@pytest.mark.parametrize("dying", [[0], [0, 1]], ids=["one", "all"])
def test_killed_at_any_stage_of_a_save_leaves_a_whole_version(
    dying: list[int], num_before: int, loads: bool, stage: int, job: str
) -> None:
    with Ranks(2, save_for_ever, job, dying, stage, num_before, loads) as ranks:
        for rank in dying:
            ranks._processes[rank].join()
        if 1 not in dying:
            ranks.hear(1)
    steps = run_ranks(2, load_and_check, job)
    assert steps[0] == steps[1]
    if num_before > 0:
        assert steps[0] is not None and steps[0] >= num_before - 1


def save_as_fast_as_it_goes(rank: Rank, job: str) -> None:
    checkpoint = open_checkpoint(rank, job)
    found = load_step(checkpoint, rank.rank)
    first = 0 if found is None else found + 1
    rank.tell(first)
    for step in itertools.count(first):
        checkpoint.save(step, state_of(rank.rank, step))
        rank.tell(step)


def test_all_ranks_killed_at_random_times_go_on_with_a_whole_version() -> None:
    job, generator = uuid4().hex, random.Random(1)
    saved = -1
    for _ in range(NUM_ROUNDS):
        with Ranks(2, save_as_fast_as_it_goes, job) as ranks:
            firsts = ranks.hear_all()
            assert firsts[0] == firsts[1] and firsts[0] >= saved
            for _ in range(generator.randrange(1, 4)):
                saved = min(ranks.hear(0), ranks.hear(1))
            time.sleep(generator.random() * 0.05)
    steps = run_ranks(2, load_and_check, job)
    assert steps[0] == steps[1] and steps[0] >= saved


@on_ranks(3, killed=[1], timeout_s=120)
def test_one_rank_starts_again_beside_one_that_lives_on(rank: Rank, job: str) -> None:
    """Ranks 0 and 1 save; rank 1 dies, and process 2 starts in its place."""
    store = rank.make_store()

    def start(number: int) -> rota.checkpoint.Checkpoint:
        return rota.checkpoint.Checkpoint(store, "checkpoint", number, 2, job=job)

    if rank.rank == 2:
        rank.await_word("rank 1 is dead")
        checkpoint = start(1)
    else:
        checkpoint = start(rank.rank)
        save_steps(checkpoint, rank.rank, range(5), ELEMS)
    if rank.rank == 1:
        rank.await_word("saved")
        kill_self()
    if rank.rank == 0:
        rank.say("saved")
        error = error_of(save_steps, checkpoint, 0, [5], ELEMS)
        check_error(error, "PeerFailed", "rank 1/2 (pid ", "has ended or closed")
        rank.say("rank 1 is dead")
    number = min(rank.rank, 1)
    assert load_step(checkpoint, number) == 4
    save_steps(checkpoint, number, range(5, 8), ELEMS)
    assert load_step(checkpoint, number) == 7
    checkpoint.close()


def test_rank_that_reports_and_goes_on_at_once_is_not_missed() -> None:
    store = dist.HashStore()
    directories = [Sessions(store, "name") for _ in range(2)]
    claims = [RankClaim(rank, 2, "load", {}) for rank in range(2)]
    store_of = directories[1].store
    for directory, claim in zip(directories, claims, strict=True):
        directory.store.set(f"claim/{claim.rank}", claim.to_json())

    def left() -> list[int]:
        """Rank 1 does all this after rank 0 has looked for its step."""
        if not store_of.check(["gone"]):
            store_of.set("gone", "")
            sessions[1].run(lambda: None, math.inf)
            store_of.set("claim/1", RankClaim(1, 2, "load", {}).to_json())
        return [1]

    sessions = [
        Session(directory.store, claim, claims, left)
        for directory, claim in zip(directories, claims, strict=True)
    ]
    sessions[0].run(lambda: None, time.monotonic() + 60)


# ---- the keeper ----------------------------------------------------------------------------------


def save_and_wait(rank: Rank, job: str, linger_s: float, launcher: int | None = None) -> None:
    checkpoint = open_checkpoint(rank, job, linger=timedelta(seconds=linger_s), launcher=launcher)
    save_steps(checkpoint, rank.rank, range(2))
    rank.tell(checkpoint.keeper_pid)
    rank.hear()
    checkpoint.close()


@pytest.mark.parametrize("ends", ["killed", "closed"])
def test_keeper_ends_when_all_ranks_have_ended(ends: str, job: str) -> None:
    with Ranks(2, save_and_wait, job, 0.1 if ends == "killed" else 600) as ranks:
        pid, same_pid = ranks.hear_all()
        assert pid == same_pid
        if ends == "closed":
            ranks.tell_all()
            ranks.results()
    wait_until_ended(pid)


def test_keeper_stays_for_a_killed_rank_when_the_others_have_closed(job: str) -> None:
    with Ranks(2, save_and_wait, job, 600) as ranks:
        pid, _ = ranks.hear_all()
        ranks.kill(0, joins=True)
        ranks.tell(1)
        ranks.results(killed={0})
    assert run_ranks(2, load_and_check, job) == [1, 1]
    wait_until_ended(pid)


def test_keeper_stays_for_a_launcher_and_ends_after_it(job: str) -> None:
    launcher = subprocess.Popen(["sleep", "1000"])
    try:
        with Ranks(2, save_and_wait, job, 0.0, launcher.pid) as ranks:
            pid, _ = ranks.hear_all()
        assert run_ranks(2, load_and_check, job, False) == [1, 1]
        launcher.kill()
        launcher.wait()
        # load_and_check's ranks have said that it may wait longer.
        with Ranks(2, save_and_wait, job, 0.0) as again:
            assert again.hear_all() == [pid, pid]
        wait_until_ended(pid)
    finally:
        launcher.kill()
        launcher.wait()


def kill_the_keeper(rank: Rank, job: str) -> None:
    checkpoint = open_checkpoint(rank, job)
    save_steps(checkpoint, rank.rank, range(2), ELEMS)
    rank.tell(checkpoint.keeper_pid)
    rank.hear()
    save_steps(checkpoint, rank.rank, [2], ELEMS)
    assert load_step(checkpoint, rank.rank) == 2
    rank.tell(checkpoint.keeper_pid)
    rank.hear()


def test_killed_keeper_has_one_successor_with_all_versions(job: str) -> None:
    with Ranks(3, kill_the_keeper, job) as ranks:
        (pid,) = set(ranks.hear_all())
        os.kill(pid, signal.SIGKILL)
        wait_until_ended(pid)
        ranks.tell_all()
        assert len(set(ranks.hear_all())) == 1
    assert run_ranks(3, load_and_check, job) == [2] * 3


def leave_a_child(rank: Rank, job: str) -> None:
    checkpoint = open_checkpoint(rank, job)
    save_steps(checkpoint, rank.rank, range(2))
    # As a worker of a DataLoader, which has a copy of every descriptor.
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    rank.tell(child)
    rank.hear()


def test_child_that_outlives_its_rank_does_not_keep_the_rank_from_starting_again(job: str) -> None:
    children = []
    try:
        with Ranks(2, leave_a_child, job) as ranks:
            children = ranks.hear_all()
        assert run_ranks(2, load_and_check, job) == [1, 1]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_keeper_is_a_session_without_torch_and_leaves_nothing_in_dev_shm() -> None:
    """So neither Ctrl-C reaches it, nor what is sent to the ranks' process group or session."""
    before = set(os.listdir("/dev/shm"))
    with alone() as checkpoint:
        checkpoint.save(0, state_of(0, 0))
        assert os.getsid(checkpoint.keeper_pid) != os.getsid(0)
        assert os.getpgid(checkpoint.keeper_pid) != os.getpgid(0)
        maps = Path(f"/proc/{checkpoint.keeper_pid}/maps").read_text()
        assert "torch" not in maps and "memfd" not in maps
        assert {name for name in os.listdir("/dev/shm") if "rota" in name} <= before


def test_keeper_is_started_by_a_program_without_standard_streams() -> None:
    code = (
        "import os; [os.close(fd) for fd in range(3)]\n"
        "import rota, torch.distributed as dist\n"
        "with rota.checkpoint.Checkpoint(dist.HashStore(), rank=0, world_size=1) as checkpoint:\n"
        "    checkpoint.save(0, {'a': 1})\n"
        "    assert checkpoint.load() == (0, {'a': 1})\n"
    )
    run_python("-c", code)
