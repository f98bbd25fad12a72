"""Registers the torch.distributed backend "rota"."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from rota import _C
from rota.communicator import DEFAULT_SLOT_BYTES


def _create(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> _C.ProcessGroupRota:
    return _C.ProcessGroupRota(store, rank, world_size, timeout, DEFAULT_SLOT_BYTES)


def register() -> None:
    """Makes `dist.init_process_group("rota")` known.

    Also for CUDA tensors, so that a call with one gets rota's own explanation of what is missing
    instead of torch's "no backend type associated with device type cuda".
    """
    dist.Backend.register_backend("rota", _create, devices=["cpu", "cuda"])
