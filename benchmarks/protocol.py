"""What ranks are asked to measure, and the timing loop that they all use.

Standard library only: MPI ranks run in an environment without torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns

# An entry's api: rota.Communicator on tensors of rota.empty().
ROTA_EMPTY = "rota.empty"
# An entry's backend: torch's fake backend, which moves nothing and waits for nobody, and then
# rota.Communicator.barrier(). What torch itself takes when ranks wait for each other in every call:
# where they share cores, each then finds its core's caches full of another's code.
FAKE_AND_BARRIER = "fake+barrier"


@dataclass(frozen=True)
class Entry:
    """One way to call a collective; the table has a line for it at each message size.

    Args:
        label: name in tables and pictures, unique in a run.
        backend: `rota`, `gloo`, the name of an MPI, or `memcpy`.
        api: the Python interface that is called, for example `torch.distributed`.
        algorithm: argument of `rota.Communicator.all_reduce`.
        wire_dtype: argument of `rota.Communicator.all_reduce` or `rota.HookState`, by name.
        order: argument of what sums in `rota.Communicator`.
        bucket_cap_mb: argument of DistributedDataParallel.
    """

    label: str
    backend: str
    api: str
    algorithm: str = "auto"
    wire_dtype: str | None = None
    order: str = "rank"
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Turn:
    """The measurement that one rank must make before the next backend's turn.

    Args:
        op: of operations.py.
        dtype: element type by its torch name.
        num_elems: elements of the message, a multiple of what Operation.num_parts returns.
        batch: calls per sample, so that a sample is long compared with the clock's overhead.
        check_seed: of an extra call before the warm-up, whose result is checked.
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
    """A rank is ready: its software, and why a requested backend is missing."""

    versions: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A rank's measurement: ns per sample, and the number of wrong elements, if checked."""

    sample_ns: list[int]
    num_wrong: int | None


def time_samples(call: Callable[[], object], turn: Turn) -> list[int]:
    """Durations in ns of `turn.num_samples` samples of `turn.batch` calls, after the warm-up.

    There is no barrier between samples: as in a training loop, only the collective itself
    synchronises ranks. The garbage collector is off, as in `timeit`.
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
