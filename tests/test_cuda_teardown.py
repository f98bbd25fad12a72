"""Ranks that close their communicators free no memory that kernels of other ranks still use.

Always on simulated GPUs, where accessing memory that another process has freed faults, and
unmapping such memory is reported.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import check_error, error_of
from simulated_processes import (
    SimulatedProcesses,
    contribution,
    cuda_runtime,
    init_group,
    sum_of_two,
    values_of,
)

WORLD_SIZE = 2
PATIENCE_S = 2.0  # how long ranks wait for each other (core/joined_regions.cpp)
LATE_S = 0.5  # far less than that, but far more than a kernel takes
FREED_TOO_EARLY = "another process has freed"


# How ranks map each other's memory: the environment, and the resulting peer_access.
IPC = ({"ROTA_PEER_MEMORY": "ipc"}, "CUDA IPC")
SYMMETRIC = (
    {"ROTA_PEER_MEMORY": "symmetric", "SIMULATED_GPU_SYMMETRIC_MEMORY": "1"},
    "torch's symmetric memory",
)
of_each_memory = pytest.mark.parametrize("memory", [IPC, SYMMETRIC], ids=["ipc", "symmetric"])


def connect(rank: int, store_path: str, world_size: int = WORLD_SIZE) -> rota.Communicator:
    if not dist.is_initialized():
        init_group(rank, world_size, store_path)
    comm = rota.Communicator()
    comm.connect_device(torch.device("cuda", 0))
    assert comm.peer_access != "the host's memory"
    return comm


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def sleep(_: int | None) -> None:
    time.sleep(LATE_S)


def hold_up_stream() -> None:
    """Delays work that is queued on the current stream from now on."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert cuda_runtime().cudaLaunchHostFunc(stream, sleep, None) == 0


def leave(holder: list[rota.Communicator], how: str) -> float:
    """Ends the communicator in `holder`; returns how many seconds that took."""
    began = time.monotonic()
    if how == "close":
        holder[0].close()
    elif how == "drop":
        holder.clear()
    elif how == "exit":
        atexit._run_exitfuncs()
    return time.monotonic() - began


def run_ranks(
    processes: SimulatedProcesses,
    function: Callable[..., object],
    tmp_path: Path,
    *args: object,
    **options: Any,
) -> list[Any]:
    """Returns what each rank returned; checks that memory was unmapped before it was freed."""
    outcomes = processes.ranks(function, tmp_path, *args, **options)
    for outcome in outcomes:
        assert FREED_TOO_EARLY not in outcome.stderr, outcome.stderr
    return values_of(outcomes)


# ---- a rank that finishes before its peer starts


def leave_before_late_kernel(rank: int, store_path: str, how: str, means: str) -> float:
    """The root of a short broadcast does not wait for the receivers."""
    holder = [connect(rank, store_path)]
    assert holder[0].peer_access == means
    tensor = contribution(rank).cuda()
    if rank == 1:
        hold_up_stream()
    holder[0].broadcast(tensor, 0)
    if rank == 1:
        assert torch.equal(tensor.cpu(), contribution(0))
    return leave(holder, how)


@of_each_memory
@pytest.mark.parametrize("how", ["close", "drop", "exit"])
def test_rank_that_leaves_early_waits_for_a_late_kernel(
    how: str, memory: tuple[dict[str, str], str], processes: SimulatedProcesses, tmp_path: Path
) -> None:
    """The late kernel stores into the root's memory to signal that it has read the message."""
    environment, means = memory
    of_root, of_peer = run_ranks(
        processes, leave_before_late_kernel, tmp_path, how, means, **environment
    )
    assert LATE_S / 2 < of_root < PATIENCE_S
    assert of_peer < PATIENCE_S


ALGORITHMS = ("one_shot", "low_latency", "two_shot", "ring", "ordered_ring")


def leave_behind_every_algorithm(rank: int, store_path: str) -> None:
    for turn, algorithm in enumerate(ALGORITHMS):
        holder = [connect(rank, store_path, 3)]
        tensor = contribution(rank).cuda()
        holder[0].all_reduce(tensor, "sum", algorithm)
        leave(holder, ("close", "drop")[turn % 2])
        assert torch.equal(tensor.cpu(), sum(contribution(peer) for peer in range(3)))


@pytest.mark.parametrize("seed", range(2))
def test_ranks_leave_behind_kernels_that_run_as_they_like(
    seed: int, processes: SimulatedProcesses, tmp_path: Path
) -> None:
    naps = {"SIMULATED_GPU_NAP_US": "50000", "SIMULATED_GPU_SEED": str(seed)}
    run_ranks(processes, leave_behind_every_algorithm, tmp_path, world_size=3, **naps)


# ---- peers that do not close


def leave_while_peer_is_killed(rank: int, store_path: str) -> float:
    holder = [connect(rank, store_path)]
    if rank == 1:
        time.sleep(LATE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    return leave(holder, "close")


def test_peer_killed_meanwhile_is_not_waited_for(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    survivor, killed = processes.ranks(leave_while_peer_is_killed, tmp_path)
    values_of([survivor])
    assert killed.error is not None and str(-signal.SIGKILL) in killed.error
    assert LATE_S / 2 < survivor.value < PATIENCE_S * 0.8


def leave_one_that_stays(rank: int, store_path: str) -> float:
    holder, other = [connect(rank, store_path)], connect(rank, store_path)
    tensor = contribution(rank).cuda()
    holder[0].all_reduce(tensor)
    seconds = leave(holder, "close") if rank == 0 else 0.0
    other.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), 2 * sum_of_two())
    if rank == 1:
        # It still maps memory that rank 0 has freed, but no longer uses it.
        seconds = leave(holder, "close")
    leave([other], "close")
    return seconds


def test_peer_that_never_closes_is_waited_for_in_bounds(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    first, second = values_of(processes.ranks(leave_one_that_stays, tmp_path))
    assert PATIENCE_S * 0.8 < first < PATIENCE_S * 1.5
    assert second < PATIENCE_S * 0.5  # the other rank has already left


def leave_in_another_order(rank: int, store_path: str) -> float:
    comms = [connect(rank, store_path) for _ in range(2)]
    tensor = contribution(rank).cuda()
    for comm in comms:
        comm.all_reduce(tensor)
    del comm
    began = time.monotonic()
    while comms:
        comms.pop(0 if rank == 0 else -1)
    return time.monotonic() - began


def test_communicators_dropped_in_another_order_end_in_bounds(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    # Each waits once until the limit, then finds that the other has left.
    for seconds in values_of(processes.ranks(leave_in_another_order, tmp_path)):
        assert PATIENCE_S * 0.8 < seconds < PATIENCE_S * 1.8


# ---- forks


def drop_in_forked_child(rank: int, store_path: str) -> float:
    """The child shares the parent's memory and must not report the parent's kernels as done."""
    holder = [connect(rank, store_path)]
    holder[0].barrier()
    if rank == 0:
        time.sleep(LATE_S)  # by then rota's threads wait: the hard case for a forked child
        pid = os.fork()
        if pid == 0:
            holder.clear()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.barrier()
    if rank == 0:
        time.sleep(LATE_S)
    return leave(holder, "close")


def test_forked_child_has_no_part_in_it(processes: SimulatedProcesses, tmp_path: Path) -> None:
    _, waited = run_ranks(processes, drop_in_forked_child, tmp_path)
    assert waited > LATE_S / 2


def close_before_the_others(rank: int, store_path: str) -> tuple[str, str] | None:
    """Rank 0 closes its window, which the others still map."""
    init_group(rank, 3, store_path)
    window = rota.Window(1000, dtype=torch.float32, device="cuda")
    window.tensor.fill_(rank + 1.0)
    torch.cuda.synchronize()
    view = window.view(0)
    dist.barrier()
    if rank == 0:
        del view
        window.close()
        assert error_of(lambda: window.tensor) is not None
        del window
    dist.barrier()
    if rank == 0:
        dist.barrier()
        return None
    assert view.cpu().eq(1).all()
    error = error_of(lambda: window.put(torch.ones(1), 0))
    dist.barrier()
    return error


@of_each_memory
def test_memory_of_a_closed_window_stays_while_others_map_it(
    memory: tuple[dict[str, str], str], processes: SimulatedProcesses, tmp_path: Path
) -> None:
    environment, _ = memory
    _, *errors = run_ranks(
        processes, close_before_the_others, tmp_path, world_size=3, **environment
    )
    for error in errors:
        check_error(error, "PeerFailed", "rank 0")
