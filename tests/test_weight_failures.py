"""WeightStore while its publishers and readers are slow, stopped, killed and started again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from checkpoints import wait_until_ended
from heap import heap_bytes
from ranks import Rank, Ranks, error_of, kill_self, on_ranks
from rota.weights import WeightShard, WeightStore

pytestmark = pytest.mark.same_in_every_build

ELEMS = 1 << 19  # 2 MiB of float32 in each tensor
STRESS_S = 2.0


def weights_of(version: int, num_elems: int = ELEMS) -> dict[str, torch.Tensor]:
    return {name: torch.full((num_elems,), float(version)) for name in ("first", "last")}


def is_whole(version: int, weights: dict[str, torch.Tensor]) -> bool:
    return all(bool((tensor == version).all()) for tensor in weights.values())


# ---- fast publishers, slow readers ---------------------------------------------------------------


def publish_or_check(rank: Rank, num_publishers: int) -> Any:
    store = rank.make_store()
    if rank.rank < num_publishers:
        length = ELEMS // num_publishers
        shard = WeightShard((ELEMS,), (rank.rank * length,), (length,))
        shards = {"first": shard, "last": shard}
        place = {"rank": rank.rank, "num_publishers": num_publishers}
        publisher = WeightStore(store, shards=shards, **place)
        version = 0
        while not store.check(["end"]):
            version += 1
            try:
                publisher.publish(version, weights_of(version, length))
            except rota.PeerFailed:  # the others have seen the end before
                break
        return version
    reader = WeightStore(store)
    versions = []
    num_overwritten = 0
    deadline = time.monotonic() + STRESS_S
    copy = reader._reader._copy

    def counting_copy(*args: Any) -> Any:
        nonlocal num_overwritten
        results = copy(*args)
        num_overwritten += results is None
        return results

    reader._reader._copy = counting_copy
    while time.monotonic() < deadline:
        version, weights = reader.pull(at_least=versions[-1] + 1 if versions else 0)
        assert is_whole(version, weights), (version, [x.unique() for x in weights.values()])
        versions.append(version)
    store.set("end", "")
    return versions, num_overwritten


@pytest.mark.parametrize("num_publishers", [1, 2])
def test_fast_publishers_never_give_a_reader_parts_of_two_versions(num_publishers: int) -> None:
    with Ranks(num_publishers + 1, publish_or_check, num_publishers) as ranks:
        *_, (versions, num_overwritten) = ranks.results()
    assert len(versions) > 10 and versions == sorted(set(versions))
    # Otherwise this has not tested what it is about.
    assert num_overwritten > 0


def publish_beside_readers(rank: Rank) -> Any:
    store = rank.make_store()
    if rank.rank == 0:
        publisher = WeightStore(store, rank=0, timeout=timedelta(seconds=2))
        for version in range(1, 4):
            publisher.publish(version, weights_of(version))
        rank.tell()
        rank.hear()
        for version in range(4, 20):
            publisher.publish(version, weights_of(version))
        rank.tell()
        return rank.hear()
    reader = WeightStore(store)
    reader.pull()
    rank.tell()
    if rank.rank == 1:
        while True:
            reader.pull()
            reader._reader._results.clear()  # copies again
    rank.hear()
    version, weights = reader.pull(at_least=19)
    assert is_whole(version, weights)
    rank.tell()
    return None


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_killed_or_stopped_reader_changes_nothing_for_others(signum: signal.Signals) -> None:
    with Ranks(3, publish_beside_readers) as ranks:
        ranks.hear_all()
        ranks.kill(1, signum)
        ranks.tell(0)
        ranks.hear(0)
        ranks.tell(2)
        ranks.hear(2)
        ranks.tell(0)
        if signum == signal.SIGSTOP:
            ranks.kill(1)
        ranks.results(killed={1})


# ---- publishers that end -------------------------------------------------------------------------


def await_death_of_publisher(rank: Rank) -> int:
    """Tells rank 0, which publishes, that this reader is ready; its pid when it has ended."""
    pid = rank.pid_of(0)
    rank.say()
    wait_until_ended(pid)
    return pid


@pytest.mark.parametrize("is_publishing", [False, True], ids=["idle", "publishing"])
@on_ranks(2, killed=[0])
def test_killed_publisher_leaves_the_last_whole_version(rank: Rank, is_publishing: bool) -> None:
    store = rank.make_store()
    if rank.rank == 0:
        publisher = WeightStore(store, rank=0)
        for version in itertools.count(1):
            publisher.publish(version, weights_of(version))
            if version == 5:
                rank.await_word()
                if not is_publishing:
                    kill_self()
                threading.Timer(0.02, kill_self).start()
    reader = WeightStore(store)
    reader.pull(at_least=5)
    pid = await_death_of_publisher(rank)
    reader._reader._results.clear()
    version, weights = reader.pull()
    assert is_whole(version, weights)
    assert version >= 5 if is_publishing else version == 5
    who = rf"publisher 0/1 of 'weights' \(pid {pid}\)"
    start = time.monotonic()
    with pytest.raises(rota.PeerFailed, match=rf"{who} has ended .* awaited for number"):
        reader.pull(at_least=version + 1)
    with pytest.raises(rota.TransportError, match="cannot connect to publisher 0/1 of 'weights'"):
        WeightStore(store).pull()
    assert time.monotonic() - start < 1
    assert reader.pull()[0] == version


@on_ranks(2, killed=[0])
def test_last_version_outlives_a_store_in_the_publishers_process(rank: Rank) -> None:
    meeting = rank.make_store()
    if rank.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(server.port))
        publisher = WeightStore(server, rank=0)
        publisher.publish(3, weights_of(3))
        rank.await_word()
        kill_self()
    port = int(meeting.get("port"))
    reader = WeightStore(dist.TCPStore("127.0.0.1", port, is_master=False))
    reader.pull()
    await_death_of_publisher(rank)
    version, weights = reader.pull()
    assert version == 3 and is_whole(version, weights)
    with pytest.raises(rota.PeerFailed, match="publisher 0/1"):
        reader.pull(at_least=4)


@on_ranks(3, killed=[0])
def test_publisher_that_starts_again_takes_over(rank: Rank) -> None:
    store = rank.make_store()
    if rank.rank == 2:
        reader = WeightStore(store)
        assert reader.pull()[0] == 10
        await_death_of_publisher(rank)
        assert reader.pull()[0] == 10
        rank.say("the next")
        # Notices the new publisher without being told.
        version, weights = reader.pull()
        while version == 10:
            time.sleep(0.01)
            version, weights = reader.pull()
        assert version == 7 and is_whole(7, weights)
        version, weights = reader.pull(at_least=8)
        assert version == 8 and is_whole(8, weights)
        return rank.say("end")
    if rank.rank == 1:
        rank.await_word("the next")
    publisher = WeightStore(store, rank=0)
    if rank.rank == 0:
        publisher.publish(10, weights_of(10))
        rank.await_word()
        kill_self()
    publisher.publish(7, weights_of(7))  # back to a checkpoint
    time.sleep(0.1)
    publisher.publish(8, weights_of(8))
    rank.await_word("end")


TRAINER = """
import sys, torch, torch.distributed as dist, rota
def main():
    store = dist.FileStore(sys.argv[1])
    trainer = rota.weights.WeightStore(store, rank=0)
    trainer.publish(3, {"w": torch.full((1000,), 3.0)})
    print("published", flush=True)
    sys.stdin.read()
main()
"""


def test_last_version_outlives_the_interpreter_of_its_publisher(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    command = [sys.executable, "-c", TRAINER, path]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    trainer.stdout.readline()
    reader = WeightStore(dist.FileStore(path))
    reader.pull()
    reader._reader._results.clear()
    trainer.stdin.close()
    assert trainer.wait() == 0
    version, weights = reader.pull()
    assert version == 3 and weights["w"].sum() == 3000


def test_closed_publisher_leaves_its_version_to_its_readers(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"))
    first, reader = WeightStore(store, rank=0), WeightStore(store)
    first.publish(1, weights_of(1, 1 << 20))
    reader.pull()
    first.publish(2, weights_of(2, 1 << 20))
    first.close()
    kept_bytes = heap_bytes()
    assert is_whole(*reader.pull(at_least=2))
    second = WeightStore(store, rank=0)
    second.publish(3, weights_of(3, 100))
    assert is_whole(*reader.pull(at_least=3))
    while heap_bytes() > kept_bytes // 2:  # until it has noticed that nobody maps it any more
        time.sleep(0.001)


@on_ranks(4, killed=[1])
def test_publishers_that_start_again_together_go_on(rank: Rank) -> None:
    """Rank 1 is killed and rank 2 takes its place; rank 0 starts again in its own process."""
    store = rank.make_store()

    def start(publisher_rank: int) -> WeightStore:
        shard = WeightShard((2 * ELEMS,), (publisher_rank * ELEMS,), (ELEMS,))
        shards = {"first": shard, "last": shard}
        return WeightStore(store, rank=publisher_rank, num_publishers=2, shards=shards)

    if rank.rank == 3:
        reader = WeightStore(store)
        assert is_whole(*reader.pull(at_least=2))
        rank.say("pulled")
        rank.await_word("3 is not whole")
        version, weights = reader.pull()
        assert version == 2 and is_whole(version, weights)
        rank.say("start again")
        while version < 3:
            version, weights = reader.pull()
        assert version == 3 and is_whole(version, weights)
        return rank.say("end")
    if rank.rank == 2:
        rank.await_word("start again")
        publisher = start(1)
    else:
        publisher = start(rank.rank)
        for version in (1, 2):
            publisher.publish(version, weights_of(version))
        rank.await_word("pulled")
    if rank.rank == 1:
        kill_self()
    if rank.rank == 0:
        # Number 3 may begin, since all were done with 2, but is never whole.
        publisher.publish(3, weights_of(3))
        with pytest.raises(rota.PeerFailed, match=r"publisher 1/2 of 'weights' \(pid \d+\) has"):
            publisher.publish(4, weights_of(4))
        rank.say("3 is not whole")
        rank.await_word("start again")
        publisher.close()
        publisher = start(0)
    publisher.publish(3, weights_of(3))
    rank.await_word("end")


@on_ranks(2)
def test_ctrl_c_ends_a_wait(rank: Rank) -> None:
    store = rank.make_store()
    if rank.rank == 0:
        publisher = WeightStore(store, rank=0)
        publisher.publish(1, weights_of(1, 4))
        return rank.await_word("end")
    reader = WeightStore(store)
    reader.pull()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    assert error_of(reader.pull, at_least=2)[0] == "KeyboardInterrupt"
    assert time.monotonic() - start < 1.1
    rank.say("end")
