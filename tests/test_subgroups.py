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

from ranks import Rank, check_error, error_of, on_ranks
from test_interrupts import run_in_child


@on_ranks(2)
def test_making_a_subgroup_waits_for_nobody(rank: Rank) -> None:
    rank.init()
    if rank.rank == 1:
        rank.await_word()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    if rank.rank == 0:
        rank.say()
    tensor = torch.full((10,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == 3.0


@on_ranks(4)
def test_ranks_that_never_use_a_subgroup_need_not_come(rank: Rank) -> None:
    rank.init()
    group = dist.new_group([0, 1, 2, 3])
    tensor = torch.full((1000,), float(rank.rank))
    if rank.rank == 0:
        dist.send(tensor + 7, 3, group=group)
    elif rank.rank == 3:
        dist.recv(tensor, 0, group=group)
    dist.barrier()
    assert rank.rank != 3 or tensor[-1].item() == 7.0


@on_ranks(2)
def test_subgroup_that_a_rank_has_left_unused_names_it(rank: Rank) -> None:
    rank.init()
    group = dist.new_group([0, 1])
    if rank.rank == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank.rank == 0:
        error = error_of(dist.all_reduce, torch.ones(4), group=group)
        check_error(error, "TransportError", "rank 1")


@on_ranks(2)
def test_rank_that_leaves_unused_is_not_waited_for(rank: Rank) -> None:
    """Rank 0 is connected to rank 1, which then leaves without ever using the group."""
    rank.init()
    group = dist.new_group([0, 1])
    if rank.rank == 1:
        rank.await_word()
        dist.destroy_process_group(group)
    else:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        rank.say()
        error = error_of(work.wait)
    dist.barrier()
    if rank.rank == 0:
        check_error(error, "PeerFailed", "rank 1", "has left the group")


def interrupt(_: dist.ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("end", "kind", "fact"),
    [
        (None, "TransportError", "rank 1 to make this group, after 1 s: does it make"),
        (interrupt, "KeyboardInterrupt", ""),
        (dist.destroy_process_group, "RotaError", "is closed"),
    ],
    ids=["timeout", "interrupt", "destroy"],
)
@on_ranks(2, timeout_s=25)
def test_first_use_waits_no_longer_than_it_must(
    rank: Rank, end: Callable[[dist.ProcessGroup], None] | None, kind: str, fact: str
) -> None:
    """Rank 1 never makes the group."""
    rank.init()
    if rank.rank == 1:
        rank.await_word()
        return
    timeout = timedelta(seconds=30 if end else 1)
    group = dist.new_group([0, 1], timeout, use_local_synchronization=True)
    if end:
        threading.Timer(0.3, end, (group,)).start()
    # dist.all_reduce would look the group up again.
    error = error_of(lambda: group.allreduce([torch.ones(4)]).wait())
    rank.say()
    check_error(error, kind, fact)


@on_ranks(2, timeout_s=25)
def test_first_use_may_be_ended_by_a_signal_handler(rank: Rank) -> None:
    """Rank 1 never makes the group; a handler of rank 0 uses it while rank 0 connects."""
    rank.init()
    if rank.rank == 1:
        rank.await_word()
        return
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
    rank.say()
    facts = ("signal handler uses a group", "is closed", "is closed")
    for error, fact in zip(errors, facts, strict=True):
        check_error(error, "RotaError", fact)


@on_ranks(2)
def test_interrupted_first_use_can_be_repeated(rank: Rank) -> None:
    rank.init()
    if rank.rank == 1:
        rank.await_word()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = torch.full((10,), float(rank.rank + 1))
    if rank.rank == 0:
        threading.Timer(0.3, interrupt, (group,)).start()
        error = error_of(dist.all_reduce, tensor, group=group)
        rank.say()
        check_error(error, "KeyboardInterrupt")
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == 3.0


@on_ranks(2)
def test_forked_child_cannot_use_a_subgroup_first(rank: Rank) -> None:
    rank.init()
    group = dist.new_group([0, 1])
    error = run_in_child(lambda: dist.all_reduce(torch.ones(4), group=group))
    check_error(error, "RotaError", "parent process")
    tensor = torch.full((10,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == 3.0
