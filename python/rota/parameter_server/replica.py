"""What a shard's server leaves for another server, which goes on with the shard if it dies.

That is the float32 parameters, which lie in the published versions, and the optimizer's state and
each worker's clock, which the server saves after every update. Everything lies in double buffers of
the server, which the other server maps, so that it outlives the server. A push is only given back
to its worker once it is saved. So whoever goes on finds in the mailboxes every push that the last
whole save lacks. The next version takes that save's slot only after a newer save is whole.

This module knows what a save consists of. It must not decide when to save or to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rota import _C, _torch
from rota.parameter_server.setup import Setup
from rota.parameter_server.shard import ShardState, probe
from rota.shared.aligned import AlignedLayout, Views
from rota.shared.apart import take_apart, unpickle_with
from rota.shared.buckets import write_bytes
from rota.shared.double_buffer import DoubleBuffer, OpenedDoubleBuffer, expose_slots

# A save's pickled part may grow by this beyond twice its first length.
_SPARE_BYTES = 1 << 16


class StateLayout(AlignedLayout[str | int]):
    """Where a server's state lies in a save: "rest", its "length", and the optimizer's tensors by
    number; found with a step of a probe, unless there is no optimizer."""

    def __init__(self, server: int, setup: Setup) -> None:
        rest = b""
        tensors: list[torch.Tensor] = []
        share = setup.layout.shares[server]
        if setup.make_optimizer is not None and share.parameters:
            rest, tensors = take_apart(_in_order(probe(share, setup.make_optimizer)[0]))
        self.looks = _looks_of(tensors)
        self.rest_bytes = 2 * len(rest) + _SPARE_BYTES
        super().__init__(
            {
                "length": (torch.int64, ()),
                "rest": (torch.uint8, (self.rest_bytes,)),
                **dict(enumerate(self.looks)),
            }
        )


class Replica(DoubleBuffer[Views[str | int]]):
    """On the shard's server: its saves."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        super().__init__(*expose_slots(layout))

    def save(
        self,
        version: int,
        clocks: Mapping[int, int],
        optimizer: torch.optim.Optimizer | None,
        num_updates: int,
    ) -> None:
        """Saves what belongs to a published version; RuntimeError: the optimizer has other state
        than after its first step."""
        state_dict, looks = None, self._layout.looks
        # Before its first step an optimizer has no state, or one that needs no tensors.
        if optimizer is not None and (optimizer.state or not looks):
            state_dict = _in_order(optimizer.state_dict())
        rest, tensors = take_apart((state_dict, dict(clocks), num_updates))
        if state_dict is not None and _looks_of(tensors) != looks:
            raise RuntimeError(
                f"rota.ParameterServer: the optimizer's state has changed: {len(tensors)} "
                f"tensors, expected the {len(looks)} of its first step; a replica has no place "
                f"for them: pass replicas=0"
            )
        if len(rest) > self._layout.rest_bytes:
            raise RuntimeError(
                f"rota.ParameterServer: the optimizer's state has grown to {len(rest)} bytes "
                f"beside its tensors, expected at most {self._layout.rest_bytes}; pass replicas=0"
            )
        slot = self.begin(version)
        if tensors:
            _torch.copy_each([slot[number] for number in range(len(tensors))], tensors)
        slot["length"].fill_(len(rest))
        write_bytes(slot["rest"], rest)
        self.finish(version)


class OpenedReplica(OpenedDoubleBuffer[Views[str | int]]):
    """The saves of another server, which has published the versions of its shard."""

    def __init__(
        self,
        layout: StateLayout,
        saves: _C.OpenedTensor,
        published: OpenedDoubleBuffer[torch.Tensor],
    ) -> None:
        super().__init__(saves, layout.slots(saves.bytes))
        self._published = published

    def load(self) -> ShardState:
        """The last whole save; the server has ended."""
        version = self.num_done
        slot = self.slot(version)
        rest = slot["rest"][: int(slot["length"])].numpy().tobytes()
        state_dict, clocks, num_updates = unpickle_with(rest, lambda number: slot[number].clone())
        return ShardState(self._published.slot(version), version, num_updates, clocks, state_dict)


def _looks_of(tensors: list[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _in_order(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With the parameters' entries in one order, however they came there."""
    state = {i: dict(sorted(entry.items())) for i, entry in sorted(state_dict["state"].items())}
    return {"state": state, "param_groups": state_dict["param_groups"]}
