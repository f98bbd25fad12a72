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
from checkpoints import is_state_of, open_checkpoint, state_of
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota import _C
from rota.checkpoint import keeper
from rota.checkpoint.link import KeeperLink
from rota.checkpoint.session import token_of

pytestmark = pytest.mark.same_in_every_build


def alone(**options: Any) -> rota.checkpoint.Checkpoint:
    return rota.checkpoint.Checkpoint(dist.HashStore(), rank=0, world_size=1, **options)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("no store", "n", 0, 1), TypeError, "expected a torch.distributed.Store or ProcessGroup"),
        ((dist.HashStore(), "n"), ValueError, "rank is None and world_size None"),
        ((dist.HashStore(), "n", 2, 2), ValueError, "rank is 2 and world_size 2"),
    ],
    ids=["store", "no-rank", "rank-too-great"],
)
def test_wrong_arguments_raise(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        rota.checkpoint.Checkpoint(*arguments)


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
        found = checkpoint.load()
        assert found is not None and is_state_of(0, *found)


@pytest.mark.parametrize("step", [-1, 3, 2.5, "4"])
def test_step_that_does_not_grow_or_is_no_step_raises(step: Any) -> None:
    with alone() as checkpoint:
        checkpoint.save(3, state_of(0, 3, 10))
        with pytest.raises(ValueError, match=r"rota\.checkpoint\.Checkpoint\.save: step"):
            checkpoint.save(step, state_of(0, 4, 10))
        found = checkpoint.load()
        assert found is not None and found[0] == 3


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
    checkpoint = alone()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(error_of(lambda: checkpoint.save(0, {}))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    kind, text = os.read(reader, 10_000).decode().split("\n")
    checkpoint.close()
    assert kind == "RotaError" and "used in its forked child" in text


# ---- into ----------------------------------------------------------------------------------------

SAVED = {"w": torch.ones(2, 3), "b": torch.ones(3)}
OTHERS = {
    "shape": {"w": torch.zeros(3, 2), "b": torch.zeros(3)},
    "dtype": {"w": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(3)},
    "missing": {"b": torch.zeros(3)},
    "more": {"w": torch.zeros(2, 3), "b": torch.zeros(3), "c": torch.zeros(1)},
}
TEXTS = {
    "shape": r"state\['w'\] is \(3, 2\) of float32 in `into`, but \(2, 3\) of float32",
    "dtype": r"state\['w'\] is \(2, 3\) of float64 in `into`, but \(2, 3\) of float32",
    "missing": r"state\['w'\] is missing in `into`, but \(2, 3\)",
    "more": r"state\['c'\] is \(1,\) of float32 in `into`, but missing",
}


def load_into_another(rank: Rank, job: str, other: str) -> tuple[str, str]:
    checkpoint = open_checkpoint(rank, job)
    checkpoint.save(0, SAVED)
    fits = {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()}
    into = OTHERS[other] if rank.rank == 1 else fits
    error = error_of(lambda: checkpoint.load(into))
    assert all(not tensor.any() for tensor in into.values())
    found = checkpoint.load(fits)
    assert found is not None and fits["w"].equal(SAVED["w"])
    checkpoint.close()
    return error


@pytest.mark.parametrize("other", OTHERS)
def test_load_into_another_state_raises_on_all_ranks_and_writes_nothing(
    other: str, job: str
) -> None:
    errors = run_ranks(2, load_into_another, job, other)
    for kind, text in errors:
        assert kind == "Mismatch" and re.search(TEXTS[other], text), text
    assert "rank 1/2 (pid " in errors[0][1]


# ---- damage --------------------------------------------------------------------------------------


def damage(rank: Rank, job: str, part: str) -> tuple[str, str]:
    checkpoint = open_checkpoint(rank, job)
    for step in range(3):
        checkpoint.save(step, state_of(rank.rank, step, 1000))
    version = checkpoint._newest
    assert version is not None
    if rank.rank == 1:
        if part == "tensor":
            version.tensors()[0].view(torch.uint8)[77] ^= 1
        else:
            version.memory.bytes[version.num_bytes - 1] ^= 1
    error = error_of(checkpoint.load) if part == "tensor" else ("", "")
    found = checkpoint.load()
    assert found is not None and found[0] == 1 and is_state_of(rank.rank, *found)
    checkpoint.close()
    return error


def test_damaged_tensor_is_an_error_on_all_ranks_and_the_next_load_takes_the_older_version(
    job: str,
) -> None:
    for error in run_ranks(2, damage, job, "tensor"):
        check_error(
            error,
            "TransportError",
            "state['model']['weight'] of rank 1 in step 2 does not match its checksum",
        )


def test_damaged_tail_is_no_version(job: str) -> None:
    run_ranks(2, damage, job, "tail")


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


def run_short_of_memory(rank: Rank, job: str, how: str) -> tuple[str, str]:
    checkpoint = open_checkpoint(rank, job)
    for step in range(2):
        checkpoint.save(step, state_of(rank.rank, step, 1000))

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if rank.rank == 0 and how == "before":
        _C.available_memory = lambda: 4096
    if rank.rank == 0 and how == "write":
        os.pwrite = no_space

    def save_twice() -> None:
        for step in (2, 3):
            checkpoint.save(step, state_of(rank.rank, step, 10**6))

    error = error_of(save_twice)
    found = checkpoint.load()
    assert found is not None and found[0] == 1 and is_state_of(rank.rank, *found)
    checkpoint.close()
    return error


@pytest.mark.parametrize("how", ["before", "write"])
def test_too_little_memory_is_an_error_on_all_ranks_and_the_last_version_stays(
    how: str, job: str
) -> None:
    errors = run_ranks(2, run_short_of_memory, job, how)
    for error in errors:
        check_error(
            error,
            "TransportError",
            "bytes of shared memory for a version",
            "nothing was saved, and the last version is still there",
        )
    assert "rank 0/2 (pid " in errors[1][1]


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
def test_second_job_with_the_run_id_of_a_living_one_is_told_so(
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


def come_twice(rank: Rank, job: str) -> tuple[str, str]:
    os.environ["ROTA_HOST_ID"] = f"host{rank.rank}"
    store = rank.make_store(timeout_s=60)
    checkpoint = rota.checkpoint.Checkpoint(store, rank=0, world_size=2, job=job)
    if rank.rank == 1:
        store.wait(["rota/checkpoint/checkpoint/claim/0"])
        checkpoint._timeout /= 60
    error = error_of(checkpoint.load)
    checkpoint.close()
    return error


def test_two_processes_of_a_rank_on_two_hosts_are_named(job: str) -> None:
    (kind, text), (late_kind, late_text) = run_ranks(2, come_twice, job)
    assert kind == "Mismatch" and "there are two processes of rank 0: pid " in text
    assert "on host host0" in text and "on host host1" in text
    assert late_kind == "Timeout" and "waited in vain for rank 1" in late_text


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("world_size", ["rank 0/2 (pid ", "rank 1/3 (pid "]),
        ("call", ["'load'", "'save'"]),
    ],
)
@on_ranks(2)
def test_ranks_that_disagree_are_named_with_what_each_said(
    rank: Rank, about: str, expected: list[str], job: str
) -> None:
    world_size = 2 + rank.rank if about == "world_size" else 2
    checkpoint = open_checkpoint(rank, job, world_size=world_size)
    if about == "call" and rank.rank == 1:

        def call() -> object:
            return checkpoint.save(0, {})
    else:
        call = checkpoint.load
    error = error_of(call)
    checkpoint.close()
    check_error(error, "Mismatch", *expected)


def save_different_steps(rank: Rank, job: str) -> list[tuple[str, str]]:
    checkpoint = open_checkpoint(rank, job)
    first = error_of(lambda: checkpoint.save(5 + rank.rank, state_of(rank.rank, 5, 10)))
    assert checkpoint.load() is None
    checkpoint.save(5, state_of(rank.rank, 5, 10))
    later = error_of(lambda: checkpoint.save(7 - rank.rank, state_of(rank.rank, 7, 10)))
    checkpoint.save(8, state_of(rank.rank, 8, 10))
    again = error_of(lambda: checkpoint.save(9 + rank.rank, state_of(rank.rank, 9, 10)))
    found = checkpoint.load()
    assert found is not None and found[0] == 8 and is_state_of(rank.rank, *found)
    checkpoint.close()
    return [first, later, again]


def test_different_steps_are_an_error_on_all_ranks_and_nothing_of_them_is_kept(job: str) -> None:
    steps = [(5, 6), (7, 6), (9, 10)]
    for errors in run_ranks(2, save_different_steps, job):
        for (kind, text), both in zip(errors, steps, strict=True):
            assert kind == "Mismatch" and all(f"step {step}" in text for step in both), text


def save_and_leave(rank: Rank, job: str) -> None:
    checkpoint = open_checkpoint(rank, job)
    checkpoint.save(4, state_of(rank.rank, 4, 10))
    checkpoint.close(keep=True)


def load_with_fewer(rank: Rank, job: str) -> tuple[str, str]:
    checkpoint = open_checkpoint(rank, job)
    error = error_of(checkpoint.load)
    checkpoint.save(0, state_of(rank.rank, 0, 10))
    found = checkpoint.load()
    assert found is not None and found[0] == 0
    checkpoint.close()
    return error


def test_another_number_of_ranks_is_an_error_until_they_save(job: str) -> None:
    run_ranks(3, save_and_leave, job)
    for error in run_ranks(2, load_with_fewer, job):
        check_error(error, "Mismatch", "step 4 was saved by 3 ranks, this job has 2")
    run_ranks(3, close_all, job)


def close_all(rank: Rank, job: str) -> None:
    open_checkpoint(rank, job).close()


def lose_one_state(rank: Rank, job: str) -> str:
    checkpoint = open_checkpoint(rank, job)
    store = rank.make_store()
    if rank.rank == 1:
        for memory in checkpoint._holdings.slots(1).memories.values():
            memory.clear_head()
        store.set("cleared", "")
    store.wait(["cleared"])
    with pytest.warns(UserWarning, match="no step that all ranks have") as warnings:
        assert checkpoint.load() is None
    checkpoint.close()
    return str(warnings[0].message)


def test_load_warns_if_only_some_ranks_have_a_version(job: str) -> None:
    run_ranks(2, save_and_leave, job)
    for text in run_ranks(2, lose_one_state, job):
        assert text.endswith("rank 0 has [4]; rank 1 has none")


# ---- the keeper ----------------------------------------------------------------------------------


def test_keeper_of_another_version_or_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
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


@pytest.mark.parametrize(
    "packet",
    [b"\xff", b"{}", b"[]", b'{"ask": "keep"}', b'{"ask": "join", "protocol": 2}', b"{" * 70000],
    ids=["bytes", "nothing", "list", "not-joined", "half", "long"],
)
def test_keeper_survives_any_packet(packet: bytes) -> None:
    with alone() as checkpoint:
        checkpoint.save(0, {"a": 1})
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{checkpoint._link.name}")
        connection.send(packet)
        answer = connection.recv(1000)
        assert answer == b"" or b'"error"' in answer
        connection.close()
        pid = checkpoint.keeper_pid
        assert checkpoint.load() == (0, {"a": 1}) and checkpoint.keeper_pid == pid


@pytest.mark.parametrize(
    "bad", [{"linger": 3}, {"replicate": "x"}, {"job": 3}, {"timeout": timedelta(0)}], ids=str
)
def test_options_of_another_type_are_refused(bad: dict[str, Any]) -> None:
    kind = ValueError if "timeout" in bad else TypeError
    with pytest.raises(kind, match=rf"Checkpoint: {next(iter(bad))} is "):
        rota.checkpoint.Checkpoint(dist.HashStore(), rank=0, world_size=1, **bad)
