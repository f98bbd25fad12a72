"""Windows on GPUs: mapped memory, which is accessed by copies on the caller's stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from rota import _C
from rota.errors import RotaError, TransportError
from rota.rendezvous.groups import member_group
from rota.rendezvous.joint import JointSteps
from rota.shared.memory import empty
from rota.window import Window, check_made_alike


class DeviceWindow(Window):
    """See rota.Window, which makes one for device="cuda".

    Copies run on the current stream of the window's device. signal() waits for that stream, so that
    whoever has waited for the signal sees what was written there before; all else is left to the
    caller's order of streams. Closed and dead ranks are noticed before a copy is queued, not while
    it runs.
    """

    def __init__(
        self,
        tensor_or_shape: torch.Tensor | Sequence[int] | int,
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        num_channels: int = 1,
        timeout: timedelta | None = None,
        engine: dist.ProcessGroup | None = None,
    ) -> None:
        pg = member_group(group, "Window")
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        # Its words are this window's; it has no elements.
        own, others = self._open(pg, lambda: empty(0, dtype=dtype), num_channels, timeout, engine)
        steps = JointSteps.over(pg, "Window on GPUs")
        shape: list[int] = []
        where = torch.device(device)

        def describe() -> dict[str, str]:
            nonlocal where
            steps.take_timeout(timeout)
            if isinstance(tensor_or_shape, torch.Tensor):
                raise ValueError(
                    "rota.Window: a tensor on a GPU cannot move to memory that others map; pass "
                    "its shape, and copy it to the window's tensor"
                )
            if not hasattr(_C, "map_device_windows"):
                raise TransportError("rota.Window: this build of rota is for the CPU")
            if None in others[: self.rank] + others[self.rank + 1 :]:
                raise TransportError(
                    "rota.Window: ranks are on several hosts; windows on GPUs need one"
                )
            sizes = [tensor_or_shape] if isinstance(tensor_or_shape, int) else tensor_or_shape
            shape.extend(sizes)
            if where.index is None:
                where = torch.device("cuda", torch.cuda.current_device())
            return {"made": f"{tuple(shape)} of {dtype} on GPUs"}

        check_made_alike(steps.step(describe))
        num_bytes = math.prod(shape) * dtype.itemsize
        with steps.telling():
            memory = _C.map_device_windows(
                own,
                others,
                self.rank,
                dist.PrefixStore("memory", steps.store),
                where,
                max(1, num_bytes),
                lambda text: [bytes.fromhex(each) for each in steps.step(lambda: text.hex())],
            )
        self._device = where
        # By rank; empty once closed.
        self._parts = [part[:num_bytes].view(dtype).view(shape) for part in memory]

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's part."""
        return self._part(self.rank)

    def put(self, tensor: torch.Tensor, rank: int, offset: int = 0) -> None:
        self._check(rank, for_writing=True)
        self._range("put", tensor, rank, offset).copy_(tensor.reshape(-1))

    def get(self, tensor: torch.Tensor, rank: int, offset: int = 0) -> None:
        self._check(rank, for_writing=False)
        source = self._range("get", tensor, rank, offset)
        tensor.copy_(source.view(tensor.shape))

    def accumulate(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "rota.Window.accumulate: windows on GPUs have no sums; use put, or reduce_scatter"
        )

    def view(self, rank: int) -> torch.Tensor:
        self._check(rank, for_writing=False)
        return self._part(rank).view(self._part(rank).shape)

    def signal(self, rank: int, channel: int = 0) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        super().signal(rank, channel)

    def close(self) -> None:
        super().close()
        self._parts = []

    def _part(self, rank: int) -> torch.Tensor:
        if not self._parts:
            raise RotaError("rota.Window: this window is closed; make a new one")
        return self._parts[rank]

    def _check(self, rank: int, *, for_writing: bool) -> None:
        """Raises what an access to a rank's window on the CPU raises."""
        nothing = torch.empty(0, dtype=self._part(self.rank).dtype, device="cpu")
        if for_writing:
            super().put(nothing, rank)
        else:
            super().get(nothing, rank)

    def _range(self, call: str, tensor: torch.Tensor, rank: int, offset: int) -> torch.Tensor:
        """The elements of a rank's window from `offset` on, as many as the tensor has."""
        part = self._part(rank).view(-1)
        if tensor.dtype != part.dtype:
            raise TypeError(
                f"rota.Window.{call}: the tensor's dtype is {tensor.dtype}, expected the "
                f"window's, {part.dtype}"
            )
        end = offset + tensor.numel()
        if offset < 0 or end > len(part):
            raise ValueError(
                f"rota.Window.{call}: rank {self.rank}/{self.world_size}: elements {offset} to "
                f"{end} of rank {rank}'s window, which has {len(part)}"
            )
        return part[offset:end]
