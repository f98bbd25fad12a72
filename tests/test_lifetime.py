"""Making and ending communicators: nothing leaks, and no way to end one hangs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rota
from own_process import num_descriptors, num_mappings, num_threads, resident_bytes
from ranks import Rank, check_error, error_of, on_ranks

NUM_CYCLES = 50


@pytest.mark.parametrize("end", ["close", "del", "group"])
@on_ranks(2)
def test_fifty_communicators_leak_nothing(rank: Rank, end: str) -> None:
    rank.init()
    tensor = torch.ones(1000)

    def cycle() -> None:
        if end == "group":
            group = dist.new_group(backend="rota")
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            dist.destroy_process_group(group)
            return
        communicator = rota.Communicator()
        communicator.all_reduce(tensor)
        communicator.all_reduce(tensor, async_op=True).wait()
        if end == "close":
            communicator.close()

    samples = []
    for number in range(NUM_CYCLES + 5):
        cycle()
        if number in (4, NUM_CYCLES + 4):  # the first cycles fill caches
            dist.barrier()  # until the peer has released the last one, too
            gc.collect()
            samples.append((num_descriptors(), num_threads(), num_mappings(), resident_bytes()))
    before, after = samples
    assert after[0] == before[0], "file descriptors"
    assert after[1] == before[1], "threads"
    assert after[2] <= before[2] + 5, "mappings"  # malloc may add an arena
    # A leak would show: each cycle maps two regions, its own and the peer's, over 1 MiB each.
    assert after[3] <= before[3] + NUM_CYCLES * (100 << 10), "memory"


@on_ranks(2)
def test_close_waits_for_what_is_queued_and_later_calls_raise(rank: Rank) -> None:
    communicator = rank.communicator()
    tensors = [torch.full((300_000,), 1.0) for _ in range(5)]
    for tensor in tensors:
        communicator.all_reduce(tensor, async_op=True)
    communicator.close()
    communicator.close()
    assert {tensor[-1].item() for tensor in tensors} == {2.0}
    for call in (
        lambda: communicator.all_reduce(tensor),
        lambda: communicator.all_reduce(tensor, async_op=True),
        lambda: communicator.broadcast(tensor),
        lambda: communicator.all_gather(tensor.repeat(2), tensor),
        communicator.barrier,
    ):
        check_error(error_of(call), "RotaError", "closed", "make a new one")


@on_ranks(2)
def test_dropped_communicator_fails_its_pending_work_and_tells_peers(rank: Rank) -> None:
    """Rank 1 never calls, so rank 0's queued work cannot complete."""
    communicator = rank.communicator()
    communicator.barrier()
    tensor = torch.ones(300_000)
    if rank.rank == 0:
        works = [communicator.all_reduce(tensor, async_op=True) for _ in range(3)]
        del communicator
        gc.collect()
        rank.say()
        error, text = error_of(works[-1].wait)
    else:
        rank.await_word()
        error, text = error_of(communicator.all_reduce, tensor)
    assert error in ("PeerFailed", "RotaError"), text
    assert "dropped its communicator" in text


@pytest.mark.parametrize(
    ("what", "how", "kind"),
    [
        ("recv", "close", "RotaError"),
        ("recv-any", "close", "RotaError"),
        ("irecv", "close", "RotaError"),
        ("dist.recv", "destroy", "RotaError"),
        ("recv", "abort", "PeerFailed"),
        ("send", "abort", "PeerFailed"),
        ("all_reduce", "abort", "PeerFailed"),
        ("queued", "abort", "PeerFailed"),
        ("window", "close", "PeerFailed"),
    ],
)
@on_ranks(2)
def test_end_of_a_communicator_ends_the_waits_of_its_threads(
    rank: Rank, what: str, how: str, kind: str
) -> None:
    """Rank 1 sends nothing, and calls nothing."""
    rank.init()
    communicator = rota.Communicator()
    window = rota.Window(1)
    tensor = torch.ones(10)
    if rank.rank == 1:
        rank.await_word()
        return
    calls: dict[str, Callable[[], object]] = {
        "recv": lambda: communicator.recv(tensor, 1),
        "recv-any": lambda: communicator.recv(tensor),
        "irecv": lambda: communicator.irecv(tensor, 1).wait(),
        "send": lambda: communicator.send(torch.ones(1 << 20), 1),
        "dist.recv": lambda: dist.recv(tensor, 1),
        "all_reduce": lambda: communicator.all_reduce(tensor),
        "queued": lambda: communicator.all_reduce(tensor, async_op=True).wait(),
        "window": lambda: window.wait_signal(1),
    }
    ends: dict[str, Callable[[], object]] = {
        "close": window.close if what == "window" else communicator.close,
        "abort": lambda: communicator.abort("enough"),
        "destroy": dist.destroy_process_group,
    }
    errors: list[tuple[str, str]] = []
    waiting = threading.Thread(target=lambda: errors.append(error_of(calls[what])))
    waiting.start()
    time.sleep(0.2)
    ends[how]()
    waiting.join(10)
    rank.say()
    assert [error for error, _ in errors] == [kind], "or it hangs"


@on_ranks(2, timeout_s=20)
def test_communicator_dropped_by_a_callback_ends_well(rank: Rank) -> None:
    """The progress thread drops the last reference, and cannot wait for itself."""
    holder = [rank.communicator()]
    tensor = torch.ones(100_000)
    dropped = threading.Event()
    holder[0].barrier()
    future = holder[0].all_reduce_future(tensor, "avg", None)

    def drop(_: object) -> None:
        holder.clear()
        dropped.set()

    future.then(drop)
    future.wait()
    if not dropped.wait(10):
        raise AssertionError("the callback did not come to its end")
    assert tensor[-1].item() == 1.0


# How an interpreter can end, and what it then prints.
ENDS = {
    "callback": "",
    "destroy": "",
    "exit": "",
    "pending": "",
    "raise": "stopped on purpose\n",
}
# Forks two ranks for each way to end, so that torch is loaded once. The forks leave by the end of
# the script, so each finalises Python and the process like an interpreter of its own.
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, rota
folder, *ends = sys.argv[1:]
path_of_child = {}
for end, rank in [(end, rank) for end in ends for rank in range(2)]:
    path = f"{folder}/{end}{rank}"
    pid = os.fork()
    if pid == 0:
        break
    path_of_child[pid] = path
else:
    while path_of_child:
        pid, status = os.wait()
        with open(path_of_child.pop(pid) + ".code", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
    sys.exit()
os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
dist.init_process_group("rota", init_method=f"file://{folder}/{end}", rank=rank, world_size=2)
communicator = rota.Communicator()
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
communicator.all_reduce(tensor)
work = communicator.all_reduce(tensor, async_op=True)
if end != "pending":
    work.wait()
dist.all_reduce(torch.ones(10), async_op=True).wait()
assert end == "pending" or tensor[-1].item() == 8.0
if end == "callback":
    # Python runs it on the progress thread, which would still want the GIL when Python has ended.
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    future.then(lambda _: time.sleep(0.2))
if end == "destroy":
    communicator.close()
    dist.destroy_process_group()
if end == "raise":
    raise SystemExit("stopped on purpose")
"""


def test_interpreter_end_is_quiet_and_prompt(tmp_path: Path) -> None:
    """All other tests run in forks that never finalise Python."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *ENDS],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        start_new_session=True,
    )
    # If it does not end, the ranks that hang have no exit code below.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    paths = {f"{end}{rank}": end for end in ENDS for rank in range(2)}
    texts = {name: (tmp_path / name).read_text() for name in paths}
    assert texts == {name: ENDS[end] for name, end in paths.items()}
    codes = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.code")}
    assert codes == {name: int(end == "raise") for name, end in paths.items()}
