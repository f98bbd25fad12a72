"""Making a subgroup waits for no rank; its first use waits for the ranks that make it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, Ranks, error_of, on_ranks, run_ranks


def make_before_the_peer(rank: Rank) -> float:
    rank.init()
    if rank.rank == 1:
        rank.hear()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    rank.tell("made")
    tensor = torch.full((10,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def test_making_a_subgroup_waits_for_nobody() -> None:
    with Ranks(2, make_before_the_peer) as ranks:
        assert ranks.hear(0) == "made"
        ranks.tell(1)
        assert ranks.results() == [3.0, 3.0]


@on_ranks(4)
def test_ranks_that_never_use_a_subgroup_need_not_come(rank: Rank) -> None:
    """Two of four ranks use the group; the other two only make it."""
    rank.init()
    group = dist.new_group([0, 1, 2, 3])
    tensor = torch.full((1000,), float(rank.rank))
    if rank.rank == 0:
        dist.send(tensor + 7, 3, group=group)
    elif rank.rank == 3:
        dist.recv(tensor, 0, group=group)
    dist.barrier()
    result = tensor[-1].item() if rank.rank == 3 else None
    assert result == [None, None, None, 7.0][rank.rank]


def leave_unused(rank: Rank) -> str:
    rank.init()
    group = dist.new_group([0, 1])
    if rank.rank == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank.rank == 1:
        return ""
    with pytest.raises(rota.TransportError) as caught:
        dist.all_reduce(torch.ones(4), group=group)
    return str(caught.value)


def test_subgroup_that_a_rank_has_left_unused_names_it() -> None:
    text = run_ranks(2, leave_unused)[0]
    assert "rank 1" in text


def leave_while_awaited(rank: Rank) -> str:
    """Rank 0 is connected to rank 1, which then leaves without ever using the group."""
    rank.init()
    group = dist.new_group([0, 1])
    if rank.rank == 1:
        rank.hear()
        dist.destroy_process_group(group)
        dist.barrier()
        return ""
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    rank.tell()
    with pytest.raises(rota.PeerFailed) as caught:
        work.wait()
    dist.barrier()
    return str(caught.value)


def test_rank_that_leaves_unused_is_not_waited_for() -> None:
    with Ranks(2, leave_while_awaited) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        text = ranks.results()[0]
    assert "rank 1" in text
    assert "has left the group" in text


def wait_for_a_peer(rank: Rank, end: Callable[[dist.ProcessGroup], None] | None) -> tuple[str, str]:
    """Rank 1 never makes the group."""
    rank.init()
    if rank.rank == 1:
        rank.hear()
        return "", ""
    timeout = timedelta(seconds=30 if end else 1)
    group = dist.new_group([0, 1], timeout, use_local_synchronization=True)
    with pytest.raises((rota.RotaError, KeyboardInterrupt)) as caught:
        if end:
            threading.Timer(0.3, end, (group,)).start()
        group.allreduce([torch.ones(4)]).wait()  # dist.all_reduce would look the group up again
    return type(caught.value).__name__, str(caught.value)


def interrupt(_: dist.ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("end", "error", "part"),
    [
        (None, "TransportError", "rank 1 to make this group, after 1 s: does it make"),
        (interrupt, "KeyboardInterrupt", ""),
        (dist.destroy_process_group, "RotaError", "is closed"),
    ],
    ids=["timeout", "interrupt", "destroy"],
)
def test_first_use_waits_no_longer_than_it_must(
    end: Callable[[dist.ProcessGroup], None] | None, error: str, part: str
) -> None:
    with Ranks(2, wait_for_a_peer, end, timeout_s=25) as ranks:
        name, text = ranks.hear_result(0)
        ranks.tell(1)
        ranks.results()
    assert name == error
    assert part in text


def use_in_a_signal_handler(rank: Rank) -> list[tuple[str, str]]:
    """Rank 1 never makes the group; a handler of rank 0 uses it while rank 0 connects."""
    rank.init()
    if rank.rank == 1:
        rank.hear()
        return []
    group = dist.new_group([0, 1], use_local_synchronization=True)
    backend = group._get_backend(torch.device("cpu"))
    errors: list[tuple[str, str]] = []

    def call() -> None:
        group.allreduce([torch.ones(4)]).wait()

    def handle(*_: object) -> None:
        backend.set_timeout(timedelta(seconds=1000))
        errors.append(error_of(call))
        backend.shutdown()

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    errors.append(error_of(call))
    errors.append(error_of(call))
    return errors


def test_first_use_may_be_ended_by_a_signal_handler() -> None:
    with Ranks(2, use_in_a_signal_handler, timeout_s=25) as ranks:
        in_handler, interrupted, later = ranks.hear_result(0)
        ranks.tell(1)
        ranks.results()
    assert in_handler[0] == interrupted[0] == later[0] == "RotaError"
    assert "signal handler uses a group" in in_handler[1]
    assert "is closed" in interrupted[1]
    assert "is closed" in later[1]


def interrupt_and_go_on(rank: Rank) -> float:
    rank.init()
    if rank.rank == 1:
        rank.hear()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = torch.full((10,), float(rank.rank + 1))
    if rank.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, interrupt, (group,)).start()
            dist.all_reduce(tensor, group=group)
        rank.tell()
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def test_interrupted_first_use_can_be_repeated() -> None:
    with Ranks(2, interrupt_and_go_on) as ranks:
        ranks.hear(0)
        ranks.tell(1)
        assert ranks.results() == [3.0, 3.0]


@on_ranks(2)
def test_forked_child_cannot_use_a_subgroup_first(rank: Rank) -> None:
    rank.init()
    group = dist.new_group([0, 1])
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except rota.RotaError as error:
            os._exit(0 if "parent process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.full((10,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    result = tensor[0].item()
    assert result == 3.0
