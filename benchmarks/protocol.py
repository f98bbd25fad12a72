"""What the driver and its ranks say to each other, and the one timing loop that all ranks run.

Standard library only: the ranks of an MPI live in an environment without torch. Every rank holds
one UNIX socket to the driver and sleeps in `recv` until it is its turn. It must not spin there:
ranks usually fill the cores, so a spinning idle rank would slow down whoever is being measured.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from time import perf_counter_ns

# An api: rota.Communicator on tensors of rota.empty().
ROTA_EMPTY = "rota.empty"


@dataclass(frozen=True)
class Entry:
    """One way to call a collective: one line of the table per message size.

    Args:
        label: name in tables and pictures, unique in a run.
        backend: `rota`, `gloo`, the name of an MPI, or `memcpy`.
        api: the Python entry that is called, for example `torch.distributed`.
        algorithm: that argument of `rota.Communicator.all_reduce`.
        wire_dtype: that argument of `rota.Communicator.all_reduce` or `rota.HookState`, by name.
        bucket_cap_mb: that argument of DistributedDataParallel.
    """

    label: str
    backend: str
    api: str
    algorithm: str = "auto"
    wire_dtype: str | None = None
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Turn:
    """What one rank has to measure before the next backend gets the cores.

    Args:
        entry: what to call.
        op: the collective.
        dtype: element type by its torch name.
        num_elems: elements of the result on each rank; a multiple of world_size for all_gather.
        num_warmups: samples that are run and thrown away.
        num_samples: samples that are timed.
        batch: calls per sample, so that a sample is long against the clock's own cost.
        check_seed: for one more call, before the warm-up, whose result is checked; None for none.
    """

    entry: Entry
    op: str
    dtype: str
    num_elems: int
    num_warmups: int
    num_samples: int
    batch: int
    check_seed: int | None = None


@dataclass(frozen=True)
class Hello:
    """A rank is ready: what it runs on, and why it lacks a backend that was asked for."""

    rank: int
    pid: int
    versions: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A rank's measurement: ns per sample, and elements of the checked result that were wrong."""

    sample_ns: list[int]
    num_wrong: int | None


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as text."""

    text: str


def time_samples(call: Callable[[], object], turn: Turn) -> list[int]:
    """Durations in ns of `turn.num_samples` samples of `turn.batch` calls, after the warm-up.

    There is no barrier between samples: ranks are kept in step only by the collective itself, as in
    a training loop. The garbage collector is off, as in `timeit`.
    """
    for _ in range(turn.num_warmups * turn.batch):
        call()
    sample_ns = [0] * turn.num_samples
    calls = range(turn.batch)
    gc.disable()
    for sample in range(turn.num_samples):
        start_ns = perf_counter_ns()
        for _ in calls:
            call()
        sample_ns[sample] = perf_counter_ns() - start_ns
    gc.enable()
    return sample_ns


def serve(socket_path: str, hello: Hello, take_turn: Callable[[Turn], Reply]) -> None:
    """Answers the driver's turns until it says stop (None).

    Leaves at once, without any farewell to peers, when the driver is gone: they see the same, and a
    library's finalizer might wait for a peer that does not come.
    """
    with Client(socket_path, family="AF_UNIX") as driver:
        driver.send(hello)
        try:
            while (turn := driver.recv()) is not None:
                try:
                    reply: Reply | Failure = take_turn(turn)
                except Exception:
                    reply = Failure(traceback.format_exc().strip())
                driver.send(reply)
        except (EOFError, ConnectionError):
            os._exit(1)
