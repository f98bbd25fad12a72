"""Ctrl-C in a wait, and calls that a forked child may not make."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error, error_of, on_ranks

PROMPT_S = 5.0  # the contract says 200 ms; on a busy machine, a test can only rule out a time-out
IN_THE_WAIT_S = 0.3
USES = ("communicator", "large", "broadcast", "barrier", "dist", "dist.barrier", "work")
USES += ("behind-async", "close", "recv")


def interrupt_in_the_wait() -> None:
    threading.Timer(IN_THE_WAIT_S, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_ctrl_c_in_a_wait_raises_keyboard_interrupt_and_peers_are_told(
    rank: Rank, use: str
) -> None:
    """Rank 0 waits for rank 1, which calls only after rank 0 was interrupted."""
    rank.init()
    communicator = rota.Communicator()
    tensor = torch.ones(100_000)
    calls: dict[str, Callable[[], object]] = {
        "communicator": lambda: communicator.all_reduce(tensor),
        "large": lambda: communicator.all_reduce(torch.ones(3_000_000), algorithm="ring"),
        "broadcast": lambda: communicator.broadcast(tensor, 1),
        "barrier": communicator.barrier,
        "dist": lambda: dist.all_reduce(tensor),
        "dist.barrier": dist.barrier,
        "work": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "behind-async": lambda: (
            communicator.all_reduce(tensor, async_op=True),
            communicator.all_reduce(tensor),
        ),
        "close": lambda: (communicator.all_reduce(tensor, async_op=True), communicator.close()),
        "recv": lambda: communicator.recv(tensor, 1 - rank.rank),
    }
    dist.barrier()
    if rank.rank == 0:
        interrupt_in_the_wait()
        began = time.monotonic()
        check_error(error_of(calls[use]), "KeyboardInterrupt")
        assert time.monotonic() - began < IN_THE_WAIT_S + PROMPT_S
        rank.say()
        return
    rank.await_word()
    # If rank 0 had already done its part, the first call may still complete.
    if use in ("behind-async", "close"):
        use = "communicator"
    errors = [error_of(calls[use]) for _ in range(2)]
    error = next((error for error in errors if error[0] != "nothing"), errors[0])
    check_error(error, "PeerFailed", f"rank 0 (pid {rank.pid_of(0)})")


@on_ranks(2, timeout_s=15)
def test_ctrl_c_while_a_communicator_is_made_raises_keyboard_interrupt(rank: Rank) -> None:
    rank.init()
    if rank.rank == 1:
        return rank.await_word()
    interrupt_in_the_wait()
    check_error(error_of(rota.Communicator), "KeyboardInterrupt")
    rank.say()


def run_in_child(call: Callable[[], object], timeout_s: float = 10.0) -> tuple[str, str]:
    """The error that `call` raises in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        error, text = error_of(call)
        os.write(writer, f"{error}\n{text}".encode())
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], timeout_s)
    if not ready:
        os.kill(child, signal.SIGKILL)
    reply = os.read(reader, 4096).decode() if ready else "hang\nthe child did not answer"
    os.close(reader)
    os.waitpid(child, 0)
    error, _, text = reply.partition("\n")
    return error, text


@pytest.mark.parametrize("used_async", [False, True], ids=["fresh", "after-async"])
@on_ranks(2)
def test_forked_child_use_raises_and_the_parent_goes_on(rank: Rank, used_async: bool) -> None:
    rank.init()
    communicator = rota.Communicator()
    communicator.barrier()
    if used_async:  # then the progress thread exists, but not in the child
        communicator.all_reduce(torch.ones(1), async_op=True).wait()
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    tensor = torch.ones(3)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: communicator.all_reduce(tensor),
        "barrier": communicator.barrier,
        "send": lambda: communicator.send(tensor, 1 - rank.rank),
        "async": lambda: communicator.all_reduce(tensor, async_op=True).wait(),
        "future": lambda: communicator.all_reduce_future(tensor, "avg", None).wait(),
        "dist": lambda: dist.all_reduce(tensor),
    }
    for name, call in calls.items():
        error, text = run_in_child(call)
        facts = "parent process" in text and "after fork" in text
        assert error == "RotaError" and facts, f"{name}: {error}: {text}"
    communicator.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3


@pytest.mark.parametrize("used_async", [False, True], ids=["fresh", "after-async"])
@on_ranks(2)
def test_forked_child_close_does_not_disturb_the_parent(rank: Rank, used_async: bool) -> None:
    rank.init()
    communicator = rota.Communicator()
    tensor = torch.ones(3)
    communicator.all_reduce(tensor)
    if used_async:
        communicator.all_reduce(tensor, async_op=True).wait()
        tensor.fill_(2.0)

    def drop_all() -> None:
        communicator.close()
        dist.destroy_process_group()

    error, _ = run_in_child(drop_all)
    communicator.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert error == "nothing" and tensor.tolist() == [8.0] * 3


@on_ranks(2)
def test_works_and_windows_in_a_forked_child_raise_and_end_at_once(rank: Rank) -> None:
    """What a child inherits while its parent waits for rank 1: works, a window, all to be ended."""
    rank.init()
    communicators, windows = [rota.Communicator()], [rota.Window(4)]
    output, total = torch.zeros(3), torch.ones(3)
    if rank.rank == 1:
        rank.await_word()
        communicators[0].send(torch.full((3,), 5.0), 0)
        communicators[0].all_reduce(total)
        communicators[0].barrier()
        return
    recv = communicators[0].irecv(output, 1)
    send = communicators[0].isend(torch.ones(1 << 20), 1, tag=1)  # longer than the link
    queued = communicators[0].all_reduce(total, async_op=True)
    window = windows[0]
    calls: list[Callable[[], object]] = [
        *(call for work in (recv, send, queued) for call in (work.wait, work.is_completed)),
        *(work.get_future for work in (recv, queued)),
        lambda: window.put(torch.ones(4), 1),
        lambda: window.signal(0),
        lambda: window.view(1),
        lambda: window.num_signals(1),
        lambda: rota._C.Window.is_alive(window, 1),
    ]
    exposed = rota._C.ExposedTensor(torch.zeros(1), 1, others_may_write=False)
    calls.append(lambda: exposed.publish(0, 1))
    errors = [run_in_child(call) for call in calls]

    def end() -> None:
        exposed.close()
        windows.pop().close()
        communicators[0].close()
        communicators.clear()
        gc.collect()
        dist.destroy_process_group()

    ended = run_in_child(end)
    rank.say()
    recv.wait()
    queued.wait()
    assert output.tolist() == [5.0] * 3 and total.tolist() == [2.0] * 3
    assert window.is_alive(1) and exposed.load(0) == 0
    communicators[0].barrier()
    for error in errors:
        check_error(error, "RotaError", "parent process", "after fork")
    assert ended == ("nothing", "no exception was raised")
