"""Which DistributedDataParallel a hook's bucket comes from: DDP does not tell its hooks.

A bucket brings the parameters themselves, so the module that owns them is found by identity among
the objects that the garbage collector tracks. That takes about 0.1 s, once for each model. Where it
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

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        # By identity, which means something while the module lives.
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._reduced = {self._names[id(p)] for p in ddp._module_parameters if p.requires_grad}
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

    @property
    def reduced_names(self) -> set[str]:
        """The names of all parameters whose gradients come in buckets."""
        return self._reduced

    def name(self, parameter: torch.Tensor) -> str | None:
        """As in the wrapped module's state_dict; None for a parameter of another model."""
        return self._names.get(id(parameter)) if self.is_alive else None


def _all_ddp() -> list[DistributedDataParallel]:
    # Not isinstance, which runs code of objects that pretend to be of another class.
    objects = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
    return [ddp for ddp in objects if hasattr(ddp, "_comm_hooks")]  # fully made


def num_registrations(state: object) -> int:
    """On how many models a hook's state is registered; models that nobody holds do not count."""

    def count() -> int:
        return sum(any(s is state for _, s in ddp._comm_hooks) for ddp in _all_ddp())

    if count() > 1:
        gc.collect()
    return count()


def find_ddp(parameters: Sequence[torch.Tensor], state: object) -> DdpModel | None:
    """The model that `parameters`, those of one bucket, belong to.

    Of several over the same parameters it is one that `state` is registered on.
    """
    wanted = {id(p) for p in parameters}
    owners = [ddp for ddp in _all_ddp() if wanted <= {id(p) for p in ddp.module.parameters()}]
    owners.sort(key=lambda ddp: not any(s is state for _, s in ddp._comm_hooks))
    return DdpModel(owners[0]) if owners else None
