"""A sandbox that refuses a system call: rota goes on without it, or says which one it needs.

Rank 0 installs a filter (seccomp(2)) under which one call fails, as under a container's profile
(EPERM) or an older Linux (ENOSYS). Calls that Python itself needs are not among them.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
import time

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, error_of, run_ranks

# By name: the numbers on x86-64 and on aarch64.
CALLS = {
    "accept4": (288, 242),
    "fallocate": (285, 47),
    "futex_waitv": (449, 449),
    "getcpu": (309, 168),
    "madvise": (28, 233),
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "socket": (41, 198),
}
# Those that an older Linux may lack.
RECENT = ("accept4", "futex_waitv", "memfd_create", "pidfd_open")
NEEDED = ("memfd_create", "fallocate", "socket")  # which an error then names
MACHINES = ("x86_64", "aarch64")

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
FAIL_WITH, ALLOW = 0x00050000, 0x7FFF0000


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse(number: int, code: int) -> bool:
    """Lets the system call fail in this process from now on; False if filters are not allowed."""
    lines = [
        (LOAD_NUMBER, 0, 0, 0),
        (JUMP_IF_EQUAL, 0, 1, number),
        (RETURN, 0, 0, FAIL_WITH | code),
        (RETURN, 0, 0, ALLOW),
    ]
    text = b"".join(struct.pack("HBBI", *line) for line in lines)
    program = Program(len(lines), text)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program)) == 0)


def use_everything(rank: Rank) -> float:
    """Returns the processor time of a wait of half a second."""
    rank.init(timeout_s=20)
    communicator = rota.Communicator()
    peer = 1 - rank.rank
    for num_elems in (1, 1 << 20):
        total = torch.ones(num_elems)
        communicator.all_reduce(total)
        communicator.all_reduce(total, async_op=True).wait()
        assert total.eq(4).all()
        work = communicator.isend(total, peer)
        communicator.recv(torch.zeros(num_elems), peer)
        work.wait()
    window = rota.Window(4)
    window.put(torch.ones(4), peer)
    window.signal(peer)
    window.wait_signal(peer)
    assert window.tensor.eq(1).all()
    dist.barrier()
    if rank.rank == 1:
        time.sleep(0.5)
    began = time.process_time()
    communicator.barrier()
    return time.process_time() - began


def run_refused(rank: Rank, number: int, code: int) -> tuple[tuple[str, str], float] | None:
    if rank.rank == 0 and not refuse(number, code):
        return None
    seconds: list[float] = []
    error = error_of(lambda: seconds.append(use_everything(rank)))
    return error, seconds[0] if seconds else 0.0


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="numbers of other calls"
)
@pytest.mark.parametrize(
    ("call", "code"),
    [*((call, errno.EPERM) for call in CALLS), *((call, errno.ENOSYS) for call in RECENT)],
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_refused_system_call_is_done_without_or_named(call: str, code: int) -> None:
    number = CALLS[call][MACHINES.index(platform.machine())]
    results = run_ranks(2, run_refused, number, code)
    if results[0] is None:
        pytest.skip("filters of system calls are not allowed here")
    errors = [error for error, _ in results]
    if call in NEEDED and errors[0][0] != "nothing":
        assert [kind for kind, _ in errors] == ["TransportError"] * 2, errors
        assert call in errors[0][1]
    else:
        assert [kind for kind, _ in errors] == ["nothing"] * 2, errors
        assert results[0][1] < 0.25, "a wait that spins"
