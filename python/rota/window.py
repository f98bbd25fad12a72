"""Memory of each rank that the others read and write without its help."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rota import _C, timeouts
from rota.engine import engine_chooser
from rota.errors import Mismatch, TransportError
from rota.rendezvous.alike import sides
from rota.rendezvous.groups import Ranks, StoreRanks, member_group, next_number
from rota.rendezvous.joint import JointSteps
from rota.shared.memory import empty


class Window(_C.Window):
    """A tensor of each rank that all ranks of a group can access at any time.

    `put`, `get` and `accumulate` copy to and from another rank's tensor without a call there;
    `view(rank)` is that tensor itself, in place. `signal` and `wait_signal` order them: whoever has
    waited for a rank's signal sees all that the rank has written before. Nothing else is ordered,
    and only `accumulate` is atomic, in chunks of 64 KiB. (As MPI's passive target, MPI-4.1
    chapter 12, with signals as in OpenSHMEM 1.5.)

    Making one is collective: every rank of the group makes its windows in the same order, with one
    shape and dtype. After that ranks are on their own. The death of a rank ends only waits for this
    rank and writes to it; its memory can still be read on its own host, as it was.

    Ranks on other hosts are reached over the engine: a call returns when the target has answered,
    and a thread of the target serves it. Their memory cannot be mapped, so `view` refuses them, and
    that of a rank that has died is gone.

    Args:
        tensor_or_shape: this rank's part: a contiguous CPU tensor, or the size of a new one of
            zeroes. A tensor that `rota.empty` has not made is moved to shared memory, never
            copied. It is refused if something else may use its memory where it is: a view,
            `detach()`, a numpy array, a DLPack export, autograd, DDP or a pending operation.
        group: the ranks; None is the default group, on any backend.
        dtype: of a new tensor; torch's default dtype if None.
        device: of a new tensor: the CPU, or this rank's GPU (docs/cuda.md says what differs there).
        num_channels: of signals; each counts by itself.
        timeout: of making the window and of each wait; None is that of the group.
        engine: what carries messages between hosts: a process group of the same ranks whose CPU
            backend can send and recv, for rota alone. None: a Gloo group that all windows over this
            group share. Not used on one host.

    Raises:
        TypeError, ValueError: no tensor on the CPU, a strided one, one whose memory belongs to
            another library, this rank is not in the group, or another argument is unusable.
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
        if cls is Window and _is_cuda(device):
            from rota.device_window import DeviceWindow

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
            if torch.device(device).type != "cpu":
                raise ValueError(f"rota.Window: device is {device!r}, expected cpu or cuda")
            return _own_tensor(tensor_or_shape, dtype)

        own, _ = self._open(pg, make_tensor, num_channels, timeout, engine)
        self._tensor = own.tensor

    def _open(
        self,
        pg: Ranks,
        make_tensor: Callable[[], torch.Tensor],
        num_channels: int,
        timeout: timedelta | None,
        engine: dist.ProcessGroup | None,
        *,
        torch_holds_it: bool = False,
    ) -> tuple[_C.ExposedTensor, list[_C.OpenedTensor | None]]:
        """Makes the window; returns this rank's part and those of the others on this host."""
        steps = JointSteps.over(pg, "Window")
        rank, world_size = steps.rank, steps.world_size
        services = _Services(pg, engine)
        own: list[_C.ExposedTensor] = []

        def expose() -> dict[str, Any]:
            steps.take_timeout(timeout)
            if not isinstance(num_channels, int) or not 1 <= num_channels <= MAX_CHANNELS:
                raise ValueError(
                    f"rota.Window: num_channels is {num_channels!r}, expected 1 to {MAX_CHANNELS}"
                )
            tensor = make_tensor()
            own.append(
                _C.ExposedTensor(
                    tensor,
                    world_size * num_channels,
                    others_may_write=True,
                    torch_holds_it=torch_holds_it,
                )
            )
            return {
                "made": f"{tuple(tensor.shape)} of {tensor.dtype}, {num_channels} channels",
                "host": _C.host_id(),
                "address": own[0].address,
                "engine": "no engine" if engine is None else "one of its own",
                "service": services.usable_number(),
            }

        cards = steps.step(expose)
        check_made_alike(cards)
        if difference := sides([card["engine"] for card in cards], "has"):
            raise Mismatch(
                f"rota.Window: ranks disagree: {difference}; give every rank an engine or none"
            )
        own_timeout = steps.timeout
        window_number = services.next_window_number()
        others: list[_C.OpenedTensor | None] = [None] * world_size
        service: list[_C.WindowService | None] = []

        def open_others() -> None:
            for peer in range(world_size):
                if peer != rank and cards[peer]["host"] == cards[rank]["host"]:
                    address = cards[peer]["address"]
                    others[peer] = _C.OpenedTensor(address, f"rank {peer}", own_timeout)
            service.append(services.connected(steps, cards, own_timeout, window_number))

        def serve() -> None:
            super(Window, self).__init__(
                own[0], rank, others, num_channels, own_timeout, service[0], window_number
            )

        try:
            steps.step(open_others)
        except TransportError:
            steps.check_all()  # that a rank is lost is the cause to report
            raise
        if service[0] is None:
            serve()
        else:
            steps.step(serve)  # nobody asks a rank that does not serve yet
        _living.add(self)
        return own[0], others

    # A number would count as seconds.
    def wait_signal(self, rank: int, channel: int = 0, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            timeout = timeouts.checked(timeout, "rota.Window.wait_signal")
        super().wait_signal(rank, channel, timeout)

    def wait_any_signal(
        self, ranks: Sequence[int], channel: int = 0, timeout: timedelta | None = None
    ) -> int:
        if timeout is not None:
            timeout = timeouts.checked(timeout, "rota.Window.wait_any_signal")
        return super().wait_any_signal(ranks, channel, timeout)

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's part."""
        return self._tensor


def make_window(tensor: torch.Tensor, store: dist.Store, rank: int, world_size: int) -> Window:
    """A window for ranks without a process group: a backend's, which torch 2.15 asks for one."""
    window = Window.__new__(Window)
    ranks = StoreRanks(store, rank, world_size)
    own, _ = window._open(ranks, lambda: tensor, 1, None, None, torch_holds_it=True)
    window._tensor = own.tensor
    return window


MAX_CHANNELS = 1024

_living: weakref.WeakSet[Window] = weakref.WeakSet()


def living_windows() -> list[Window]:
    return list(_living)


def _is_cuda(device: torch.device | str) -> bool:
    """False for what names no device, which the constructor refuses on all ranks."""
    with contextlib.suppress(RuntimeError, TypeError):
        return torch.device(device).type == "cuda"
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


def check_made_alike(cards: list[dict[str, str]]) -> None:
    """Raises Mismatch if ranks have made different windows, as their cards say under "made"."""
    if difference := sides([card["made"] for card in cards], "made"):
        raise Mismatch(
            f"rota.Window: ranks disagree: {difference}; give every rank the same shape, dtype and "
            f"num_channels"
        )


class _Services:
    """What serves ranks of other hosts: one for all windows over a group, or over an engine."""

    def __init__(self, pg: Ranks, engine: dist.ProcessGroup | None) -> None:
        self._engine = engine
        self._key = engine if isinstance(engine, dist.ProcessGroup) else pg

    def next_window_number(self) -> int:
        """Of the window among those of one service, and of a service that this window has to make.

        All ranks count alike: call it once they have agreed on whose service it is.
        """
        return next_number(self._key, "remote window")

    def usable_number(self) -> int:
        """The number of the service that this rank has; -1 if it needs a new one."""
        number, service = _services.get(self._key, (-1, None))
        return number if service is not None and service.is_usable else -1

    def connected(
        self, steps: JointSteps, cards: list[dict[str, Any]], timeout: timedelta, number: int
    ) -> _C.WindowService | None:
        """The service that all ranks have, or a new one; None if all ranks are on one host."""
        hosts = [card["host"] for card in cards]
        if len(set(hosts)) == 1:
            return None
        numbers = {card["service"] for card in cards}
        if len(numbers) == 1 and numbers != {-1}:
            return _services[self._key][1]
        choose = engine_chooser(self._engine, timeout, steps.check_all)
        _, problem, connect, _ = choose(steps.rank, steps.world_size)
        if problem:
            raise ValueError(f"rota.Window: {problem}")
        backend, problem = connect(dist.PrefixStore("engine", steps.store))
        if backend is None:
            raise TransportError(f"rota.Window: {problem}")
        service = _C.WindowService(backend, hosts, steps.rank, number)
        _services[self._key] = number, service
        return service


# Each lives as long as its group or engine.
_services: weakref.WeakKeyDictionary[Ranks, tuple[int, _C.WindowService]] = (
    weakref.WeakKeyDictionary()
)
atexit.register(_services.clear)
