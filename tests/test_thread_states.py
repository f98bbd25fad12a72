"""Python's states of the progress threads: each thread has one, and no fork meets one that is made.

Up to 3.11.9, CPython waits for ever in a forked child if another thread was making or deleting its
state when the child was forked (python/cpython issue 112275).
"""

from __future__ import annotations

import ctypes
import threading

import torch
import torch.distributed as dist

import rota
from programs import run_python
from ranks import Rank, on_ranks

NUM_CALLS = 50


def num_states_made() -> int:
    """CPython numbers the states of its threads."""
    numbers = []

    def read_own_number() -> None:
        api = ctypes.pythonapi
        api.PyThreadState_Get.restype = ctypes.c_void_p
        api.PyThreadState_GetID.restype = ctypes.c_uint64
        state = ctypes.c_void_p(api.PyThreadState_Get())
        numbers.append(api.PyThreadState_GetID(state))

    thread = threading.Thread(target=read_own_number)
    thread.start()
    thread.join()
    return int(numbers[0])


@on_ranks(2)
def test_asynchronous_calls_make_no_more_thread_states_than_there_are_threads(rank: Rank) -> None:
    rank.init()
    communicator = rota.Communicator()
    peer = 1 - rank.rank
    before = num_states_made()
    for _ in range(NUM_CALLS):
        # What a progress thread drops last, it drops with the GIL held.
        communicator.all_reduce(torch.ones(10), async_op=True)
        dist.all_reduce(torch.ones(10), async_op=True)
        communicator.isend(torch.ones(10), peer)
        communicator.irecv(torch.ones(10), peer).wait()
        communicator.barrier()
        dist.barrier()
    communicator.close()
    dist.destroy_process_group()
    # One of num_states_made(), and one of each group's progress thread and of the attendant.
    assert num_states_made() - before <= 4


FORKS_WHILE_A_THREAD_STARTS = """
import os, time

works = []
done_before_the_fork = []

def start_a_progress_thread():
    works.append(communicator.all_reduce(torch.ones(1), async_op=True))
    time.sleep(0.2)
    done_before_the_fork.append(works[0].is_completed())

os.register_at_fork(before=start_a_progress_thread)  # the first to register is the last to run

import torch
import torch.distributed as dist
import rota

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
communicator = rota.Communicator()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
works[0].wait()
print(done_before_the_fork)
"""


def test_a_progress_thread_that_starts_while_its_process_forks_waits_for_the_fork() -> None:
    assert run_python("-c", FORKS_WHILE_A_THREAD_STARTS).stdout == "[False]\n"
