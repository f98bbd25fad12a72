"""Tensors in memory that the other ranks of the host can read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from rota import _C

_MADV_POPULATE_READ = 22  # Linux 5.14
# While one madvise() runs, no other thread of the process can map memory. Each takes up to a few
# milliseconds.
_ADVISED_AT_ONCE = 16 << 20
# Python's own madvise() keeps its lock.
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor that collectives need not copy, because peers read it where it lies.

    `all_reduce` (with any op) reads it in place if the tensors of all ranks were made by this
    function, `all_gather`, `gather` and `reduce_scatter` if all inputs were, and `broadcast` and
    `scatter` if the root's was. Contiguous parts of such tensors work, too; those of `scatter` and
    `reduce_scatter` must follow each other in one. Results have the same bits as with other
    tensors; only speed and memory traffic differ, for messages longer than a mailbox (64 KiB). An
    all_reduce with a wire dtype other than the tensor's own, or an algorithm other than "two_shot",
    goes through slots as always.

    No group is needed: all groups of the process can use the memory. It is reserved at once, in
    whole pages, and returns to the system when the last tensor that shares it is gone. A forked
    child shares it with its parent, as after `torch.Tensor.share_memory_`, but its collectives do
    not read it in place.

    With `torch.distributed`, call `backend.allocate_tensor(num_elems, dtype=..., device=...)`.

    Args:
        size: the size of each dimension, as for `torch.empty`: separate numbers or one sequence.
        dtype: any; torch's default dtype if None.

    Returns:
        A contiguous tensor of zeroes, aligned to a page.

    Raises:
        TypeError: a size is not an int, or dtype is not a torch.dtype.
        ValueError: a size is negative.
        rota.TransportError: there is too little memory, or `ulimit -v` leaves too few addresses;
            names the bytes needed and available.
    """
    if dtype is None:
        dtype = torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"rota.empty: dtype is {dtype!r}, expected a torch.dtype or None")
    lengths = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    try:
        shape = torch.Size(lengths)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"rota.empty: size is {lengths!r}, expected ints, or one sequence of them"
        ) from error
    # Also in inference mode a tensor that can be written to after it, as a buffer is.
    with torch.inference_mode(False):
        return _C.make_heap_tensor(shape, dtype)


def map_pages(memory: torch.Tensor) -> None:
    """Fills this process's page table for shared memory (uint8, from a page on), which the first
    accesses would do otherwise, and takes about as long as a copy. Other threads run meanwhile.
    Before Linux 5.14 it does nothing."""
    _advise(memory, _MADV_POPULATE_READ)


def unmap_pages(memory: torch.Tensor) -> None:
    """Empties this process's page table for shared memory, whose contents stay: closing the mapping
    later then takes no time in which other threads cannot map memory."""
    _advise(memory, mmap.MADV_DONTNEED)


def _advise(memory: torch.Tensor, advice: int) -> None:
    begin, length = memory.data_ptr(), len(memory)
    for offset in range(0, length, _ADVISED_AT_ONCE):
        _libc.madvise(begin + offset, min(_ADVISED_AT_ONCE, length - offset), advice)
