"""One MPI rank of the benchmark; runs in that MPI's own environment, with numpy and mpi4py only."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from mpi4py import MPI  # type: ignore[import-not-found]  # in the environments of mpi_env.py

import exact
from protocol import Hello, Reply, Turn, serve, time_samples

comm = MPI.COMM_WORLD


def take_turn(turn: Turn) -> Reply:
    """Checks one call if asked to, then times the collective on zeros, as torch_worker.py does."""
    output = np.zeros(turn.num_elems, turn.dtype)
    num_input_elems = turn.num_elems // (comm.size if turn.op == "all_gather" else 1)
    input = np.zeros(num_input_elems, turn.dtype)
    source = input if turn.op == "all_gather" else output
    output.fill(0)  # numpy's zeros are mapped only at the first write
    input.fill(0)
    call = collective(turn.op, output, input)
    num_wrong = None
    if turn.check_seed is not None:
        source[:] = np.resize(exact.input_tile(comm.rank, comm.size, turn.check_seed), source.shape)
        call()
        num_wrong = count_wrong(output, turn.op, turn.check_seed)
        source.fill(0)
    comm.Barrier()
    return Reply(time_samples(call, turn), num_wrong)


def collective(
    op: str, output: npt.NDArray[np.generic], input: npt.NDArray[np.generic]
) -> Callable[[], object]:
    """The call to time, with prebuilt buffer specifications, mpi4py's fastest form."""
    datatype = MPI.Datatype.fromcode(output.dtype.char)
    match op:
        case "all_reduce":
            return partial(comm.Allreduce, MPI.IN_PLACE, [output, datatype])
        case "broadcast":
            return partial(comm.Bcast, [output, datatype], 0)
        case "all_gather":
            return partial(comm.Allgather, [input, datatype], [output, datatype])
        case "barrier":
            return partial(comm.Barrier)
    raise ValueError(f"unknown collective {op}")


def count_wrong(output: npt.NDArray[np.generic], op: str, seed: int) -> int:
    """Elements of `output` that differ from the exact result."""
    tiles = exact.expected_tiles(op, comm.size, seed)
    parts = zip(np.split(output, len(tiles)), tiles, strict=True)
    return sum(
        int(np.count_nonzero(part != np.resize(tile.astype(part.dtype), part.shape)))
        for part, tile in parts
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    args = parser.parse_args()
    library = MPI.Get_library_version().splitlines()[0].split(", package")[0]
    serve(
        args.socket,
        Hello(comm.rank, os.getpid(), {"library": " ".join(library.split())}),
        take_turn,
    )


if __name__ == "__main__":
    main()
