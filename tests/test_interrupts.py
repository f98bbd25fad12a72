"""Ctrl-C in a wait, and calls that a forked child may not make."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, Ranks, check_error, error_of, on_ranks

PROMPT_S = 5.0  # the contract says 200 ms; on a busy machine, a test can only rule out a time-out
IN_THE_WAIT_S = 0.3
USES = ("communicator", "large", "broadcast", "barrier", "dist", "dist.barrier", "work")
USES += ("behind-async", "close", "recv")


def wait_and_be_interrupted(rank: Rank, use: str) -> tuple[tuple[str, str], float]:
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
        rank.tell()
        error = error_of(calls[use])
        noticed = time.monotonic()
        return error, noticed
    rank.hear()
    # If rank 0 had already done its part, the first call may still complete.
    if use in ("behind-async", "close"):
        use = "communicator"
    errors = [error_of(calls[use]) for _ in range(2)]
    return next((error for error in errors if error[0] != "nothing"), errors[0]), 0.0


@pytest.mark.parametrize("use", USES)
def test_ctrl_c_in_a_wait_raises_keyboard_interrupt_and_peers_are_told(use: str) -> None:
    with Ranks(2, wait_and_be_interrupted, use) as ranks:
        ranks.hear(0)
        time.sleep(IN_THE_WAIT_S)  # nothing shows from outside whether a rank waits
        sent = time.monotonic()
        ranks.kill(0, signal.SIGINT)
        ranks.hear_result(0)
        ranks.tell(1)
        ((error, text), noticed), ((peer_error, peer_text), _) = ranks.results()
        pid = ranks.pid(0)
    assert error == "KeyboardInterrupt", text
    assert noticed - sent < PROMPT_S
    assert peer_error == "PeerFailed", peer_text
    assert f"rank 0 (pid {pid})" in peer_text


def be_interrupted_in_init(rank: Rank) -> tuple[str, str]:
    rank.init()
    if rank.rank == 1:
        rank.hear()
        return "", ""
    rank.tell()
    return error_of(rota.Communicator)


def test_ctrl_c_while_a_communicator_is_made_raises_keyboard_interrupt() -> None:
    with Ranks(2, be_interrupted_in_init, timeout_s=15) as ranks:
        ranks.hear(0)
        time.sleep(IN_THE_WAIT_S)
        ranks.kill(0, signal.SIGINT)
        error, text = ranks.hear_result(0)
        ranks.tell(1)
        ranks.results()
    assert error == "KeyboardInterrupt", text


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
@pytest.mark.parametrize("use", ["all_reduce", "barrier", "send", "async", "future", "dist"])
@on_ranks(2)
def test_forked_child_use_raises_and_the_parent_goes_on(
    rank: Rank, use: str, used_async: bool
) -> None:
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
    error = run_in_child(calls[use])
    communicator.all_reduce(tensor)
    dist.all_reduce(tensor)
    check_error(error, "RotaError", "parent process", "after fork")
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
