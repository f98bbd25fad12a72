"""Collectives without torch.distributed's overhead, over any initialised process group.

The methods are those of _C.Communicator, all in csrc/tensor/communicator_methods.cpp.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from rota import _C, options
from rota.engine import engine_chooser
from rota.errors import RotaError
from rota.rendezvous.groups import check_group, member_group, qualified_name
from rota.rendezvous.joint import JointSteps

DEFAULT_SLOT_BYTES = 256 * 1024


class Communicator(_C.Communicator):
    """Collectives on CPU and CUDA tensors between ranks, on one host or several.

    All CUDA tensors of a rank must be on one device. The first collective on them joins the ranks'
    GPUs, as connect_device() does; the first use of a GPU on a machine also tests every kernel
    (docs/cuda.md). After that no call waits for a GPU: a blocking call is queued on the current
    stream, an asynchronous one on the communicator's own stream, after the work on the current one.

    The communicator shares nothing with the group but its store, so the group may run on any
    backend. Making one is a collective call: every rank of the group makes its communicators in the
    same order. CPU tensors made by `rota.empty` are read where they lie. Under torch.compile use
    `rota.ops`, whose functions take a communicator.

    Args:
        group: the ranks; None is the default group.
        timeout: how long one wait inside a collective may last; None is that of the group, which
            init_process_group or new_group has got.
        slot_bytes: size of a transport slot in bytes, a multiple of 4096; two slots are reserved
            for each rank. The default was measured best (benchmarks/LOG.md).
        engine: what carries messages between hosts: a process group of the same ranks, for rota
            alone, whose CPU backend can send and recv. None: a Gloo group of its own. If it has a
            backend of its own for CUDA (NCCL), that one carries CUDA tensors, which otherwise go
            through the host's memory.
        inter_wire_dtype: what sums of wider floating tensors are rounded to between hosts, once on
            their way out of a host and once as a result, where a call names no wire_dtype. None:
            no rounding; sums of 16-bit tensors travel in float32.
        inter_block_scaling: the block_scaling of inter_wire_dtype, as in `rota.HookState`.

    On several hosts, sums are hierarchical: a host's ranks are added first, in ascending rank, then
    hosts in the order of their lowest ranks (docs/hosts.md).

    Raises:
        TypeError, ValueError: this rank is not in the group, or an argument is unusable; the other
            ranks raise rota.TransportError, which names the rank.
        rota.TransportError: memory is short, or a rank did not connect.

    Example:
        >>> comm = rota.Communicator()
        >>> comm.all_reduce(tensor, op="avg", wire_dtype=torch.float16)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        engine: dist.ProcessGroup | None = None,
        inter_wire_dtype: torch.dtype | None = None,
        inter_block_scaling: bool | None = None,
    ) -> None:
        pg = member_group(group, "Communicator")
        steps = JointSteps.over(pg, "Communicator")
        with steps.publishing() as check_peers:
            timeout = steps.take_timeout(timeout)
            if not isinstance(slot_bytes, int):
                raise TypeError(f"rota.Communicator: slot_bytes is {slot_bytes!r}, expected an int")
            options.check_inter("rota.Communicator", inter_wire_dtype, inter_block_scaling)
            check_group("rota.Communicator", "engine", engine)
            super().__init__(
                store=steps.store,
                rank=steps.rank,
                world_size=steps.world_size,
                timeout=timeout,
                slot_bytes=slot_bytes,
                choose_engine=engine_chooser(engine, timeout, steps.check_all),
                inter_wire_dtype=inter_wire_dtype,
                inter_block_scaling=options.scales_blocks(inter_wire_dtype, inter_block_scaling),
                check_peers=check_peers,
                why_ended=steps.why_ended,
            )
        self.number = steps.number  # among those over the group, the same on all ranks
        self._name = f"{qualified_name(pg)}/{steps.number}"
        while self._name in _by_name:  # one over a destroyed group of this name still lives
            self._name += "'"
        _by_name[self._name] = self

    @property
    def name(self) -> str:
        """The name that `rota.ops` uses: unique in this process, and the same on all ranks."""
        return self._name


_by_name: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def living_communicators() -> list[Communicator]:
    return list(_by_name.values())


def communicator_named(name: str) -> Communicator:
    """The living communicator of this process with this name; RotaError if there is none."""
    communicator = _by_name.get(name)
    if communicator is None:
        living = ", ".join(f"'{other}'" for other in sorted(_by_name)) or "none"
        raise RotaError(
            f"rota.ops: there is no communicator '{name}' in this process, living ones: {living}; "
            f"keep a reference to it as long as compiled code uses it"
        )
    return communicator
