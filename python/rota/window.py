"""Memory of each rank that the others read and write without its help."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rota import _C
from rota.errors import Mismatch, TransportError
from rota.groups import member_group, next_number, peer_check
from rota.joint import JointSteps
from rota.memory import empty


class Window(_C.Window):
    """A tensor of each rank that all ranks of a group on one host can access at any time.

    `put`, `get` and `accumulate` copy to and from another rank's tensor without a call there;
    `view(rank)` is that tensor itself, in place. `signal` and `wait_signal` order them: whoever has
    waited for a rank's signal sees all that the rank has written before. Nothing else is ordered,
    and only `accumulate` is atomic, in chunks of 64 KiB. (As MPI's passive target, MPI-4.1
    chapter 12, with signals as in OpenSHMEM 1.5.)

    Making one is collective: every rank of the group makes its windows in the same order, with one
    shape and dtype. After that ranks are on their own. The death of a rank ends only waits for this
    rank and writes to it; its memory can still be read, as it was.

    Args:
        tensor_or_shape: this rank's part: a contiguous CPU tensor, or the size of a new one of
            zeroes. A tensor that `rota.empty` has not made is moved to shared memory, together
            with all that share its storage, as `torch.Tensor.share_memory_` does; it is never
            copied. Raw pointers and numpy arrays of it, however, still refer to the old memory.
        group: the ranks; None is the default group, on any backend.
        dtype: of a new tensor; torch's default dtype if None.
        num_channels: of signals; each counts by itself.
        timeout: of making the window and of each wait; None is that of the group's store.

    Raises:
        TypeError, ValueError: no tensor on the CPU, a strided one, one whose memory belongs to
            another library, or this rank is not in the group.
        rota.Mismatch: ranks differ in shape, dtype or num_channels; names them.
        rota.TransportError: ranks are on several hosts, memory is short, or a rank failed to make
            its part.
        rota.Timeout: a rank did not make its part in time.

    Example:
        >>> window = rota.Window((1024,), dtype=torch.float32)
        >>> if window.rank == 0:
        ...     window.put(torch.ones(8), rank=1, offset=16)
        ...     window.signal(1)
        ... elif window.rank == 1:
        ...     window.wait_signal(0)
        ...     assert window.tensor[16:24].sum() == 8
    """

    def __init__(
        self,
        tensor_or_shape: torch.Tensor | Sequence[int] | int,
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype | None = None,
        num_channels: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        pg = member_group(group, "Window")
        if not isinstance(num_channels, int) or not 1 <= num_channels <= MAX_CHANNELS:
            raise ValueError(
                f"rota.Window: num_channels is {num_channels!r}, expected 1 to {MAX_CHANNELS}"
            )
        number = next_number(pg, "Window")
        store = dist.PrefixStore(f"rota/window/{number}", pg.get_group_store())
        if timeout is None:
            timeout = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        rank, world_size = pg.rank(), pg.size()
        steps = JointSteps(store, rank, world_size, timeout, "rota.Window", peer_check())
        own: list[_C.ExposedTensor] = []

        def expose() -> str:
            tensor = _own_tensor(tensor_or_shape, dtype)
            own.append(_C.ExposedTensor(tensor, world_size * num_channels, others_may_write=True))
            return json.dumps(
                {
                    "made": f"{tuple(tensor.shape)} of {tensor.dtype}, {num_channels} channels",
                    "host": _C.host_id(),
                    "address": own[0].address,
                }
            )

        cards = [json.loads(text) for text in steps.step(expose)]
        _check_alike(cards)
        others: list[_C.OpenedTensor | None] = [None] * world_size

        def open_others() -> str:
            for peer in range(world_size):
                if peer != rank:
                    address = cards[peer]["address"]
                    others[peer] = _C.OpenedTensor(address, f"rank {peer}", timeout)
            return ""

        try:
            steps.step(open_others)
        except TransportError:
            check_peers = peer_check()
            if check_peers is not None:
                check_peers()  # that a rank is lost is the cause to report
            raise
        super().__init__(own[0], rank, others, num_channels, timeout)
        self._tensor = own[0].tensor
        _living.add(self)

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's part."""
        return self._tensor


MAX_CHANNELS = 1024

_living: weakref.WeakSet[Window] = weakref.WeakSet()


def living_windows() -> list[Window]:
    return list(_living)


def _own_tensor(
    tensor_or_shape: torch.Tensor | Sequence[int] | int, dtype: torch.dtype | None
) -> torch.Tensor:
    if not isinstance(tensor_or_shape, torch.Tensor):
        return empty(tensor_or_shape, dtype=dtype)
    if dtype is not None and dtype != tensor_or_shape.dtype:
        raise TypeError(
            f"rota.Window: dtype is {dtype}, but the tensor is {tensor_or_shape.dtype}; leave "
            f"dtype out"
        )
    return tensor_or_shape.detach()


def _difference(cards: list[dict[str, str]], key: str, verb: str) -> str | None:
    """Which ranks differ in what their cards have under `key`; None if none does."""
    ranks_of: dict[str, list[str]] = {}
    for rank, card in enumerate(cards):
        ranks_of.setdefault(card[key], []).append(str(rank))
    if len(ranks_of) == 1:
        return None
    parts = (f"rank {', '.join(ranks)} {verb} {text}" for text, ranks in ranks_of.items())
    return f"rota.Window: ranks disagree: {'; '.join(parts)}"


def _check_alike(cards: list[dict[str, str]]) -> None:
    if difference := _difference(cards, "made", "made"):
        raise Mismatch(f"{difference}; give every rank the same shape, dtype and num_channels")
    if difference := _difference(cards, "host", "are on host"):
        raise TransportError(
            f"{difference}; a window's ranks must share one host; make a group of the ranks of each"
        )
