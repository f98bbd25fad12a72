"""rota.checkpoint.Checkpoint with wrong arguments, damaged memory, and ranks that disagree."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import rota
from checkpoints import alone, load_step, open_checkpoint, save_and_leave, save_steps, state_of
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.checkpoint import keeper
from rota.checkpoint.link import KeeperLink
from rota.checkpoint.session import token_of
from test_interrupts import run_in_child

pytestmark = pytest.mark.same_in_every_build


# ---- arguments -----------------------------------------------------------------------------------


PLACE = {"rank": 0, "world_size": 1}


@pytest.mark.parametrize(
    ("store", "options", "kind", "text"),
    [
        ("no store", PLACE, TypeError, "expected a torch.distributed.Store or ProcessGroup"),
        (dist.HashStore(), {}, ValueError, "rank is None and world_size None"),
        (dist.HashStore(), {"rank": 2, "world_size": 2}, ValueError, "rank is 2 and world_size 2"),
        *(
            (dist.HashStore(), PLACE | bad, TypeError, rf"Checkpoint: {next(iter(bad))} is ")
            for bad in ({"linger": 3}, {"replicate": "x"}, {"job": 3})
        ),
        (
            dist.HashStore(),
            PLACE | {"timeout": timedelta(0)},
            ValueError,
            "Checkpoint: timeout is ",
        ),
    ],
)
def test_wrong_arguments_raise(
    store: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        rota.checkpoint.Checkpoint(store, **options)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": [torch.empty(2, device="meta")]}, r"state\['a'\]\[0\] is torch.strided on meta"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\] is torch.sparse_coo on cpu"),
        ({"a": lambda: None}, "the state cannot be pickled"),
    ],
    ids=["device", "sparse", "not-picklable"],
)
def test_state_that_cannot_be_saved_raises_and_changes_nothing(state: Any, text: str) -> None:
    with alone() as checkpoint:
        checkpoint.save(0, state_of(0, 0, 10))
        with pytest.raises(TypeError, match=text):
            checkpoint.save(1, state)
        assert load_step(checkpoint, 0) == 0


@pytest.mark.parametrize("step", [-1, 3, 2.5, "4"])
def test_step_that_does_not_grow_or_is_no_step_raises(step: Any) -> None:
    with alone() as checkpoint:
        checkpoint.save(3, state_of(0, 3, 10))
        with pytest.raises(ValueError, match=r"rota\.checkpoint\.Checkpoint\.save: step"):
            checkpoint.save(step, state_of(0, 4, 10))
        assert load_step(checkpoint, 0) == 3


def test_use_after_close_and_disk_without_a_version_raise() -> None:
    checkpoint = alone()
    with pytest.raises(ValueError, match="there is no version; save"):
        checkpoint.save_to_disk("nowhere")
    checkpoint.close()
    checkpoint.close()
    for call in (lambda: checkpoint.save(0, {}), checkpoint.load):
        with pytest.raises(rota.RotaError, match="it is closed; make a new one"):
            call()


@on_ranks(1)
def test_use_in_a_forked_child_raises(rank: Rank) -> None:
    with alone() as checkpoint:
        error = run_in_child(lambda: checkpoint.save(0, {}))
    check_error(error, "RotaError", "used in its forked child")


# ---- into ----------------------------------------------------------------------------------------

SAVED = {"w": torch.ones(2, 3), "b": torch.ones(3)}
# What rank 1 loads into, and what all ranks are told of it.
OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"w": torch.zeros(3, 2)},
        r"state\['w'\] is \(3, 2\) of float32 in `into`, but \(2, 3\) of fl",
    ),
    (
        {"w": torch.zeros(2, 3, dtype=torch.float64)},
        r"state\['w'\] is \(2, 3\) of float64 in `into`, but \(2, 3\) of float32",
    ),
    ({"w": None}, r"state\['w'\] is missing in `into`, but \(2, 3\)"),
    ({"c": torch.zeros(1)}, r"state\['c'\] is \(1,\) of float32 in `into`, but missing"),
]


@on_ranks(2, timeout_s=180)
def test_load_into_another_state_raises_and_writes_nothing(rank: Rank, job: str) -> None:
    with open_checkpoint(rank, job) as checkpoint:
        checkpoint.save(0, SAVED)
        for changes, pattern in OTHERS:
            fits = {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()}
            other = {name: x for name, x in (fits | changes).items() if x is not None}
            into = other if rank.rank == 1 else fits
            kind, text = error_of(checkpoint.load, into)
            assert kind == "Mismatch" and re.search(pattern, text), text
            assert rank.rank == 1 or "rank 1/2 (pid " in text
            assert all(not tensor.any() for tensor in into.values())
            assert checkpoint.load(fits) and fits["w"].equal(SAVED["w"])


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["tensor", "tail"])
@on_ranks(2)
def test_load_after_damage_takes_the_older_version(rank: Rank, job: str, part: str) -> None:
    with open_checkpoint(rank, job) as checkpoint:
        save_steps(checkpoint, rank.rank, range(3))
        version = checkpoint._newest
        if rank.rank == 1 and part == "tensor":
            version.tensors()[0].view(torch.uint8)[77] ^= 1
        elif rank.rank == 1:
            version.memory.bytes[version.num_bytes - 1] ^= 1
        if part == "tensor":
            fact = "state['model']['weight'] of rank 1 in step 2 does not match its checksum"
            check_error(error_of(checkpoint.load), "TransportError", fact)
        assert load_step(checkpoint, rank.rank) == 1


def test_memory_that_is_not_sealed_is_refused(job: str) -> None:
    store = dist.HashStore()
    link = KeeperLink(f"{job}/checkpoint", token_of(store), 0, 0.0, None, 30.0)
    link.connect()
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    link.keep(1, 0, fd)
    os.close(fd)
    with pytest.raises(rota.TransportError, match="holds memory that is not sealed"):
        rota.checkpoint.Checkpoint(store, rank=1, world_size=2, job=job)
    link.drop(1, 0)
    rota.checkpoint.Checkpoint(store, rank=1, world_size=2, job=job).close()
    link.finish()


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["before", "write"])
@on_ranks(2)
def test_too_little_memory_raises_and_the_last_version_stays(
    rank: Rank, how: str, job: str
) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with open_checkpoint(rank, job) as checkpoint:
        save_steps(checkpoint, rank.rank, range(2))
        if rank.rank == 0 and how == "before":
            _C.available_memory = lambda: 4096
        elif rank.rank == 0:
            os.pwrite = no_space
        error = error_of(save_steps, checkpoint, rank.rank, (2, 3), 10**6)
        facts = ["bytes of shared memory for a version", "rank 0/2 (pid "][: 1 + rank.rank]
        facts += ["nothing was saved, and the last version is still there"]
        check_error(error, "TransportError", *facts)
        assert load_step(checkpoint, rank.rank) == 1


# ---- ranks that disagree -------------------------------------------------------------------------


def test_second_process_of_a_rank_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.checkpoint.link.END_S", 0.1)
    job, store = uuid4().hex, dist.HashStore()
    with (
        rota.checkpoint.Checkpoint(store, rank=0, world_size=2, job=job),
        pytest.raises(rota.Mismatch, match=f"rank 0 is pid {os.getpid()}; give each process"),
    ):
        rota.checkpoint.Checkpoint(store, rank=0, world_size=2, job=job)


@pytest.mark.parametrize("rank", [0, 1])
def test_second_job_with_the_run_id_of_a_living_one(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr("rota.checkpoint.link.END_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", uuid4().hex)
    first = alone()
    text = f"another job on this host has the same name, of which rank 0 is pid {os.getpid()}: .*"
    with pytest.raises(rota.Mismatch, match=f"{text}--rdzv-id or by job="):
        rota.checkpoint.Checkpoint(dist.HashStore(), rank=rank, world_size=2)
    first.close()
    rota.checkpoint.Checkpoint(dist.HashStore(), rank=rank, world_size=2).close()


@on_ranks(2)
def test_two_processes_of_a_rank_on_two_hosts_are_named(rank: Rank, job: str) -> None:
    os.environ["ROTA_HOST_ID"] = f"host{rank.rank}"
    store = rank.make_store(timeout_s=60)
    checkpoint = rota.checkpoint.Checkpoint(store, rank=0, world_size=2, job=job)
    if rank.rank == 1:
        store.wait(["rota/checkpoint/checkpoint/claim/0"])
        checkpoint._timeout /= 60
        check_error(error_of(checkpoint.load), "Timeout", "waited in vain for rank 1")
    else:
        facts = ("there are two processes of rank 0: pid ", "on host host0", "on host host1")
        check_error(error_of(checkpoint.load), "Mismatch", *facts)
    checkpoint.close()


@on_ranks(2)
def test_ranks_that_disagree_are_named_with_what_each_said(rank: Rank) -> None:
    with open_checkpoint(rank, "sizes", world_size=2 + rank.rank) as checkpoint:
        error = error_of(checkpoint.load)
        check_error(error, "Mismatch", "rank 0/2 (pid ", "rank 1/3 (pid ")
    with open_checkpoint(rank, "calls") as checkpoint:
        error = error_of(checkpoint.load) if rank.rank == 0 else error_of(checkpoint.save, 0, {})
        check_error(error, "Mismatch", "'load'", "'save'")


@on_ranks(2)
def test_different_steps_are_an_error_and_nothing_is_kept(rank: Rank, job: str) -> None:
    def save(step: int) -> None:
        save_steps(checkpoint, rank.rank, [step], 10)

    def save_two(first: int, second: int) -> None:
        error = error_of(save, (first, second)[rank.rank])
        check_error(error, "Mismatch", f"step {first}", f"step {second}")

    with open_checkpoint(rank, job) as checkpoint:
        save_two(5, 6)
        assert checkpoint.load() is None
        save(5)
        save_two(7, 6)
        save(8)
        save_two(9, 10)
        assert load_step(checkpoint, rank.rank) == 8


def load_with_fewer(rank: Rank, job: str) -> None:
    with open_checkpoint(rank, job) as checkpoint:
        fact = "step 4 was saved by 3 ranks, this job has 2"
        check_error(error_of(checkpoint.load), "Mismatch", fact)
        save_steps(checkpoint, rank.rank, [0])
        assert load_step(checkpoint, rank.rank) == 0


def test_another_number_of_ranks_is_an_error_until_they_save(job: str) -> None:
    run_ranks(3, save_and_leave, job, [4])
    run_ranks(2, load_with_fewer, job)
    run_ranks(3, close_all, job)


def close_all(rank: Rank, job: str) -> None:
    open_checkpoint(rank, job).close()


def lose_one_state(rank: Rank, job: str) -> None:
    with open_checkpoint(rank, job) as checkpoint:
        if rank.rank == 1:
            for memory in checkpoint._holdings.slots(1).memories.values():
                memory.clear_head()
            rank.say()
        rank.await_word()
        text = r"no step that all ranks have.*rank 0 has \[4\]; rank 1 has none$"
        with pytest.warns(UserWarning, match=f"(?s){text}"):
            assert checkpoint.load() is None


def test_load_warns_if_only_some_ranks_have_a_version(job: str) -> None:
    run_ranks(2, save_and_leave, job, [4])
    run_ranks(2, lose_one_state, job)


# ---- the keeper ----------------------------------------------------------------------------------


def test_keeper_of_another_version_or_job(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    with alone(job=job) as checkpoint:
        monkeypatch.setattr(keeper, "PROTOCOL", 3)
        with pytest.raises(rota.Mismatch, match=r"speaks protocol 2, this rank 3; do all proc"):
            rota.checkpoint.Checkpoint(dist.HashStore(), rank=1, world_size=2, job=job)
        monkeypatch.undo()
        monkeypatch.setattr(KeeperLink, "name", checkpoint._link.name)
        with pytest.raises(rota.Mismatch, match=r"is that of job '.*', this rank belongs to 'oth"):
            rota.checkpoint.Checkpoint(dist.HashStore(), rank=1, world_size=2, job="other")


def test_keeper_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "peer_credentials", lambda connection: (4711, os.geteuid() + 1))
    with pytest.raises(rota.TransportError, match=r"started by pid 4711\) belongs to user"):
        alone()


def knock_as_another_user(rank: Rank, name: str) -> bytes:
    os.setuid(65534)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    try:
        connection.send(b'{"ask": "owners"}')
        return connection.recv(1000)
    except OSError:  # hung up
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_keeper_hangs_up_on_another_user() -> None:
    with alone() as checkpoint:
        assert run_ranks(1, knock_as_another_user, checkpoint._link.name) == [b""]
        checkpoint.save(0, {})


def test_keeper_survives_any_packet() -> None:
    half = b'{"ask": "join", "protocol": 2}'
    with alone() as checkpoint:
        checkpoint.save(0, {"a": 1})
        pid = checkpoint.keeper_pid
        for packet in (b"\xff", b"{}", b"[]", b'{"ask": "keep"}', half, b"{" * 70000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(f"\0{checkpoint._link.name}")
                connection.send(packet)
                answer = connection.recv(1000)
            assert answer == b"" or b'"error"' in answer, packet
            assert checkpoint.load() == (0, {"a": 1}) and checkpoint.keeper_pid == pid, packet
