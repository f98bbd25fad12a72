"""What this rank keeps of a DTensor (torch.distributed.tensor), of which it may hold a shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
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


def shard_of_rank(dtensor: DTensor) -> dict[int, int]:
    """A number for the shard that each rank holds, by global rank, as the placements tell."""
    ranks = dtensor.device_mesh.mesh
    # Ranks hold the same if they have the same coordinates in all dimensions but the replicated.
    shards = torch.zeros_like(ranks)
    for dim, placement in enumerate(dtensor.placements):
        if not placement.is_replicate():
            coordinates = torch.arange(ranks.shape[dim], dtype=torch.int64, device=ranks.device)
            shape = [-1 if i == dim else 1 for i in range(ranks.ndim)]
            shards = shards * ranks.shape[dim] + coordinates.view(shape)
    return dict(zip(ranks.flatten().tolist(), shards.flatten().tolist(), strict=True))


def own_shard(tensor: torch.Tensor) -> int | None:
    dtensor = as_dtensor(tensor)
    return None if dtensor is None else shard_of_rank(dtensor).get(dist.get_rank())


def check_same_shards(
    caller: str,
    tensors: Sequence[torch.Tensor],
    name_of: Callable[[int], str],
    ranks: Sequence[int],
) -> None:
    """Raises ValueError if ranks of one group, given by global rank, hold different shards."""
    checked = set()
    for i, tensor in enumerate(tensors):
        dtensor = as_dtensor(tensor)
        if dtensor is None or (dtensor.device_mesh, dtensor.placements) in checked:
            continue
        checked.add((dtensor.device_mesh, dtensor.placements))
        shards = shard_of_rank(dtensor)
        if len({shards[rank] for rank in ranks if rank in shards}) > 1:
            raise ValueError(
                f"rota.{caller}: {name_of(i)} is placed {list(dtensor.placements)} on the ranks "
                f"{dtensor.device_mesh.mesh.tolist()}, so ranks {list(ranks)}, which the state "
                f"averages over, hold different shards of it; make the state with the group of the "
                f"ranks that hold the same shard, such as the replicas of a hybrid-shard mesh"
            )


def fsdp1_shards(module: torch.nn.Module) -> Iterator[list[int]]:
    """The ranks over which FSDP1 cuts parts of a model; its parameters are plain tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:
        return
    part: Any
    for part in module.modules():
        is_fsdp = isinstance(part, fsdp.FullyShardedDataParallel)
        if is_fsdp and part.sharding_strategy != fsdp.ShardingStrategy.NO_SHARD:
            yield dist.get_process_group_ranks(part.process_group)


def holders_of(dtensor: DTensor) -> list[int]:
    """The ranks that hold what this rank holds of it; empty on a rank outside of its mesh."""
    shards = shard_of_rank(dtensor)
    own = shards.get(dist.get_rank())
    return [rank for rank, shard in shards.items() if shard == own]


def num_replicas(parameter: torch.Tensor, ranks: Sequence[int]) -> int:
    """How many of `ranks` hold what this rank holds of a DTensor; 1 for a plain tensor, of which
    nothing is known."""
    dtensor = as_dtensor(parameter)
    holders = [] if dtensor is None else holders_of(dtensor)
    return len(set(holders) & set(ranks)) if holders else 1
