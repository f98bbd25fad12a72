"""Helpers of this folder's tests: copy data made on the CPU to the GPU and back.

All ranks use the first GPU, as processes or as local ranks of one process. Only tests marked
torch_kernels let torch compute on the GPU; all others also run on a simulated GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence

import torch

import ranks
import rota
from oracle import assert_same

DEVICE = torch.device("cuda", 0)
# A simulated GPU computes on the CPU.
SLOWNESS = 3.0 if "SIMULATED_GPUS" in os.environ else 1.0
# Time limit of ranks, so that a hang wastes little GPU time, and of a single wait: shorter, so that
# a rank that waits in vain can still name its peer.
LIMIT_S = 20.0 * SLOWNESS
WAIT_S = 10.0 * SLOWNESS
CANARY_ELEMS = 64
CANARY = 1
MAX_LOW_LATENCY_BYTES = 8192  # longer messages are not tested with low_latency
# Around the boundaries of 16-byte accesses, a block's share, granules, tiles and shards.
SIZES = (0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2049, 65_537, 300_007)


class Guarded:
    """A tensor on the GPU that starts `offset` elements into its storage, with canaries around."""

    def __init__(self, source: torch.Tensor, offset: int = 0) -> None:
        self._num_elems, self._offset = source.numel(), offset
        storage = torch.full((offset + source.numel() + CANARY_ELEMS,), CANARY).to(source.dtype)
        storage[offset : offset + source.numel()] = source
        self._storage = storage.to(DEVICE)
        self.tensor = self._storage[offset : offset + source.numel()]

    def get(self, case: str) -> torch.Tensor:
        """The current contents, on the CPU; fails if a canary has changed."""
        storage = self._storage.cpu()
        around = [storage[: self._offset], storage[self._offset + self._num_elems :]]
        for canaries in around:
            if canaries.to(torch.float64).ne(CANARY).any():
                raise AssertionError(f"{case}: memory around the tensor was written")
        return storage[self._offset : self._offset + self._num_elems]


def check_each(
    guarded: Sequence[Guarded], expected: torch.Tensor | Sequence[torch.Tensor], case: str
) -> None:
    """Checks each rank's tensor bit for bit; `expected` is one for all ranks, or one per rank."""
    for rank, one in enumerate(guarded):
        wanted = expected if isinstance(expected, torch.Tensor) else expected[rank]
        assert_same(one.get(f"{case}, rank {rank}"), wanted, f"{case}, rank {rank}")


run_ranks = functools.partial(ranks.run_ranks, timeout_s=LIMIT_S)
on_ranks = functools.partial(ranks.on_ranks, timeout_s=LIMIT_S)


def init(rank: ranks.Rank, backend: str = "rota") -> None:
    """Makes the default group."""
    torch.cuda.set_device(DEVICE)
    rank.init(backend, timeout_s=WAIT_S)


def check_refused(calls: Mapping[str, Callable[[], object]], *kinds: str) -> None:
    """Each call raises an error of one of these kinds, which names rota."""
    for what, call in calls.items():
        error, text = ranks.error_of(call)
        assert error in kinds and "rota" in text, (what, error, text)


def connect(rank: ranks.Rank, *, timeout_s: float = WAIT_S) -> rota.Communicator:
    """A communicator with connected GPUs: staging through the host would give the same bits."""
    torch.cuda.set_device(DEVICE)
    communicator = rank.communicator(timeout_s=timeout_s)
    communicator.connect_device(DEVICE)
    assert rank.world_size == 1 or communicator.peer_access != "the host's memory"
    return communicator


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph captured from `body`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph
