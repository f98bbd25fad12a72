"""Memory that holds many storages, which another process copies in one go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rota import _C
from rota.shared.aligned import AlignedLayout
from rota.shared.memory import empty, map_pages, unmap_pages


class Arena:
    """Places for storages of these lengths, in memory that the processes of the host can read."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._layout = AlignedLayout({i: (torch.uint8, (n,)) for i, n in enumerate(self.lengths)})
        self.bytes = empty(max(self._layout.end, 1), dtype=torch.uint8)
        self._exposed: _C.ExposedTensor | None = None
        self._opened: tuple[str, _C.OpenedTensor] | None = None  # of another process, by address

    @property
    def address(self) -> str:
        """For fetch() by others, as long as this lives."""
        if self._exposed is None:
            self._exposed = _C.ExposedTensor(self.bytes, 0, others_may_write=False)
        return self._exposed.address

    def places(self) -> list[torch.Tensor]:
        """uint8 views of the storages' places."""
        return list(self._layout.views(self.bytes).values())

    def checksum(self) -> int:
        return _C.checksum(self.bytes)

    def prepare(self, address: str, who: str, timeout: timedelta) -> None:
        """Maps this arena, and that of another process of this host for fetch(), page by page."""
        map_pages(self.bytes)
        opened = _C.OpenedTensor(address, who, timeout)
        map_pages(opened.bytes)
        self._opened = address, opened

    def fetch(self, address: str, who: str, timeout: timedelta) -> int:
        """Copies another process's arena of the same lengths, and keeps it mapped; returns the
        checksum of what was copied."""
        if self._opened is None or self._opened[0] != address:
            self._opened = address, _C.OpenedTensor(address, who, timeout)
        return _C.copy_with_checksum(self.bytes, self._opened[1].bytes)

    def unmap_source(self) -> None:
        """Lets go of what was fetched. A thread does it, since it takes a quarter of the copy."""
        if self._opened is not None:
            source = self._opened[1].bytes
            self._opened = None
            threading.Thread(target=unmap_pages, args=(source,), name="rota.elastic.Arena").start()

    def receive(self, rank: int) -> int:
        """The same by messages, from a rank that sends its arena's bytes. Returns the checksum."""
        dist.recv(self.bytes, rank)
        return self.checksum()


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def lies_on(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    is_empty = storage.nbytes() == 0
    return is_empty or (tensor.is_cpu and storage.data_ptr() == place.data_ptr())


def put_on(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Moves a tensor's storage to a place, with its contents; False if it can only copy these."""
    if lies_on(tensor, place) or _C.move_storage(tensor, place, copies=True):
        return True
    place.copy_(storage_bytes(tensor))
    return False


def take_from(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Gives a tensor's storage the contents of a place, and moves it there if it can."""
    if not lies_on(tensor, place) and not _C.move_storage(tensor, place, copies=False):
        storage_bytes(tensor).copy_(place)
