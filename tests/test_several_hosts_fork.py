"""A forked child of a rank of several hosts: a clear error, and the parent goes on."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, check_error
from several_hosts import TWO_BY_TWO, on_layout
from test_interrupts import run_in_child


@on_layout(TWO_BY_TWO)
def test_use_in_a_forked_child_raises_and_the_parent_goes_on(rank: Rank) -> None:
    rank.init()
    communicator = rota.Communicator()
    communicator.all_reduce(torch.ones(1), async_op=True).wait()
    tensor = torch.ones(3)
    peer = (rank.rank + 2) % 4  # on the other host
    calls: list[Callable[[], object]] = [
        lambda: communicator.all_reduce(tensor),
        lambda: communicator.all_reduce(tensor, async_op=True).wait(),
        lambda: communicator.send(tensor, peer),
        lambda: communicator.recv(tensor, peer),
        lambda: dist.all_reduce(tensor),
        dist.barrier,
    ]
    errors = [run_in_child(call) for call in calls]
    communicator.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [16.0] * 3
    for error in errors:
        check_error(error, "RotaError", "parent process", "after fork")


@pytest.mark.parametrize("how", ["close", "drop", "abort"])
@on_layout(TWO_BY_TWO)
def test_end_of_a_forked_child_does_not_disturb_the_parent(rank: Rank, how: str) -> None:
    rank.init()
    communicators = [rota.Communicator()]
    communicators[0].all_reduce(tensor := torch.ones(3))

    def drop() -> None:
        if how == "close":
            communicators[0].close()
            dist.destroy_process_group()
        elif how == "abort":
            communicators[0].abort("of no concern to the parent")
        communicators.clear()
        gc.collect()

    # Sooner or later while the parent's threads exchange signs of life.
    errors = [run_in_child(drop) for _ in range(3)]
    communicators[0].all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [64.0] * 3
    assert errors == [("nothing", "no exception was raised")] * 3


# Two hosts of one rank; each rank forks a child. All four leave by the end of the script, so each
# finalises Python and the process like an interpreter of its own.
SCRIPT = """
import os, sys, torch, torch.distributed as dist, rota
folder = sys.argv[1]
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        break
else:
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]
    sys.exit(max(codes, key=abs))
os.environ["ROTA_HOST_ID"] = f"host{rank}"
dist.init_process_group("rota", init_method=f"file://{folder}/store", rank=rank, world_size=2)
communicator = rota.Communicator()
communicator.all_reduce(torch.ones(3), async_op=True).wait()
child = os.fork()
if child != 0:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    communicator.all_reduce(total := torch.ones(3))
    assert (code, total.tolist()) == (0, [2.0] * 3), (code, total)
"""


def test_interpreters_of_parent_and_child_end_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=40)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # On a busy machine a rank may wait for more than a second, and says so.
    noise = [line for line in stderr.splitlines() if not line.endswith("; still waiting")]
    assert (process.returncode, noise) == (0, [])
