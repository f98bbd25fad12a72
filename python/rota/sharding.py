"""What this rank keeps of a DTensor (torch.distributed.tensor), of which it may hold a shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """The tensor itself if it is a DTensor, else None."""
    # If nothing has imported DTensor, there are none. Its import takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that lies on this rank, sharing its memory; a plain tensor itself."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor
    with torch.no_grad():
        local: torch.Tensor = dtensor.to_local()
    if hasattr(local, "wait"):  # an AsyncCollectiveTensor, which is still on its way
        local = local.wait()
    return local


def like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`local` as the gradient of `parameter`: a DTensor placed like it, if the parameter is one."""
    dtensor = as_dtensor(parameter)
    if dtensor is None:
        return local
    return type(dtensor).from_local(
        local,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )


def num_replicas(parameter: torch.Tensor, ranks: Sequence[int]) -> int:
    """How many of `ranks` hold what this rank holds of the parameter.

    Follows from a DTensor's placements; 1 for a plain tensor, of which nothing is known.
    """
    dtensor = as_dtensor(parameter)
    coordinate = dtensor.device_mesh.get_coordinate() if dtensor is not None else None
    if dtensor is None or coordinate is None:
        return 1
    holders = dtensor.device_mesh.mesh
    for dim in reversed(range(holders.ndim)):
        if not dtensor.placements[dim].is_replicate():
            holders = holders.select(dim, coordinate[dim])
    return len(set(holders.flatten().tolist()) & set(ranks))
