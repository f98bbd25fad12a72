"""Making a communicator: over any group, and a clear error where that cannot be."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, Ranks, error_of, run_ranks

import rota
from rota import _C


def reduce_over(rank: Rank, backend: str) -> list[object]:
    rank.init(backend)
    communicator = rota.Communicator()
    tensor = torch.full((3,), float(rank.rank))
    communicator.all_reduce(tensor, "max")
    return [communicator.rank, communicator.world_size, tensor.tolist()]


@pytest.mark.parametrize("backend", ["gloo", "rota", "cpu:gloo", "cpu:rota"])
def test_communicator_works_over_any_backend(backend: str) -> None:
    expected = [[rank, 3, [2.0] * 3] for rank in range(3)]
    assert run_ranks(3, reduce_over, backend) == expected


def reduce_over_subgroup(rank: Rank) -> object:
    rank.init("gloo")
    group = dist.new_group([0, 2])
    if rank.rank == 1:
        return error_of(lambda: rota.Communicator(group))
    communicator = rota.Communicator(group)
    tensor = torch.full((3,), float(rank.rank))
    communicator.all_reduce(tensor)
    return [communicator.rank, communicator.world_size, tensor.tolist()]


def test_communicator_over_subgroup_counts_its_members_and_refuses_others() -> None:
    first, other, last = run_ranks(3, reduce_over_subgroup)
    assert [first, last] == [[0, 2, [2.0] * 3], [1, 2, [2.0] * 3]]
    assert other[0] == "ValueError"
    assert "not in the group" in other[1]


def make_several(rank: Rank) -> list[float]:
    rank.init("gloo")
    group = dist.new_group()
    communicators = [
        rota.Communicator(),
        rota.Communicator(slot_bytes=4096),
        rota.Communicator(group, slot_bytes=1 << 20),
        rota.Communicator(group),
    ]
    results = []
    for number, communicator in enumerate(reversed(communicators)):
        tensor = torch.full((30_000,), float(number + rank.rank))
        communicator.all_reduce(tensor, algorithm="two_shot")
        results.append(tensor[-1].item())
    return results


def test_communicators_of_one_process_do_not_meet() -> None:
    assert run_ranks(2, make_several) == [[1.0, 3.0, 5.0, 7.0]] * 2


def make_without_group(rank: Rank) -> tuple[str, str]:
    return error_of(rota.Communicator)


def test_communicator_before_init_raises_value_error() -> None:
    error, text = run_ranks(1, make_without_group)[0]
    assert error == "ValueError"
    assert "init_process_group" in text


def make_with_slots(rank: Rank, slot_bytes: int) -> tuple[str, str]:
    rank.init()
    return error_of(lambda: rota.Communicator(slot_bytes=slot_bytes))


@pytest.mark.parametrize("slot_bytes", [0, 100, 4097, -4096, 1 << 62], ids=str)
def test_communicator_unusable_slot_bytes_raise(slot_bytes: int) -> None:
    error, text = run_ranks(1, make_with_slots, slot_bytes)[0]
    if slot_bytes < 0:
        assert error in ("TypeError", "ValueError"), text
    else:
        assert error in ("ValueError", "TransportError"), text
        assert "slot_bytes" in text and str(slot_bytes) in text


def make_alone(rank: Rank, own_rank: int, world_size: int) -> tuple[str, str]:
    make = lambda: _C.Communicator(  # noqa: E731
        rank.make_store(), own_rank, world_size, timedelta(seconds=1), 4096
    )
    return error_of(make)


@pytest.mark.parametrize(
    ("own_rank", "world_size", "facts"),
    [(2, 2, ["rank 2", "[0, 2)"]), (-1, 2, ["rank -1", "[0, 2)"]), (0, 65, ["65", "at most 64"])],
    ids=["rank-too-large", "rank-negative", "world-too-large"],
)
def test_communicator_impossible_rank_or_world_raises(
    own_rank: int, world_size: int, facts: list[str]
) -> None:
    error, text = run_ranks(1, make_alone, own_rank, world_size)[0]
    assert error in ("ValueError", "TransportError"), text
    for fact in facts:
        assert fact in text


def make_with_own_idea(
    rank: Rank, ranks: list[int], world_sizes: list[int], slot_bytes: list[int]
) -> tuple[str, str]:
    own = rank.rank
    make = lambda: _C.Communicator(  # noqa: E731
        rank.make_store(), ranks[own], world_sizes[own], timedelta(seconds=2), slot_bytes[own]
    )
    return error_of(make)


def test_two_ranks_with_one_number_raise_transport_error() -> None:
    results = run_ranks(2, make_with_own_idea, [0, 0], [2, 2], [4096, 4096])
    assert [error for error, _ in results] == ["TransportError"] * 2, results
    texts = [text for _, text in results]
    assert any("two processes say they are rank 0 of 2" in text for text in texts)


def test_ranks_with_different_world_sizes_raise_transport_error() -> None:
    results = run_ranks(2, make_with_own_idea, [0, 1], [2, 3], [4096, 4096])
    assert [error for error, _ in results] == ["TransportError"] * 2, results
    for _, text in results:
        assert "world_size 2" in text or "world_size 3" in text
        assert "WORLD_SIZE" in text


def test_ranks_with_different_slot_bytes_raise_transport_error() -> None:
    results = run_ranks(2, make_with_own_idea, [0, 1], [2, 2], [4096, 8192])
    assert [error for error, _ in results] == ["TransportError"] * 2, results
    for _, text in results:
        assert "4096" in text and "8192" in text and "slot_bytes" in text


def make_on_other_host(rank: Rank) -> tuple[str, str]:
    os.environ["ROTA_HOST_ID"] = f"host{rank.rank}"
    return error_of(rank.init)


def test_ranks_on_different_hosts_raise_transport_error() -> None:
    results = run_ranks(2, make_on_other_host)
    for error, text in results:
        assert error == "TransportError", text
        for fact in ("rank 0", "rank 1", "host0", "host1", "Gloo or NCCL"):
            assert fact in text


def make_with_missing_rank(rank: Rank) -> tuple[str, str] | None:
    rank.init("gloo")
    if rank.rank == 2:
        rank.hear()
        return None
    error = error_of(lambda: rota.Communicator(timeout=timedelta(seconds=1)))
    rank.tell()
    return error


def test_communicator_missing_rank_raises_transport_error_after_its_own_timeout() -> None:
    with Ranks(3, make_with_missing_rank, timeout_s=12) as ranks:
        ranks.hear(0)
        ranks.hear(1)
        ranks.tell(2)
        results = ranks.results()
    for error, text in results[:2]:
        assert error == "TransportError", text
        assert "rank 2" in text and "alive" in text


def limit_and_make(rank: Rank, limit: str, slack: int) -> tuple[str, str]:
    rank.init("gloo")
    if rank.rank == 0:
        if limit == "RLIMIT_NOFILE":
            # All numbers below the limit but `slack` are taken.
            taken = [os.dup(0) for _ in range(64)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, taken[-1] + 1))
            for fd in taken[-slack:] if slack else []:
                os.close(fd)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (slack, slack))
    return error_of(lambda: rota.Communicator(timeout=timedelta(seconds=2)))


def test_communicator_short_of_memory_raises_transport_error_with_need_and_have() -> None:
    (error, text), (peer_error, _) = run_ranks(2, limit_and_make, "RLIMIT_FSIZE", 65536)
    assert error == "TransportError", text
    for fact in ("bytes of shared memory", "free", "slot_bytes"):
        assert fact in text
    assert peer_error == "TransportError"


@pytest.mark.parametrize("num_free", [0, 1, 2, 3, 4, 5])
def test_communicator_short_of_descriptors_raises_transport_error(num_free: int) -> None:
    (error, text), (peer_error, _) = run_ranks(2, limit_and_make, "RLIMIT_NOFILE", num_free)
    assert error == "TransportError", text
    assert "open files" in text
    assert peer_error in ("TransportError", "nothing")  # it may have all that it needs


def connect_as_stranger(rank: Rank) -> list[float] | None:
    """Sends garbage to the socket on which rank 0 awaits rank 1."""
    import socket

    rank.init("gloo")
    if rank.rank == 1:
        rank.hear()  # rank 0 listens
        with open("/proc/net/unix") as sockets:
            names = [line.split()[-1] for line in sockets if "@rota-" in line]
        for name in set(names):
            for message in (b"", b"x", b"y" * 16, b"z" * 4096):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.connect("\0" + name[1:])
                    if message:
                        stranger.send(message)
    else:
        rank.tell()
    communicator = rota.Communicator()
    tensor = torch.ones(3)
    communicator.all_reduce(tensor)
    return tensor.tolist()


def test_communicator_ignores_strangers_on_its_socket() -> None:
    with Ranks(2, connect_as_stranger) as ranks:
        ranks.hear(0)
        while not listening_sockets():
            assert ranks.stderr(0) == ""
        ranks.tell(1)
        assert ranks.results() == [[2.0] * 3] * 2


def listening_sockets() -> list[str]:
    with open("/proc/net/unix") as sockets:
        return [line for line in sockets if "@rota-" in line]
