"""What carries messages between hosts: torch process groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from rota import _torch
from rota.errors import RotaError, TransportError
from rota.rendezvous.polling import poll

if TYPE_CHECKING:
    from rota._torch import Backend

# Given the group's store; collective. Returns the backend, or None and why it cannot connect.
ConnectEngine = Callable[[dist.Store], "tuple[Backend | None, str]"]


class Engine(NamedTuple):
    name: str  # must be the same on every rank
    problem: str  # why this rank cannot use it, or empty
    connect: ConnectEngine
    for_cuda: Backend | None  # carries CUDA tensors; None: they go through the host's memory

    def connected(self, what: str, store: dist.Store) -> Backend:
        """The backend, for what Python makes over it. Collective."""
        if self.problem:
            raise ValueError(f"{what}: {self.problem}")
        backend, problem = self.connect(store)
        if backend is None:
            raise TransportError(f"{what}: {problem}")
        return backend


# Given rank and world_size.
ChooseEngine = Callable[[int, int], Engine]


def engine_chooser(
    given: dist.ProcessGroup | None,
    timeout: timedelta,
    check_peers: Callable[[], object] | None = None,
) -> ChooseEngine:
    """Returns what chooses the engine of a group, once its ranks turn out to be on several hosts.

    That is `given`, the user's own group of the same ranks in the same order. Without one, and
    beside one that has no backend for the CPU, a Gloo group is made; GLOO_SOCKET_IFNAME chooses its
    interface. check_peers raises if a rank is gone; called while Gloo waits for the others.
    """

    def choose(rank: int, world_size: int) -> Engine:
        def connect_gloo(store: dist.Store) -> tuple[Backend | None, str]:
            if check_peers is not None:
                store = _WatchedStore(store, timeout, check_peers)
            try:
                return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout), ""
            except RotaError:  # of check_peers
                raise
            except RuntimeError as error:
                return None, (
                    f"Gloo does not connect the hosts ({error}); is the network up, and "
                    f"GLOO_SOCKET_IFNAME right?"
                )

        if given is None:
            return Engine("None", "", connect_gloo, None)
        if problem := _problem_of(given, rank, world_size):
            return Engine("a group of yours", problem, connect_gloo, None)
        cpu, cuda = _backend(given, "cpu"), _backend(given, "cuda")
        connect = connect_gloo if cpu is None else lambda _: (cpu, "")
        if cuda is None or cuda is cpu:  # Gloo's own CUDA tensors go through the host's memory
            return Engine("a group of yours", "", connect, None)
        name = "a group of yours for CUDA tensors" + (" and others" if cpu is not None else "")
        return Engine(name, "", connect, cuda)

    return choose


def _backend(group: dist.ProcessGroup, device: str) -> Backend | None:
    try:
        return _torch.backend_of(group, torch.device(device))
    except RuntimeError:
        return None


def _problem_of(given: dist.ProcessGroup, rank: int, world_size: int) -> str:
    if not isinstance(given, dist.ProcessGroup):
        return f"the engine is {given!r}, expected a ProcessGroup that this rank is in"
    if given.size() != world_size or given.rank() != rank:
        return (
            f"the engine is a group of {given.size()} ranks, in which this is rank {given.rank()}; "
            f"expected {world_size} ranks and rank {rank}: pass a group of the same ranks in the "
            f"same order"
        )
    if _backend(given, "cpu") is None and _backend(given, "cuda") is None:
        devices = ", ".join(str(device) for device in _torch.devices_of(given))
        return (
            f"the engine is a group for {devices}, expected one for the CPU or CUDA; pass one such "
            f"as dist.new_group(backend='cpu:gloo,cuda:nccl')"
        )
    return ""


class _WatchedStore(dist.Store):
    """A store in which no wait outlasts a rank that is awaited."""

    def __init__(
        self, store: dist.Store, timeout: timedelta, check_peers: Callable[[], object]
    ) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._check_peers = check_peers

    # torch's stubs say str, but hand over bytes.
    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        def are_there() -> bool:
            self._check_peers()
            return self._store.check(keys)

        within = timeout if timeout is not None else self._timeout
        if not poll(are_there, time.monotonic() + within.total_seconds()):
            raise RuntimeError(f"a rank has not come within {within.total_seconds():g} s")
