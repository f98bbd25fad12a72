"""Registers the torch.distributed backend "rota"."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from rota import _C
from rota.communicator import DEFAULT_SLOT_BYTES


def _create(options: _DistributedBackendOptions, _: object) -> _C.ProcessGroupRota:
    timeout = options.timeout

    def make_nccl(collective: str, store: dist.Store, rank: int, world_size: int) -> dist._Backend:
        if not dist.is_nccl_available():
            raise RuntimeError(
                f"rota: {collective} of CUDA tensors has no kernel in rota, and this torch has no "
                f"NCCL to hand it to"
            )
        warnings.warn(
            f"rota: {collective} of CUDA tensors has no kernel in rota and runs on NCCL, as do "
            f"reduce, gather, scatter and all_to_all",
            stacklevel=2,
        )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, world_size, options)

    # torch lists ranks for subgroups only. A subgroup connects at its first use; the default group
    # connects now and so names missing ranks at once.
    is_subgroup = len(options.global_ranks_in_group) > 0
    return _C.ProcessGroupRota(
        options.store,
        options.group_rank,
        options.group_size,
        timeout,
        DEFAULT_SLOT_BYTES,
        is_subgroup,
        make_nccl,
    )


def register() -> None:
    """Registers `dist.init_process_group("rota")`, for CPU and CUDA tensors."""
    dist.Backend.register_backend("rota", _create, extended_api=True, devices=["cpu", "cuda"])
