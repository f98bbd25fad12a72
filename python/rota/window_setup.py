"""How ranks make a window together: each exposes its tensor, opens those of its host, and serves
the ranks of other hosts.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rota import _C
from rota.engine import engine_chooser
from rota.errors import Mismatch, TransportError
from rota.rendezvous.alike import sides
from rota.rendezvous.groups import Ranks, next_number
from rota.rendezvous.joint import JointSteps

MAX_CHANNELS = 1024

_living: weakref.WeakSet[_C.Window] = weakref.WeakSet()


def living_windows() -> list[_C.Window]:
    return list(_living)


def open_window(
    window: _C.Window,
    pg: Ranks,
    make_tensor: Callable[[], torch.Tensor],
    num_channels: int,
    timeout: timedelta | None,
    engine: dist.ProcessGroup | None,
    *,
    kind: str = "cpu",
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
            "kind": kind,
            "made": f"{tuple(tensor.shape)} of {tensor.dtype}, {num_channels} channels",
            "host": _C.host_id(),
            "address": own[0].address,
            "engine": "no engine" if engine is None else "one of its own",
            "service": services.usable_number(),
        }

    cards = steps.step(expose)
    if difference := sides([card["kind"] for card in cards], "asked for"):
        raise Mismatch(
            f"rota.Window: ranks disagree on device: {difference}; give every rank the same kind"
        )
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
        _C.Window.__init__(
            window, own[0], rank, others, num_channels, own_timeout, service[0], window_number
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
    _living.add(window)
    return own[0], others


def check_made_alike(cards: list[dict[str, str]]) -> None:
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
        """The window's number among those of its service. All ranks count alike: call it once they
        have agreed on whose service it is."""
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
        engine = choose(steps.rank, steps.world_size)
        backend = engine.connected("rota.Window", dist.PrefixStore("engine", steps.store))
        service = _C.WindowService(backend, hosts, steps.rank, number)
        _services[self._key] = number, service
        return service


# Each lives as long as its group or engine.
_services: weakref.WeakKeyDictionary[Ranks, tuple[int, _C.WindowService]] = (
    weakref.WeakKeyDictionary()
)
atexit.register(_services.clear)
