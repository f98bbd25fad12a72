"""What LocalSGD and DiLoCo refuse: arguments, models, optimizers, and ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from rota import options
from rota.errors import Mismatch
from rota.gradients.state import HookState
from rota.local_sgd.synced import Synced
from rota.sharding import as_dtensor, check_same_shards, fsdp1_shards

if TYPE_CHECKING:
    from rota.local_sgd.local_sgd import LocalSGD


def check_arguments(caller: str, outer: LocalSGD, module: nn.Module, num_tensors: int) -> None:
    for name in ("sync_every", "num_fragments"):
        value = getattr(outer, name)
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{caller}: {name} is {value!r}, expected an int of 1 or more")
    if outer.num_fragments > min(outer.sync_every, num_tensors):
        raise ValueError(
            f"{caller}: num_fragments is {outer.num_fragments}, expected at most sync_every "
            f"({outer.sync_every}) and the number of parameters and buffers ({num_tensors})"
        )
    delay, interval = outer.fragment_sync_delay, outer.sync_every // outer.num_fragments
    if not (isinstance(delay, int) and 0 <= delay < interval):
        raise ValueError(
            f"{caller}: fragment_sync_delay is {delay!r}, expected an int from 0 to "
            f"{interval - 1}: less than sync_every // num_fragments"
        )
    alpha = outer.fragment_update_alpha
    if not isinstance(alpha, int | float):
        raise TypeError(f"{caller}: fragment_update_alpha is {alpha!r}, expected a number")
    if not 0 <= alpha < 1:
        raise ValueError(
            f"{caller}: fragment_update_alpha is {alpha}, expected at least 0 and less than 1"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"{caller}: {name!r} is on {tensor.device}, expected the CPU or a CUDA device"
            )


def check_shards(name: str, module: nn.Module, state: HookState) -> None:
    ranks = dist.get_process_group_ranks(state.group)
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = [tensor for _, tensor in named]
    check_same_shards(name.removeprefix("rota."), tensors, lambda i: repr(named[i][0]), ranks)
    for shard_ranks in fsdp1_shards(module):
        if len(set(shard_ranks) & set(ranks)) > 1:
            raise ValueError(
                f"{name}: FullyShardedDataParallel has cut the model over the ranks {shard_ranks}, "
                f"so the state's group of ranks {ranks} holds different shards of it; make the "
                f"state with the group of ranks that hold the same shard"
            )


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"rota.DiLoCo: outer_optimizer is of type {type(optimizer).__name__}, expected a "
            f"torch.optim.Optimizer of the model's parameters"
        )
    names = {id(p): name for name, p in module.named_parameters()}
    given = set(map(id, options.parameters_of(optimizer)))
    missing = [
        name for name, p in module.named_parameters() if p.requires_grad and id(p) not in given
    ]
    if missing or not given <= names.keys():
        raise ValueError(
            f"rota.DiLoCo: outer_optimizer lacks {missing} of the model's parameters and has "
            f"{len(given - names.keys())} others; make it anew with model.parameters()"
        )
    if optimizer.state:
        raise ValueError(
            "rota.DiLoCo: outer_optimizer has taken steps; make a new one, and load its state with "
            "rota.DiLoCo.load_state_dict"
        )


def check_all_synced(caller: str, module: nn.Module, tensors: Sequence[Synced]) -> None:
    known = {id(synced.parameter) for synced in tensors}
    # fully_shard puts others in their places during a forward pass.
    sharded = {
        synced.name
        for synced in tensors
        if synced.parameter is not None and as_dtensor(synced.parameter) is not None
    }
    later = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known and name not in sharded
    ]
    if later:
        raise ValueError(
            f"{caller}: parameters that were unfrozen or came later: {later}; they are not "
            f"synchronised, so that workers would drift apart: make a new {caller} with "
            f"this model"
        )


def check_saved(
    caller: str, tensors: Sequence[Synced], parameters: Mapping[str, torch.Tensor]
) -> None:
    expected = {synced.name: list(synced.copy.shape) for synced in tensors}
    given = {name: list(tensor.shape) for name, tensor in parameters.items()}
    if given != expected:
        differing = sorted(
            name for name in expected | given if given.get(name) != expected.get(name)
        )
        raise ValueError(
            f"{caller}: the parameters that were saved are not those of this model: "
            f"{differing[0]!r} is {given.get(differing[0], 'missing')}, expected "
            f"{expected.get(differing[0], 'none of this name')}; {len(differing)} differ; "
            f"make it of the same model, with the same parameters frozen"
        )


def check_agreement(caller: str, state: HookState, values: Mapping[str, float]) -> None:
    """Raises rota.Mismatch on all ranks if they have different values. Collective."""
    own = torch.tensor(list(values.values()), dtype=torch.float64, device="cpu")
    of_ranks = own.new_empty(dist.get_world_size(state.group), len(own))
    state.communicator.all_gather(of_ranks, own)
    for name, column in zip(values, of_ranks.T.tolist(), strict=True):
        other = next((rank for rank, value in enumerate(column) if value != column[0]), None)
        if other is not None:
            texts = [f"{column[rank]:.15g}" for rank in (0, other)]
            raise Mismatch(
                f"{caller}: {name} is {texts[0]} on rank 0, {texts[1]} on rank {other}; "
                f"every rank of the state's group needs the same"
            )
