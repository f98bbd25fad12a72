"""No method waits for a lock of rota's with Python's lock, which the lock's holder may want.

A thread waits in a call of a group or window, and holds whatever such a call holds. Every method is
then called in a thread of its own. Some wait, too, which is fine, but not with Python's lock: the
whole process would stand still. tests/test_includes.py looks for such locks in the text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import Rank, error_of, on_ranks
from rota import _C

CPU = torch.device("cpu")
LATER = timedelta(seconds=55)
Calls = dict[str, Callable[[], object]]


def own_names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def calls_of_communicator(communicator: rota.Communicator) -> Calls:
    ones, two, stats = torch.ones(2), torch.ones(4), torch.zeros(2, dtype=torch.float64)
    wire = {"wire_dtype": torch.float32, "block_scaling": False}
    shards = _C.ShardedBucket([ones], torch.tensor([[0, 2, 0, 0]]), communicator.rank, 2)
    shard_stats = torch.zeros(_C.SHARD_STATS, dtype=torch.int64)
    calls: Calls = {
        "all_reduce": lambda: communicator.all_reduce(ones),
        "all_reduce_future": lambda: communicator.all_reduce_future(ones, "sum", None).wait(),
        "reduce": lambda: communicator.reduce(ones),
        "reduce_bucket": lambda: communicator.reduce_bucket(ones, stats, **wire),
        "reduce_bucket_future": lambda: communicator.reduce_bucket_future(ones, stats, **wire),
        "reduce_shards_future": lambda: communicator.reduce_shards_future(
            shards, ones, shard_stats, **wire
        ),
        "update_shards": lambda: communicator.update_shards(shards, [None]),
        "all_gather": lambda: communicator.all_gather(two, ones),
        "reduce_scatter": lambda: communicator.reduce_scatter(ones, two),
        "broadcast": lambda: communicator.broadcast(ones),
        "gather": lambda: communicator.gather(two, ones),
        "scatter": lambda: communicator.scatter(ones, two),
        "all_to_all": lambda: communicator.all_to_all(two, torch.ones(4)),
        "barrier": communicator.barrier,
        "send": lambda: communicator.send(torch.ones(1 << 20), 1),
        "isend": lambda: communicator.isend(ones, 1).is_completed(),
        "recv": lambda: communicator.recv(torch.ones(2), 1),
        "irecv": lambda: communicator.irecv(torch.ones(2)).wait(),
        "connect_device": lambda: communicator.connect_device(CPU),
        "check_results": communicator.check_results,
    }
    for name in (
        "rank",
        "world_size",
        "hosts",
        "num_hosts",
        "numa_nodes",
        "peer_access",
        "has_failed",
    ):
        calls[name] = lambda name=name: getattr(communicator, name)
    calls["close"] = communicator.close
    calls["abort"] = lambda: communicator.abort("the end of the test")
    assert set(calls) == own_names(_C.Communicator)
    return calls


def calls_of_backend(group: dist.ProcessGroup) -> Calls:
    backend = group._get_backend(CPU)
    ones, two = torch.ones(2), torch.ones(4)
    calls: Calls = {
        "set_timeout": lambda: backend.set_timeout(LATER),
        "set_timeout of the group": lambda: group.set_timeout(LATER),
        "second call": lambda: dist.all_reduce(ones, group=group),
        "queued": lambda: dist.all_reduce(ones, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(two, ones, group=group),
        "isend": lambda: dist.isend(ones, group=group, group_dst=1),
        "irecv": lambda: dist.irecv(torch.ones(2), group=group, group_src=1),
        "recv_anysource": lambda: dist.recv(torch.ones(2), group=group),
        "batch": lambda: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones, group=group, group_peer=1)]
        ),
        "monitored_barrier": lambda: dist.monitored_barrier(group),
        "sequence number": lambda: backend._get_sequence_number_for_group(),
        "all_gather_in": lambda: backend.all_gather_in(torch.float16, False, two, ones, True),
        "reduce_scatter_in": lambda: backend.reduce_scatter_in(
            torch.float16, ones, two, dist.ReduceOp(dist.ReduceOp.SUM), True
        ),
        "spans_hosts": lambda: backend.spans_hosts([0, 1]),
        "why_ended": lambda: backend.why_ended(1),
        "check_results": lambda: backend.check_results(),
        "get_error": lambda: backend.get_error(),
        "perform_nocolor_split": lambda: backend.perform_nocolor_split(CPU),
        "eager_connect": lambda: backend.eager_connect_single_device(CPU),
        "allocate": lambda: backend.allocate_tensor(5, dtype=torch.float32, device=CPU),
        "supports_tensor_alloc": lambda: backend.supports_tensor_alloc(CPU),
    }
    for name in ("options", "supports_splitting", "supports_coalescing", "mem_allocator"):
        calls[name] = lambda name=name: getattr(backend, name)
    calls["shutdown"] = backend.shutdown
    calls["abort"] = backend.abort
    assert set(calls) >= own_names(_C.ProcessGroupRota)
    return calls


def calls_of_window(window: rota.Window) -> Calls:
    ones = torch.ones(2)
    calls: Calls = {
        "put": lambda: window.put(ones, 1),
        "get": lambda: window.get(torch.ones(2), 1),
        "accumulate": lambda: window.accumulate(ones, 1),
        "view": lambda: window.view(1),
        "signal": lambda: window.signal(1),
        "wait_signal": lambda: window.wait_signal(1),
        "wait_any_signal": lambda: window.wait_any_signal([0, 1]),
        "num_signals": lambda: window.num_signals(1),
        "is_alive": lambda: window.is_alive(1),
        "rank": lambda: window.rank,
        "world_size": lambda: window.world_size,
        "close": window.close,
    }
    assert set(calls) == own_names(_C.Window)
    return calls


@pytest.mark.parametrize("what", ["connecting", "group", "communicator", "window"])
@on_ranks(2, timeout_s=40)
def test_no_method_waits_with_pythons_lock(rank: Rank, what: str) -> None:
    """Rank 1 makes none of the calls; the last ones of a list end all waits."""
    rank.init()
    calls: Calls
    if what == "connecting":  # a subgroup's first call, which waits until rank 1 has made it
        if rank.rank == 1:
            return rank.await_word()
        group = dist.new_group([0, 1])
        calls, first = calls_of_backend(group), "second call"
    elif what == "group":
        dist.all_reduce(torch.ones(1))
        calls, first = calls_of_backend(dist.group.WORLD), "second call"
    elif what == "communicator":
        calls, first = calls_of_communicator(rota.Communicator()), "all_reduce"
    else:
        calls, first = calls_of_window(rota.Window(2)), "wait_signal"
    if rank.rank == 1:
        return rank.await_word()
    threads: list[threading.Thread] = []

    def start(name: str) -> None:
        thread = threading.Thread(target=error_of, args=[calls[name]], name=name, daemon=True)
        thread.start()
        threads.append(thread)
        time.sleep(0.01)  # from which this thread comes back only with Python's lock

    start(first)
    time.sleep(0.1)
    for name in calls:
        start(name)
    for thread in threads:
        thread.join(20)
    rank.say()
    assert [thread.name for thread in threads if thread.is_alive()] == []
