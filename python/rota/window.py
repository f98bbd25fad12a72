"""Memory of each rank that the others read and write without its help, on the CPU and on GPUs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rota import _C, timeouts
from rota.errors import RotaError, TransportError
from rota.rendezvous.groups import StoreRanks, member_group
from rota.rendezvous.joint import JointSteps
from rota.shared.memory import empty
from rota.window_setup import check_made_alike, open_window


class Window(_C.Window):
    """A tensor of each rank that all ranks of a group can access at any time.

    `put`, `get` and `accumulate` copy to and from another rank's tensor without a call there;
    `view(rank)` is that tensor itself, in place. `signal` and `wait_signal` order them: whoever has
    waited for a rank's signal sees all that the rank has written before. Nothing else is ordered,
    and only `accumulate` is atomic, in chunks of 64 KiB. (As MPI's passive target, MPI-4.1
    chapter 12, with signals as in OpenSHMEM 1.5.)

    Making one is collective: every rank of the group makes its windows in the same order, with one
    shape and dtype. After that ranks are on their own. The death of a rank ends only waits for this
    rank and writes to it; its memory can still be read on its own host. Ranks on other hosts are
    reached over the engine: a call returns when the target has answered, and `view` refuses them.

    Args:
        tensor_or_shape: this rank's part: a contiguous CPU tensor, or the size of a new one of
            zeroes. A tensor that `rota.empty` has not made is moved to shared memory, or refused if
            something else may use its memory where it is, such as a view or autograd.
        group: the ranks; None is the default group, on any backend.
        dtype: of a new tensor; torch's default dtype if None.
        device: of a new tensor: the CPU, or this rank's GPU (see docs/cuda.md).
        num_channels: of signals; each counts by itself.
        timeout: of making the window and of each wait; None is that of the group.
        engine: what carries messages between hosts, as in `rota.Communicator`. None: a Gloo group
            that all windows over this group share.

    Raises:
        TypeError, ValueError: the tensor or another argument is unusable, or this rank is not in
            the group.
        rota.Mismatch: ranks differ in shape, dtype, num_channels or engine; names them.
        rota.TransportError: memory is short, the engine does not connect the hosts, or a rank
            failed to make its part.
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

    def __new__(cls, *args: Any, device: torch.device | str = "cpu", **kwargs: Any) -> Window:
        if cls is Window and _is_on("cuda", device):
            cls = DeviceWindow
        return super().__new__(cls)

    def __init__(
        self,
        tensor_or_shape: torch.Tensor | Sequence[int] | int,
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_channels: int = 1,
        timeout: timedelta | None = None,
        engine: dist.ProcessGroup | None = None,
    ) -> None:
        pg = member_group(group, "Window")

        def make_tensor() -> torch.Tensor:
            if not _is_on("cpu", device):
                raise ValueError(f"rota.Window: device is {device!r}, expected cpu or cuda")
            return _own_tensor(tensor_or_shape, dtype)

        own, _ = open_window(self, pg, make_tensor, num_channels, timeout, engine)
        self._tensor = own.tensor

    # A number would count as seconds.
    def wait_signal(self, rank: int, channel: int = 0, timeout: timedelta | None = None) -> None:
        timeout = timeouts.checked(timeout, "rota.Window.wait_signal", None)
        super().wait_signal(rank, channel, timeout)

    def wait_any_signal(
        self, ranks: Sequence[int], channel: int = 0, timeout: timedelta | None = None
    ) -> int:
        timeout = timeouts.checked(timeout, "rota.Window.wait_any_signal", None)
        return super().wait_any_signal(ranks, channel, timeout)

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's part."""
        return self._tensor


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
        own, others = open_window(
            self, pg, lambda: empty(0, dtype=dtype), num_channels, timeout, engine, kind="cuda"
        )
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
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise ValueError(
                    f"rota.Window: the shape is {tensor_or_shape!r}, expected ints of 0 or more"
                )
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


def make_window(tensor: torch.Tensor, store: dist.Store, rank: int, world_size: int) -> Window:
    """A window for ranks without a process group: a backend's, which torch 2.15 asks for one."""
    window = Window.__new__(Window)
    ranks = StoreRanks(store, rank, world_size)
    own, _ = open_window(window, ranks, lambda: tensor, 1, None, None, torch_holds_it=True)
    window._tensor = own.tensor
    return window


def _is_on(kind: str, device: torch.device | str) -> bool:
    """False for what names no device, which the constructor refuses on all ranks."""
    with contextlib.suppress(RuntimeError, TypeError):
        return torch.device(device).type == kind
    return False


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
    return tensor_or_shape
