"""Makes groups of the torch.distributed backend "rota", which rota_autoload registers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rota import _C, _torch, timeouts
from rota.coalescing import watch_block
from rota.communicator import DEFAULT_SLOT_BYTES
from rota.engine import engine_chooser
from rota.options import check_inter, scales_blocks
from rota.rendezvous.groups import StoreRanks, rota_backend
from rota.rendezvous.joint import JointSteps
from rota.window import make_window

if TYPE_CHECKING:
    from rota._torch import Backend, GroupOptions

    MakeMembers = Callable[[dist.Store, timedelta], Any]


class BackendOptions(_C.BackendOptions):
    """Options of the backend, for `init_process_group` and `new_group` as `pg_options`.

    Args:
        slot_bytes: as in `rota.Communicator`.
        wire_dtype: what `all_reduce` rounds wider floating tensors to, once on their way in and
            once on their way out: torch.float16, torch.bfloat16 or torch.float32. None: no
            rounding.
        order, num_shards: of `all_reduce`, `reduce` and `reduce_scatter`, as in
            `rota.Communicator.all_reduce`.
        engine, inter_wire_dtype, inter_block_scaling: for ranks on several hosts, as in
            `rota.Communicator`.

    Example:
        >>> options = rota.BackendOptions(wire_dtype=torch.bfloat16)
        >>> dist.init_process_group("rota", pg_options=options)
    """

    def __init__(
        self,
        *,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        wire_dtype: torch.dtype | None = None,
        order: str = "rank",
        num_shards: int | None = None,
        engine: dist.ProcessGroup | None = None,
        inter_wire_dtype: torch.dtype | None = None,
        inter_block_scaling: bool | None = None,
    ) -> None:
        check_inter("rota.BackendOptions", inter_wire_dtype, inter_block_scaling)
        super().__init__(
            dist.default_pg_timeout,
            slot_bytes,
            wire_dtype,
            order,
            num_shards,
            inter_wire_dtype,
            scales_blocks(inter_wire_dtype, inter_block_scaling),
        )
        self.engine = engine


def create(
    options: GroupOptions, given: object, make_members: MakeMembers | None
) -> _C.ProcessGroupRota:
    """Makes a group's backend. An error with what the user passed as pg_options is raised by all
    ranks, those of a subgroup at its first use.

    make_members is for a group whose members may change.
    """
    ranks = StoreRanks(
        options.store, options.group_rank, options.group_size, options.global_ranks_in_group
    )
    steps = JointSteps.over(ranks, "BackendOptions")
    steps.timeout = timeout = timeouts.usable(options.timeout)

    def make_nccl(collective: str, store: dist.Store, rank: int, world_size: int) -> Backend:
        if not dist.is_nccl_available():
            raise RuntimeError(
                f"rota: {collective} of CUDA tensors has no kernel in rota, and this torch has no "
                f"NCCL to hand it to"
            )
        warnings.warn(
            f"rota: {collective} of CUDA tensors runs on NCCL here: rota has no kernel for them, "
            f"or none that the GPU's self-test trusts",
            stacklevel=2,
        )
        options = dist.ProcessGroupNCCL.Options()
        _torch.set_timeout(options, timeout)
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, world_size, options)

    with steps.publishing() as check_peers:
        if given is None:
            given = BackendOptions()
        elif not isinstance(given, _C.BackendOptions):
            raise TypeError(
                f"rota: pg_options is of type {type(given).__name__}, expected rota.BackendOptions"
            )
        # torch lists ranks for subgroups only. A subgroup of one host connects at its first use;
        # the default group connects now and so names missing ranks at once. So do subgroups over
        # several hosts, because their engine connects all ranks together.
        listed, whole = options.global_ranks_in_group, rota_backend(dist.group.WORLD)
        own = copy.deepcopy(given)  # the caller may use it for other groups
        _torch.set_timeout(own, timeout)
        own.choose_engine = engine_chooser(getattr(given, "engine", None), timeout, steps.check_all)
        own.connects_at_first_use = len(listed) > 0 and (
            whole is None or not whole.spans_hosts(list(listed))
        )
        own.check_peers = check_peers
        own.why_ended = steps.why_ended
        own.watch_block = watch_block
        made = options.store, options.group_rank, options.group_size, own, make_nccl, make_window
        if make_members is None:
            return _C.ProcessGroupRota(*made)
        members = make_members(options.store, timeout)
        return _C.ProcessGroupRota(*made, members.handle, members.reconfigure)
