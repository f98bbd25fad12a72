"""Which DistributedDataParallel a hook's bucket comes from: DDP does not tell its hooks.

A bucket brings the parameters themselves, so the module that owns them is found by identity among
the objects that the garbage collector tracks. That takes some 40 ms, once for each model. Where it
finds nothing (gc.freeze() hides objects), names are by position and some checks are left out.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class DdpModel:
    """What hooks ask about the DistributedDataParallel that a bucket comes from; held weakly."""

    def __init__(self, ddp: DistributedDataParallel, num_registrations: int) -> None:
        self._ddp = weakref.ref(ddp)
        # On how many models the hook's state is registered.
        self.num_registrations = num_registrations
        # By identity, which means something while the module lives.
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        # Of all parameters whose gradients come in buckets.
        self.reduced_names = {self._names[id(p)] for p in ddp._module_parameters if p.requires_grad}
        # Whether a parameter may go without a gradient, which DDP then leaves as it was.
        self.may_have_unused: bool = ddp.find_unused_parameters or ddp.static_graph

    @property
    def is_alive(self) -> bool:
        return self._ddp() is not None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Whose ranks have replicas of the model; None if the model is gone."""
        ddp = self._ddp()
        return None if ddp is None else ddp.process_group

    def name(self, parameter: torch.Tensor) -> str | None:
        """As in the wrapped module's state_dict; None for a parameter of another model."""
        return self._names.get(id(parameter)) if self.is_alive else None


def _all_ddp() -> list[DistributedDataParallel]:
    # Not isinstance, which is slow, and runs code of objects that pretend to be of another class.
    ddps = [o for o in gc.get_objects() if DistributedDataParallel in type(o).__mro__]
    return [ddp for ddp in ddps if hasattr(ddp, "_comm_hooks")]  # fully made


def _is_registered(state: object, ddp: DistributedDataParallel) -> bool:
    return any(s is state for _, s in ddp._comm_hooks)


def find_ddp(parameters: Sequence[torch.Tensor], state: object) -> DdpModel | None:
    """The model that `parameters`, those of one bucket, belong to.

    Of several over the same parameters it is one that `state` is registered on.
    """
    ddps = _all_ddp()
    if sum(_is_registered(state, ddp) for ddp in ddps) > 1:
        del ddps
        gc.collect()  # models that nobody holds any more do not count
        ddps = _all_ddp()
    num_registrations = sum(_is_registered(state, ddp) for ddp in ddps)
    wanted = {id(p) for p in parameters}
    owners = [ddp for ddp in ddps if wanted <= {id(p) for p in ddp.module.parameters()}]
    owners.sort(key=lambda ddp: not _is_registered(state, ddp))
    return DdpModel(owners[0], num_registrations) if owners else None
