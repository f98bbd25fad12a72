"""One torch rank of the benchmarks: rota, Gloo and the rooflines, one at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import amp_turn
import ddp_turn
import hook_turn
import tiles
from exact import MAX_FLOAT8_SUM, MAX_SUM
from operations import MESSAGES, OPERATIONS, Call, call_both, message_call
from protocol import FAKE_AND_BARRIER, ROTA_EMPTY, Entry, Hello, Reply, Turn, time_samples
from record import Run
from workers import Workers, serve

# torch 2.13 renamed them; the old names warn at every call, and the warning would be timed too.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_torch_ranks(
    workers: Workers, run: Run, num_ranks: int, entries: Sequence[Entry]
) -> tuple[list[Entry], dict[str, str]]:
    """Starts the ranks, which form one process group on this host, with the entries' backends;
    returns what `greet` does."""
    backends = {entry.backend for entry in entries}
    for rank in range(num_ranks):
        workers.fork(rank_main, rank, num_ranks, str(workers.folder / "store"), backends)
    return greet(workers, run, entries)


def greet(
    workers: Workers, run: Run, entries: Sequence[Entry]
) -> tuple[list[Entry], dict[str, str]]:
    """Waits until the ranks are ready; returns the entries whose backend is available, and the
    versions. A note says why others are not."""
    hello = workers.recv_all()[0]
    for reason in hello.missing.values():
        run.note(reason)
    return [entry for entry in entries if entry.backend not in hello.missing], hello.versions


def rank_main(pipe: Connection, rank: int, num_ranks: int, store: str, backends: set[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    worker = TorchRank(backends)
    pipe.send(Hello(worker.versions, worker.missing))
    serve(pipe, worker.take_turn)


class TorchRank:
    """The process groups of this rank; Gloo's is the default group, and synchronises ranks."""

    def __init__(self, backends: set[str]) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.groups: dict[str, dist.ProcessGroup | None] = {"gloo": dist.group.WORLD}
        self.versions = {"torch": str(torch.__version__)}
        self.missing: dict[str, str] = {}
        self.rota: ModuleType | None = None
        self.communicator: Any = None
        if "rota" in backends:
            self._start_rota()
        if "fake" in backends:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
            self.groups["fake"] = dist.new_group(backend="fake")
            self.groups[FAKE_AND_BARRIER] = self.groups["fake"]

    def _start_rota(self) -> None:
        try:
            import rota
        except ImportError as error:
            self.missing["rota"] = f"rota is not built: run make venv ({error})"
            self.missing[FAKE_AND_BARRIER] = f"{FAKE_AND_BARRIER} needs rota"
            return
        self.rota = rota
        self.versions["rota"] = rota.__version__
        self.groups["rota"] = dist.new_group(backend="rota")
        self.communicator = rota.Communicator()

    def take_turn(self, turn: Turn) -> Reply:
        """Checks one call if requested, then times calls; all ranks start together."""
        call: Call
        num_wrong: int | None = None
        match turn.entry.api:
            case "numpy":
                call = copy_call(turn)
            case hook_turn.TORCH_HOOK | hook_turn.ROTA_HOOK:
                call, num_wrong = hook_turn.hook_call(turn, self.rota, self.group_of(turn.entry))
            case api if api in amp_turn.APIS:
                call, num_wrong = amp_turn.amp_call(turn, self.rota, self.group_of(turn.entry))
            case ddp_turn.DDP_STEP:
                call = ddp_turn.step_call(turn)
            case _:
                call, num_wrong = self._collective_call(turn)
        dist.barrier()
        return Reply(time_samples(call, turn), num_wrong)

    def _collective_call(self, turn: Turn) -> tuple[Call, int | None]:
        """The call to time, and the number of wrong elements after a first one.

        It is timed on zeros: with other values an in-place all_reduce grows from call to call until
        it overflows.
        """
        operation = OPERATIONS[turn.op]
        dtype = getattr(torch, turn.dtype)
        empty: Callable[..., torch.Tensor] = torch.empty
        if turn.entry.api == ROTA_EMPTY:
            assert self.rota is not None
            empty = self.rota.empty
        output = empty(operation.output_elems(turn.num_elems, self.world_size), dtype=dtype).zero_()
        source = output
        if not operation.in_place:
            source = empty(operation.input_elems(turn.num_elems, self.world_size), dtype=dtype)
            source.zero_()
        if turn.entry.api in ("rota.Communicator", ROTA_EMPTY):
            call = self._communicator_call(turn.entry, turn.op, output, source)
        else:
            call = dist_call(turn.op, output, source, self.group_of(turn.entry))
        if turn.entry.backend == FAKE_AND_BARRIER:
            call = partial(call_both, call, self.communicator.barrier)
        moves_nothing = turn.entry.backend in ("fake", FAKE_AND_BARRIER)
        if turn.check_seed is None or moves_nothing:
            return call, None
        group = self.group_of(turn.entry)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        num_parts = num_ranks if operation.input_parts else 1
        # Partial sums must be exact on the wire, too.
        max_sum = MAX_FLOAT8_SUM if is_float8(turn.entry.wire_dtype) else MAX_SUM
        tiles.fill_with_input(source, rank, num_ranks, turn.check_seed, num_parts, max_sum)
        call()
        num_wrong = 0
        if rank == 0 or not operation.at_root:
            num_wrong = tiles.count_wrong(
                output, turn.op, num_ranks, turn.check_seed, max_sum=max_sum
            )
        source.zero_()
        return call, num_wrong

    def group_of(self, entry: Entry) -> dist.ProcessGroup | None:
        """None is the default group."""
        return self.groups[entry.backend]

    def _communicator_call(
        self, entry: Entry, op: str, output: torch.Tensor, input: torch.Tensor
    ) -> Call:
        is_root = self.rank == 0
        if op in MESSAGES:
            communicator = self.communicator
            return message_call(op, self.rank, output, communicator.send, communicator.recv)
        call = getattr(self.communicator, op)
        if entry.order != "rank":
            call = partial(call, order=entry.order)
        match op:
            case "all_reduce":
                options: dict[str, Any] = {"algorithm": entry.algorithm}
                if entry.wire_dtype is not None:
                    options["wire_dtype"] = getattr(torch, entry.wire_dtype)
                return partial(call, output, **options)
            case "reduce" | "broadcast":
                return partial(call, output)
            case "gather":
                return partial(call, output if is_root else None, input)
            case "scatter":
                return partial(call, output, input if is_root else None)
            case "barrier":
                return partial(call)
        return partial(call, output, input)


def is_float8(wire_dtype: str | None) -> bool:
    return wire_dtype is not None and wire_dtype.startswith("float8")


def dist_call(
    op: str, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None
) -> Call:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_root = rank == 0
    match op:
        case "all_reduce":
            return partial(dist.all_reduce, output, group=group)
        case "reduce":
            return partial(dist.reduce, output, 0, group=group)
        case "reduce_scatter":
            return partial(reduce_scatter_single, output, input, group=group)
        case "gather":
            parts = list(output.chunk(num_ranks)) if is_root else None
            return partial(dist.gather, input, parts, 0, group=group)
        case "scatter":
            parts = list(input.chunk(num_ranks)) if is_root else None
            return partial(dist.scatter, output, parts, 0, group=group)
        case "all_to_all":
            return partial(dist.all_to_all_single, output, input, group=group)
        case "broadcast":
            return partial(dist.broadcast, output, src=0, group=group)
        case "all_gather":
            return partial(all_gather_single, output, input, group=group)
        case op if op in MESSAGES:
            send, recv = (partial(function, group=group) for function in (dist.send, dist.recv))
            return message_call(op, rank, output, send, recv)
        case "barrier":
            return partial(dist.barrier, group=group)
    raise ValueError(f"unknown collective {op}")


def copy_call(turn: Turn) -> Call:
    """A memcpy of as many bytes as the collective's result: one call of libc's, one thread."""
    num_bytes = turn.num_elems * getattr(torch, turn.dtype).itemsize
    target, source = np.empty(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    source.fill(1)  # an untouched page has no memory yet
    return partial(np.copyto, target, source)
