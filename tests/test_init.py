"""Making a communicator: over any group, or a clear error."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks, run_ranks
from rota import _C


@pytest.mark.parametrize("backend", ["gloo", "rota", "cpu:gloo", "cpu:rota"])
@on_ranks(3)
def test_communicator_works_over_any_backend(rank: Rank, backend: str) -> None:
    rank.init(backend)
    communicator = rota.Communicator()
    assert (communicator.rank, communicator.world_size) == (rank.rank, 3)
    communicator.all_reduce(tensor := torch.full((3,), float(rank.rank)), "max")
    assert tensor.tolist() == [2.0] * 3


@on_ranks(3)
def test_communicator_over_subgroup_counts_its_members_and_refuses_others(rank: Rank) -> None:
    rank.init("gloo")
    group = dist.new_group([0, 2])
    dist.barrier()  # Gloo fails if a rank leaves while others still connect
    if rank.rank == 1:
        check_error(error_of(rota.Communicator, group), "ValueError", "not in the group")
        return
    communicator = rota.Communicator(group)
    assert (communicator.rank, communicator.world_size) == (rank.rank // 2, 2)
    communicator.all_reduce(tensor := torch.full((3,), float(rank.rank)))
    assert tensor.tolist() == [2.0] * 3


@on_ranks(1)
def test_communicator_before_init_raises_value_error(rank: Rank) -> None:
    check_error(error_of(rota.Communicator), "ValueError", "init_process_group")


@pytest.mark.parametrize(
    ("slot_bytes", "kinds", "facts"),
    [
        *((size, "ValueError", "multiple of 4096") for size in (0, 100, 4097)),
        # The sum of all slots overflows; it must not wrap around to a small number.
        *((1 << bits, "ValueError TransportError", "") for bits in (61, 62, 63)),
        (-4096, "TypeError ValueError", ""),
    ],
    ids=str,
)
@on_ranks(1)
def test_communicator_slot_bytes_that_cannot_be_raise(
    rank: Rank, slot_bytes: int, kinds: str, facts: str
) -> None:
    rank.init()
    # Without this limit, a missing check in rota would take all memory of the machine.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    error, text = error_of(rota.Communicator, slot_bytes=slot_bytes)
    assert error in kinds.split() and facts in text, text
    assert "slot_bytes" in text


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup (v1 or v2) of 256 MiB that processes can be moved into."""
    version1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (
        (version1, "memory.limit_in_bytes")
        if version1.is_dir()
        else (Path("/sys/fs/cgroup"), "memory.max")
    )
    cgroup = parent / f"rota-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / limit).write_text(str(256 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        yield cgroup
    finally:
        cgroup.rmdir()


@on_ranks(1)
def test_memory_beyond_the_containers_limit_is_an_error(rank: Rank, small_cgroup: Path) -> None:
    """Reserving it would trigger the OOM killer, which kills a rank without any message."""
    rank.init()
    (small_cgroup / "cgroup.procs").write_text(str(os.getpid()))
    error = error_of(rota.Communicator, slot_bytes=256 << 20)
    check_error(error, "TransportError", "cannot reserve", "slot_bytes")
    free = int(error[1].split(" bytes free")[0].split()[-1])
    assert (128 << 20) < free <= (256 << 20)
    rota.Communicator().all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("own_rank", "world_size", "facts"),
    [
        (2, 2, ["rank 2", "[0, 2)"]),
        (-1, 2, ["rank -1", "[0, 2)"]),
        (0, 5000, ["5000", "at most 4096"]),
    ],
    ids=["rank-too-large", "rank-negative", "world-too-large"],
)
@on_ranks(1)
def test_communicator_impossible_rank_or_world_raises(
    rank: Rank, own_rank: int, world_size: int, facts: list[str]
) -> None:
    make = lambda: _C.Communicator(  # noqa: E731
        rank.make_store(), own_rank, world_size, timedelta(seconds=1), 4096
    )
    error, text = error_of(make)
    assert error in ("ValueError", "TransportError"), text
    for fact in facts:
        assert fact in text


def make_with_own_idea(
    rank: Rank, ranks: list[int], world_sizes: list[int], slot_bytes: list[int]
) -> tuple[str, str]:
    own, store = rank.rank, rank.make_store(timeout_s=3)
    place = (ranks[own], world_sizes[own], timedelta(seconds=2), slot_bytes[own])
    return error_of(_C.Communicator, store, *place)


@pytest.mark.parametrize(
    ("ranks", "world_sizes", "slot_bytes", "facts"),
    [
        ([0, 0], [2, 2], [4096, 4096], []),
        ([0, 1], [2, 3], [4096, 4096], ["world_size ", "WORLD_SIZE"]),
        ([0, 1], [2, 2], [4096, 8192], ["4096", "8192", "slot_bytes"]),
    ],
    ids=["one-number", "world-sizes", "slot-bytes"],
)
def test_ranks_that_differ_raise_transport_error(
    ranks: list[int], world_sizes: list[int], slot_bytes: list[int], facts: list[str]
) -> None:
    errors = run_ranks(2, make_with_own_idea, ranks, world_sizes, slot_bytes)
    for error in errors:
        check_error(error, "TransportError", *facts)
    if ranks == [0, 0]:
        assert any("two processes say they are rank 0 of 2" in text for _, text in errors), errors


@on_ranks(3, timeout_s=12)
def test_communicator_missing_rank_raises_transport_error_after_its_own_timeout(
    rank: Rank,
) -> None:
    rank.init("gloo")
    if rank.rank == 2:
        rank.await_word("rank 0 has waited")
        rank.await_word("rank 1 has waited")
        return
    error = error_of(rota.Communicator, timeout=timedelta(seconds=1))
    rank.say(f"rank {rank.rank} has waited")
    check_error(error, "TransportError", "still waits for rank 2")


def limit_and_make(rank: Rank, limit: str, amount: int) -> tuple[str, str]:
    rank.init("gloo", timeout_s=3)
    if rank.rank == 0:
        if limit == "descriptors":
            # All descriptors below the limit except `amount` are taken.
            taken = [os.dup(0) for _ in range(64)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, taken[-1] + 1))
            for fd in taken[len(taken) - amount :]:
                os.close(fd)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (amount, amount))
    return error_of(rota.Communicator, timeout=timedelta(seconds=2))


@on_ranks(2)
def test_communicator_short_of_memory_raises_transport_error_with_need_and_have(
    rank: Rank,
) -> None:
    facts = (("bytes of shared memory", "free", "slot_bytes"), ("rank 0",))[rank.rank]
    check_error(limit_and_make(rank, "bytes", 65536), "TransportError", *facts)


@pytest.mark.parametrize("num_free", range(5))
@on_ranks(2)
def test_communicator_short_of_descriptors_raises(rank: Rank, num_free: int) -> None:
    error, text = limit_and_make(rank, "descriptors", num_free)
    # The test's store opens a file for each call, so it may fail first; the peer may lack nothing.
    other = ("DistStoreError", "nothing")[rank.rank]
    assert error in ("TransportError", other), text
    assert rank.rank == 1 or "open files" in text


@on_ranks(1)
def test_host_that_cannot_be_read_is_not_taken_for_another(rank: Rank) -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard_limit))
    error = error_of(_C.host_id)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    check_error(error, "TransportError", "boot id: Too many open files; raise `ulimit -n`")


def listening_name(pid: int) -> str | None:
    """The abstract socket address at which a process listens for its peers."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(fd))
    is_listening = "00010000"
    for line in Path("/proc/net/unix").read_text().splitlines():
        _, _, _, flags, _, _, inode, *path = line.split()
        if flags == is_listening and f"socket:[{inode}]" in sockets:
            return path[0]
    return None


@on_ranks(2)
def test_communicator_ignores_strangers_on_its_socket(rank: Rank) -> None:
    """Rank 1 sends garbage to the socket on which rank 0 listens."""
    rank.init("gloo")
    if rank.rank == 1:
        deadline = time.monotonic() + 10
        while (name := listening_name(rank.pid_of(0))) is None:
            assert time.monotonic() < deadline, "rank 0 does not listen"
        for message in (b"", b"x" * 16):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect("\0" + name.removeprefix("@"))
                if message:
                    stranger.send(message)
    rota.Communicator().all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [2.0] * 3
