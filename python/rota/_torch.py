"""Every private torch interface that rota uses, behind one function each, and nothing else.

Each docstring ends with what breaks without the interface. tests/test_torch_insides.py has a test
of each, which names the interface that a new torch has changed, and a test that no other file of
the package reaches inside torch. Imported with rota, so whatever takes long to import is imported
in functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_api
    from torch.distributed.tensor import DTensor

    Backend = dist._Backend  # of a group, for a type of device
    GroupOptions = _DistributedBackendOptions  # what torch passes to the maker of a backend
    FsdpAllGather = _fsdp_api.AllGather
    FsdpReduceScatter = _fsdp_api.ReduceScatter
else:
    # torch's setters ask for these classes, but FSDP only calls what it is given.
    FsdpAllGather = FsdpReduceScatter = object

# ---- process groups


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The group's backend for a type of device.

    Raises RuntimeError: it has none. Without it, nothing finds rota's backend in a group.
    """
    return group._get_backend(device)


def unwrapped(backend: Backend) -> Backend:
    """The backend inside torch's wrapper, which checks calls where TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Without it, rota.fsdp refuses groups in that mode, and timeouts there are the store's.
    """
    wrapped: Backend = getattr(backend, "wrapped_pg", backend)
    return wrapped


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Where the group has backends. Without it, nothing knows the timeout of a group."""
    return list(group._device_types)


def timeout_of(backend: Backend) -> timedelta | None:
    """The timeout in its options, if it has any. Without it, timeouts are the store's."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Sets it in a backend's options. Without it, the group's timeout is ignored."""
    options._timeout = timeout


def all_groups() -> list[dist.ProcessGroup]:
    """The groups of this process. Without it, groups outlive their generation."""
    return list(dist.distributed_c10d._world.pg_map)


def restart_group_names() -> None:
    """Makes torch name groups as a new process does, which counts even those that failed.

    Without it, survivors and newcomers of a generation name the same group differently.
    """
    dist.distributed_c10d._world.group_count = 0


# ---- coalescing blocks


class CoalescingBlock(NamedTuple):
    """A block that torch's manager has begun."""

    manager: Any  # a generator, which is gone when the block has been left
    forget: Callable[[], None]  # ends the list of sums that torch keeps for the block
    messages: Sequence[dist.P2POp]  # of a batch_isend_irecv


def coalescing_block(frame: FrameType) -> CoalescingBlock | None:
    """The block whose manager runs in this frame; None if it is not torch's manager.

    Without it, an error in a block leaves the group unusable, and messages that overwrite each
    other are sent.
    """
    enter = frame.f_back  # contextlib's
    manager = getattr(enter.f_locals.get("self"), "gen", None) if enter is not None else None
    if enter is None or getattr(manager, "gi_code", None) is not frame.f_code:
        return None
    group = frame.f_locals.get("group")
    blocks = getattr(dist.distributed_c10d._world, "pg_coalesce_state", {})
    listed = blocks.get(group)

    def forget() -> None:
        if listed is not None and blocks.get(group) is listed:
            del blocks[group]

    batch = enter.f_back
    is_batch = batch is not None and batch.f_code is dist.batch_isend_irecv.__code__
    messages = batch.f_locals.get("p2p_op_list", ()) if batch is not None and is_batch else ()
    return CoalescingBlock(manager, forget, messages)


# ---- autograd


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each change in place. Without it, stale norms are taken for current ones."""
    return tensor._version


def graph_task() -> int:
    """The number of the backward pass under way in this thread, or -1.

    Without it, a hook cannot tell to which pass a bucket belongs.
    """
    return torch._C._current_graph_task_id()


def is_inside_node() -> bool:
    """Whether an autograd node is running, as that of a reentrant checkpoint.

    Without it, such a checkpoint's part of a pass is taken for the whole.
    """
    return torch._C._current_autograd_node() is not None


def after_backward(callback: Callable[[], None]) -> None:
    """Queues a final callback of the graph task under way; it may queue others.

    Without it, no hook learns when a backward pass is over, so there are no results.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- lists of tensors, storages, trees, modules


def multiply(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiplies all in place, in few kernels. Without it, a folded clipping cannot be undone."""
    torch._foreach_mul_(tensors, factor)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies all, in few kernels. Without it, the parameter server cannot push and pull."""
    torch._foreach_copy_(targets, sources)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Equal for all objects of one storage. Without it, elastic.State keeps shared memory twice."""
    return int(storage._cdata)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with its leaves replaced. Without it, elastic.State cannot keep optimizers."""
    return _pytree.tree_map(function, tree)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dict. Without it, elastic.State cannot bring back or remove a buffer."""
    return module._buffers


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Whether it is of torch's kinds. Without it, rota.LogicalShards does not warn of them."""
    return isinstance(module, _BatchNorm)


def assume_constant(function: Callable[..., Any]) -> None:
    """As torch.compiler.assume_constant_result, without its import of torch._dynamo, which takes
    as long as that of torch. Without it, Dynamo breaks the graph in gradients of rota.ops.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- GradScaler and fused optimizers


def override_unscaling(scaler: type[torch.amp.GradScaler], unscale: Callable[..., Any]) -> None:
    """Has a class of scalers unscale by this method, which takes and returns what torch's does.

    Without it, results of the hook are divided by the scale once more.
    """
    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def unscale(scaler: torch.amp.GradScaler, *args: Any) -> dict[torch.device, torch.Tensor]:
    """As a scaler that overrides nothing. Without it, gradients that no hook has reduced stay
    scaled."""
    return torch.amp.GradScaler._unscale_grads_(scaler, *args)


def after_unscaling(callback: Callable[[Any], None]) -> None:
    """Calls it with the optimizer whose gradients any GradScaler of torch's has unscaled.

    Without it, clip_grad_norm_ uses the norm from before: torch's operator counts no change.
    """
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_and_call(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found_inf = unscale(scaler, optimizer, *args, **kwargs)
        callback(optimizer)
        return found_inf

    torch.amp.GradScaler._unscale_grads_ = unscale_and_call  # type: ignore[assignment,method-assign]


def unscaled_by(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What unscale_() has noted since the last update(), by id() of the optimizer, and update()
    reads; others than optimizers may be added.

    Without it, the stages of a model adapt their scales differently, and error feedback forgets
    what a skipped step owes.
    """
    return scaler._per_optimizer_states


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step divides gradients by its attribute grad_scale, if groups are fused.

    Without it, clip_grad_norm_ takes a pass over the gradients.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


# ---- sharded models


def fsdp_groups(module: FSDPModule) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The groups that FSDP will pass to a module's collectives; it has them from fully_shard on.

    A parameter's mesh does not tell, since it may also have tensor parallelism's dimension.
    Without it, rota.fsdp.use cannot refuse a group of another backend.
    """
    state = module._get_fsdp_state()
    # A list in torch 2.13; one or None in 2.11.
    of_params = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for of_param in filter(None, of_params):
        for mesh_info in (of_param.mesh_info, of_param.post_forward_mesh_info):
            for name in ("shard_process_group", "reduce_scatter_process_group"):
                group = getattr(mesh_info, name, None)
                if group is not None:
                    yield group, of_param.device


def local_shape_and_offset(dtensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's shard lies in the whole. Without it, WeightStore takes no DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # torch counts with tensors on the default device
        shape, offset = compute_local_shape_and_global_offset(
            dtensor.shape, dtensor.device_mesh, dtensor.placements
        )
    return tuple(shape), tuple(offset)
