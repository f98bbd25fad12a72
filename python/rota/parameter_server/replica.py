"""Copies of a shard's state at another server, which goes on with it if the shard's server dies.

The state is the float32 parameters, the optimizer's state, and each worker's clock. The server
saves it after every update, in two places in turn, and counts saves by signals; so one whole save
is always there. A push is only given back to its worker once it is saved. So whoever goes on finds
in the mailboxes every push that the last whole save lacks.

This module knows what a save consists of. It must not decide when to save or to go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rota import _C
from rota.errors import PeerFailed
from rota.memory import empty, round_up
from rota.parameter_server.mailbox import ALIGN_BYTES, Section
from rota.parameter_server.shard import (
    NUM_VERSIONS,
    MakeOptimizer,
    ShardMemory,
    ShardState,
    probe,
)

SAVE_CHANNEL = 1
# A save's pickled part may grow by this beyond twice its first length.
_SPARE_BYTES = 1 << 16


class _Entry(NamedTuple):
    """A tensor of the optimizer's state_dict()."""

    parameter: int
    key: str
    shape: torch.Size
    dtype: torch.dtype


class StateLayout:
    """Where the parts of the optimizer's state lie in a save; found with a step of a probe.

    Args:
        section: the shard's.
        shapes: of all parameters, by number.
        make_optimizer: called with parameters of zeroes; None if there is no optimizer.
    """

    def __init__(
        self, section: Section, shapes: Sequence[torch.Size], make_optimizer: MakeOptimizer | None
    ) -> None:
        self.entries: list[_Entry] = []
        text = b""
        if make_optimizer is not None and section.parameters:
            state_dict, _ = probe(section, shapes, make_optimizer)
            self.entries = [
                _Entry(i, key, value.shape, value.dtype) for i, key, value in _tensors(state_dict)
            ]
            text = pickle.dumps(_without_tensors(state_dict))
        self.text_bytes = round_up(2 * len(text) + _SPARE_BYTES, ALIGN_BYTES)
        self.num_bytes = self.text_bytes + sum(
            round_up(entry.shape.numel() * entry.dtype.itemsize, ALIGN_BYTES)
            for entry in self.entries
        )

    def views(self, save: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of a save's bytes, in place."""
        views, begin = [], self.text_bytes
        for entry in self.entries:
            num_bytes = entry.shape.numel() * entry.dtype.itemsize
            part = save[begin : begin + num_bytes]
            views.append(part.view(entry.dtype).view(entry.shape))
            begin += round_up(num_bytes, ALIGN_BYTES)
        return views


class Standby:
    """On the server that would go on: its memory for the saves of another server's shard.

    Args:
        num_elems: of the shard.
        num_ranks: of the group.
        layout: of the optimizer's state.
    """

    def __init__(self, num_elems: int, num_ranks: int, layout: StateLayout) -> None:
        self._layout = layout
        # A save's parameters lie where they would be published.
        self.memory = ShardMemory(num_elems, num_ranks, others_may_write=True)
        self._saves = empty(NUM_VERSIONS, layout.num_bytes, dtype=torch.uint8)
        self.exposed_saves = _C.ExposedTensor(self._saves, 1, others_may_write=True)

    def start(self, values: torch.Tensor) -> None:
        """Holds the initial parameters, until the first save."""
        self.memory.versions[1 % NUM_VERSIONS].copy_(values)

    def load(self, num_saves: int, workers: Iterable[int]) -> ShardState:
        """The last whole save, or the initial state."""
        version = num_saves + 1
        values = self.memory.versions[version % NUM_VERSIONS]
        if num_saves == 0:
            return ShardState(values, version, 0, dict.fromkeys(workers, 0), None)
        save = self._saves[version % NUM_VERSIONS]
        length = int(save[:8].view(torch.int64))
        text, clocks, num_updates = pickle.loads(save[8 : 8 + length].numpy().tobytes())
        if text is not None:
            for entry, view in zip(self._layout.entries, self._layout.views(save), strict=True):
                text["state"].setdefault(entry.parameter, {})[entry.key] = view.clone()
        return ShardState(values, version, num_updates, clocks, text)


class Replica:
    """On the shard's server: saves to the Standby of another.

    Args:
        window: the group's.
        rank: of the other server.
        versions, saves: its memory.
        num_elems: of the shard.
        layout: of the optimizer's state.
    """

    def __init__(
        self,
        window: _C.Window,
        rank: int,
        versions: _C.OpenedTensor,
        saves: _C.OpenedTensor,
        num_elems: int,
        layout: StateLayout,
    ) -> None:
        self._window = window
        self._rank = rank
        self._layout = layout
        flat = versions.bytes.view(torch.float32)[: NUM_VERSIONS * num_elems]
        self._versions = flat.view(NUM_VERSIONS, num_elems)
        self._saves = saves.bytes.view(NUM_VERSIONS, layout.num_bytes)
        self._views = [layout.views(save) for save in self._saves]
        self._is_lost = False

    def save(
        self,
        values: torch.Tensor,
        version: int,
        clocks: Mapping[int, int],
        optimizer: torch.optim.Optimizer | None,
        num_updates: int,
    ) -> None:
        """Saves the state of the next version; does nothing once the other server has died.

        Raises:
            RuntimeError: the optimizer's state is not laid out as after its first step.
        """
        if self._is_lost:
            return
        place = version % NUM_VERSIONS
        text = None
        # Before its first step an optimizer has no state, or one that needs no tensors.
        if optimizer is not None and (optimizer.state or not self._layout.entries):
            state_dict = optimizer.state_dict()
            tensors = list(_tensors(state_dict))
            found = [_Entry(i, key, value.shape, value.dtype) for i, key, value in tensors]
            if found != self._layout.entries:
                raise RuntimeError(
                    f"rota.ParameterServer: the optimizer's state has changed: {len(found)} "
                    f"tensors, expected the {len(self._layout.entries)} of its first step; a "
                    f"replica has no place for them: pass replicas=0"
                )
            if tensors:
                torch._foreach_copy_(self._views[place], [value for _, _, value in tensors])
            text = _without_tensors(state_dict)
        pickled = pickle.dumps((text, dict(clocks), num_updates))
        if len(pickled) + 8 > self._layout.text_bytes:
            raise RuntimeError(
                f"rota.ParameterServer: the optimizer's state has grown to {len(pickled)} bytes "
                f"beside its tensors, expected at most {self._layout.text_bytes - 8}; pass "
                f"replicas=0"
            )
        save = self._saves[place]
        save[:8].view(torch.int64).fill_(len(pickled))
        save[8 : 8 + len(pickled)].copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        self._versions[place].copy_(values)
        try:
            self._window.signal(self._rank, SAVE_CHANNEL)
        except PeerFailed:
            self._is_lost = True


def _tensors(state_dict: dict[str, Any]) -> list[tuple[int, str, torch.Tensor]]:
    return [
        (i, key, value)
        for i, state in sorted(state_dict["state"].items())
        for key, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]


def _without_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        i: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for i, state in state_dict["state"].items()
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}
