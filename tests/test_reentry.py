"""Python code that a call runs: futures' callbacks, signal handlers, finalizers.

A callback may call the group that it belongs to, and wait; calls run in the order in which they
were made. What interrupts a collective may use other groups and messages, but not its group.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, Ranks, error_of

IN_THE_WAIT_S = 0.3
PATIENCE_S = 10.0  # of a test, with what would otherwise hang for ever
Future: TypeAlias = torch.futures.Future[Any]
HOSTS = pytest.mark.parametrize("num_hosts", [1, 2], ids=["one-host", "two-hosts"])


def init(rank: Rank, num_hosts: int) -> None:
    if num_hosts > 1:
        os.environ["ROTA_HOST_ID"] = f"host{rank.rank}"
    rank.init()


class Callback:
    """Runs `body` once a future is done, in whatever thread settles it."""

    def __init__(self, future: Future, body: Callable[[], object]) -> None:
        self._body = body
        self._done = threading.Event()
        self.error = ("nothing", "it has not run")
        future.add_done_callback(self._run)

    def _run(self, _: object) -> None:
        self.error = error_of(self._body)
        self._done.set()

    def wait(self) -> str:
        assert self._done.wait(PATIENCE_S), "the callback waits in vain"
        return ": ".join(self.error) if self.error[0] != "nothing" else "nothing"


def future_of(tensor: torch.Tensor) -> Future:
    future: Future = dist.all_reduce(tensor, async_op=True).get_future()
    return future


# ---- callbacks -----------------------------------------------------------------------------------


def call_behind_queued_calls(rank: Rank) -> None:
    """Rank 1's callback of the first call runs while the second is still queued."""
    first, second, third = torch.ones(1000), torch.full((10,), 5.0), torch.full((10,), 100.0)
    if rank.rank == 0:
        rank.hear()
    future = future_of(first)
    behind = dist.all_reduce(second, async_op=True)
    if rank.rank == 0:
        future.wait()
        time.sleep(IN_THE_WAIT_S)
    callback = Callback(future, lambda: dist.all_reduce(third))
    if rank.rank == 1:
        rank.tell()
    behind.wait()
    assert callback.wait() == "nothing"
    assert [tensor[0].item() for tensor in (first, second, third)] == [2.0, 10.0, 200.0]


def wait_in_callbacks(_: Rank) -> None:
    """For a Work, for a future, and for a call that was made outside."""
    tensors = [torch.ones(1000) for _ in range(6)]
    works = [
        lambda: dist.all_reduce(tensors[1], async_op=True).wait(timedelta(seconds=PATIENCE_S)),
        lambda: future_of(tensors[2]).wait(),
        lambda: dist.all_reduce(tensors[3]),
    ]
    errors = [Callback(future_of(tensors[0]), work).wait() for work in works]
    later: list[Future] = []
    is_made = threading.Event()

    def wait_for_later_call() -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the call was done before it got the callback, which runs before the later one
        is_made.wait(PATIENCE_S)
        later[0].wait()

    callback = Callback(future_of(tensors[4]), wait_for_later_call)
    later.append(future_of(tensors[5]))
    is_made.set()
    errors.append(callback.wait())
    later[0].wait()
    assert errors == ["nothing"] * 4
    assert [tensor[0].item() for tensor in tensors] == [8.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def call_when_a_message_has_come(rank: Rank) -> None:
    """The message comes while its receiver waits in a collective, whose turn the callback needs."""
    tensors = [torch.ones(100_000) for _ in range(2)]  # equal, since either may be first
    if rank.rank == 1:
        time.sleep(IN_THE_WAIT_S)
        dist.send(torch.ones(5), 0)
        time.sleep(IN_THE_WAIT_S)
        for tensor in tensors:
            dist.all_reduce(tensor)
    else:
        message = dist.irecv(torch.zeros(5), 1)
        assert message is not None
        callback = Callback(message.get_future(), lambda: dist.all_reduce(tensors[1]))
        dist.all_reduce(tensors[0])
        assert callback.wait() == "nothing"
    assert tensors[1][0].item() == 2.0


def close_in_callbacks(rank: Rank) -> None:
    """Callbacks of two groups close each other's, on rank 0: rank 1 calls once they are there."""
    groups = [rank.communicator() for _ in range(2)]
    if rank.rank == 1:
        dist.barrier()
        for group in groups:
            group.all_reduce(torch.ones(5))
        return
    both = threading.Barrier(2)

    def close(group: rota.Communicator) -> None:
        both.wait(PATIENCE_S)
        group.close()

    futures = [group.all_reduce(torch.ones(5), async_op=True).get_future() for group in groups]
    callbacks = [
        Callback(future, functools.partial(close, other))
        for future, other in zip(futures, reversed(groups), strict=True)
    ]
    dist.barrier()
    assert [callback.wait() for callback in callbacks] == ["nothing"] * 2


def use_callbacks(rank: Rank, num_hosts: int) -> None:
    init(rank, num_hosts)
    for part in (
        call_behind_queued_calls,
        wait_in_callbacks,
        call_when_a_message_has_come,
        close_in_callbacks,
    ):
        dist.barrier()
        part(rank)
    dist.destroy_process_group()


@HOSTS
def test_callback_calls_its_group_in_order_and_waits(num_hosts: int) -> None:
    with Ranks(2, use_callbacks, num_hosts, timeout_s=50) as ranks:
        ranks.hear(1)
        ranks.tell(0)
        ranks.results()


# ---- signal handlers -----------------------------------------------------------------------------

Calls = list[Callable[[], object]]
NOTHING = ("nothing", "no exception was raised")


class Handler:
    """Makes the calls that a wait of rank 0 is given, inside that wait."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._calls: Calls = []
        self._errors: list[tuple[str, str]] = []
        signal.signal(signal.SIGUSR2, self._handle)

    def _handle(self, *_: object) -> None:
        self._errors = [error_of(call) for call in self._calls]
        self._rank.tell()

    def errors_in(self, wait: Callable[[], object], calls: Calls) -> list[tuple[str, str]]:
        """What `wait` and then the calls raise; the other rank comes after the handler."""
        self._calls = calls
        self._rank.tell()
        error = error_of(wait)
        return [error, *self._errors]


def interrupt(ranks: Ranks) -> None:
    ranks.hear(0)
    time.sleep(IN_THE_WAIT_S)  # nothing shows from outside whether a rank waits
    ranks.kill(0, signal.SIGUSR2)
    ranks.hear(0)
    ranks.tell(1)


def be_interrupted(rank: Rank, num_hosts: int) -> list[object]:
    init(rank, num_hosts)
    other = dist.new_group()
    dist.barrier(other)
    first, second, third = (torch.ones(100_000) for _ in range(3))
    small, message = torch.ones(5), torch.ones(5)
    works: list[dist.Work] = []

    def queue(tensor: torch.Tensor) -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        works.append(work)

    if rank.rank == 1:
        for tensor in (first, second):
            dist.recv(message, 0)
            dist.all_reduce(small, group=other)
            rank.hear()
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
        rank.hear()
        dist.all_reduce(third)
        dist.all_reduce(small)
        rank.hear()
        return [first, second, third, error_of(lambda: dist.all_reduce(first))]

    handler = Handler(rank)
    refused: Calls = [dist.barrier, lambda: dist.all_reduce(small), lambda: queue(small)]
    allowed: Calls = [
        lambda: dist.send(message, 1),
        lambda: dist.all_reduce(small, group=other),
    ]
    blocking = handler.errors_in(lambda: dist.all_reduce(first), [*refused, *allowed])

    def call_behind_another() -> None:
        queue(second)
        dist.all_reduce(torch.ones(3))

    wait_for_first = [lambda: works[0].wait()]
    queued = handler.errors_in(call_behind_another, [*refused, *wait_for_first, *allowed])
    queue(third)
    # The call has returned already, so the handler's comes behind it.
    work = handler.errors_in(works[1].wait, [lambda: queue(small)])
    works[2].wait()
    closed = handler.errors_in(lambda: dist.all_reduce(first), [dist.destroy_process_group])
    return [first, second, third, blocking, queued, work, closed, small[0].item()]


@HOSTS
def test_handler_that_interrupts_a_collective_is_told_at_once(num_hosts: int) -> None:
    with Ranks(2, be_interrupted, num_hosts, timeout_s=50) as ranks:
        for _ in range(4):
            interrupt(ranks)
        (*sums, blocking, queued, work, closed, small), (*peer_sums, peer_error) = ranks.results()
    for tensor in sums[1:] + peer_sums[1:]:
        assert tensor.eq(2).all()
    assert small == 8.0  # two calls of the other group, and the one behind the Work
    assert [blocking[0], *blocking[4:]] == [NOTHING] * 3
    assert [queued[0], *queued[5:]] == [NOTHING] * 3
    for call, (error, text) in zip(
        ["barrier", "all_reduce", "all_reduce"] * 2 + ["Work.wait"],
        [*blocking[1:4], *queued[1:5]],
        strict=True,
    ):
        assert error == "RotaError", text
        assert f"rota.{call}: called inside rota.all_reduce of the same communicator" in text
        assert "set a flag" in text
    assert work == [NOTHING] * 2
    assert closed[1] == NOTHING
    for error, text in (closed[0], peer_error):
        assert error in ("PeerFailed", "RotaError"), text
        assert "rank 0 closed its communicator inside rota.all_reduce" in text
