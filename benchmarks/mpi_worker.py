"""One MPI rank of the benchmark; runs in that MPI's own environment, with numpy and mpi4py only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
from mpi4py import MPI  # type: ignore[import-not-found]  # in the environments of mpi_env.py

import exact
from operations import MESSAGES, OPERATIONS, message_call
from protocol import Hello, Reply, Turn, time_samples
from workers import join, serve

comm = MPI.COMM_WORLD


def take_turn(turn: Turn) -> Reply:
    """Checks one call if asked to, then times the collective on zeros, as torch_worker.py does."""
    operation = OPERATIONS[turn.op]
    output = np.zeros(operation.output_elems(turn.num_elems, comm.size), turn.dtype)
    output.fill(0)  # numpy's zeros are mapped only at the first write
    source = output
    if not operation.in_place:
        source = np.zeros(operation.input_elems(turn.num_elems, comm.size), turn.dtype)
        source.fill(0)
    call = collective(turn.op, output, source)
    num_wrong = None
    if turn.check_seed is not None:
        tile = exact.input_tile(comm.rank, comm.size, turn.check_seed)
        for part in np.split(source, comm.size if operation.input_parts else 1):
            part[:] = np.resize(tile, part.shape)
        call()
        has_result = comm.rank == 0 or not operation.at_root
        num_wrong = count_wrong(output, turn.op, turn.check_seed) if has_result else 0
        source.fill(0)
    comm.Barrier()
    return Reply(time_samples(call, turn), num_wrong)


def collective(
    op: str, output: npt.NDArray[np.generic], input: npt.NDArray[np.generic]
) -> Callable[[], object]:
    """The call to time, with prebuilt buffer specifications, mpi4py's fastest form."""
    datatype = MPI.Datatype.fromcode(output.dtype.char)
    sent, received = [input, datatype], [output, datatype]
    is_root = comm.rank == 0
    match op:
        case "all_reduce":
            return partial(comm.Allreduce, MPI.IN_PLACE, received)
        case "reduce" if is_root:
            return partial(comm.Reduce, MPI.IN_PLACE, received, MPI.SUM, 0)
        case "reduce":
            return partial(comm.Reduce, sent, None, MPI.SUM, 0)
        case "reduce_scatter":
            return partial(comm.Reduce_scatter_block, sent, received)
        case "broadcast":
            return partial(comm.Bcast, received, 0)
        case "all_gather":
            return partial(comm.Allgather, sent, received)
        case "gather":
            return partial(comm.Gather, sent, received if is_root else None, 0)
        case "scatter":
            return partial(comm.Scatter, sent if is_root else None, received, 0)
        case "all_to_all":
            return partial(comm.Alltoall, sent, received)
        case op if op in MESSAGES:
            return message_call(op, comm.rank, received, comm.Send, comm.Recv)
        case "barrier":
            return partial(comm.Barrier)
    raise ValueError(f"unknown collective {op}")


def count_wrong(output: npt.NDArray[np.generic], op: str, seed: int) -> int:
    tiles = exact.expected_tiles(op, comm.size, seed)
    parts = zip(np.split(output, len(tiles)), tiles, strict=True)
    return sum(
        int(np.count_nonzero(part != np.resize(tile.astype(part.dtype), part.shape)))
        for part, tile in parts
    )


def rank_main(pipe: Connection, args: argparse.Namespace) -> None:
    library = MPI.Get_library_version().splitlines()[0].split(", package")[0]
    pipe.send(Hello({"library": " ".join(library.split())}))
    serve(pipe, take_turn)


if __name__ == "__main__":
    join(comm.rank, rank_main, argparse.ArgumentParser(description=__doc__))
