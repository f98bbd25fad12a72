"""Versions on disk, by torch.distributed.checkpoint: DIRECTORY/step-STEP/rank-RANK-of-WORLD_SIZE.

Each rank writes a DCP checkpoint of its own, whose entries are its tensors by name, and TAIL: what
version.py pickles behind the tensors, with their checksums. DCP writes its metadata last, and a
checkpoint without it counts as none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rota.checkpoint.contents import WHAT
from rota.checkpoint.version import Identity, Memory, Tail, Version
from rota.errors import TransportError

TAIL = "rota"
METADATA = ".metadata"  # the file that DCP writes last


class Writer:
    """Writes versions in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rota-checkpoint")
        self._memory_of: dict[Future[Path], Memory] = {}

    def start(self, version: Version, directory: Path) -> Future[Path]:
        future = self._thread.submit(write, version, directory)
        self._memory_of = {f: memory for f, memory in self._memory_of.items() if not f.done()}
        self._memory_of[future] = version.memory
        return future

    def uses(self, memory: Memory) -> bool:
        """Whether a version in it is still to be written."""
        return any(memory is its and not f.done() for f, its in self._memory_of.items())

    def close(self) -> None:
        """Waits for everything that was started."""
        self._thread.shutdown()


def folder_of(directory: Path, step: int, rank: int, world_size: int) -> Path:
    return directory / f"step-{step}" / f"rank-{rank}-of-{world_size}"


def write(version: Version, directory: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    identity, rank = version.identity, version.tail.rank
    folder = folder_of(directory, identity.step, rank, identity.world_size)
    tail = torch.frombuffer(bytearray(version.tail.to_bytes()), dtype=torch.uint8)
    names = (look.name for look in version.tail.looks)
    tensors = dict(zip(names, version.tensors(), strict=True))
    (folder / METADATA).unlink(missing_ok=True)  # while it is written, there is none
    with _no_warning():
        dcp.save({TAIL: tail, **tensors}, checkpoint_id=folder, no_dist=True)
    return folder


def identities(directory: Path, rank: int, world_size: int) -> list[Identity]:
    """The whole versions of a rank."""
    folders = directory.glob(f"step-*/rank-{rank}-of-{world_size}")
    return sorted(_tail(folder).identity for folder in folders if (folder / METADATA).exists())


def read(directory: Path, identity: Identity, rank: int) -> tuple[Tail, Sequence[torch.Tensor]]:
    """A rank's version: its tail, and its tensors in new memory, with the right checksums."""
    import torch.distributed.checkpoint as dcp

    folder = folder_of(directory, identity.step, rank, identity.world_size)
    tail = _tail(folder)
    tensors = {look.name: look.empty() for look in tail.looks}
    with _no_warning():
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    if damaged := tail.damaged(list(tensors.values())):
        raise TransportError(
            f"{WHAT}.load_from_disk: {damaged} of rank {rank} in step {identity.step} does not "
            f"match its checksum: {folder} is damaged; load an older step"
        )
    return tail, list(tensors.values())


def _tail(folder: Path) -> Tail:
    import torch.distributed.checkpoint as dcp

    metadata: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[TAIL]
    state = {TAIL: torch.empty(metadata.size, dtype=torch.uint8, device="cpu")}
    with _no_warning():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return Tail.from_bytes(state[TAIL].numpy().tobytes())


# DCP warns whenever no_dist is given.
@contextmanager
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
