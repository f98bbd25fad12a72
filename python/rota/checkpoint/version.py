"""One version of one rank's state, in memory that processes hand to each other.

| part | what |
|---|---|
| head | words: MAGIC, where the tail is, its bytes, its checksum |
| data | the tensors' elements, in an AlignedLayout |
| tail | a pickled Tail: which version it is, what the tensors are, and the rest of the state |

The head is cleared before anything else is written, and written last. A process that is killed in
between leaves no version; one that has written the head leaves a whole one. Memory is sealed
against resizing, so that whoever maps it cannot be hurt by its maker.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rota import _C
from rota.checkpoint.contents import WHAT, Contents, Look
from rota.checkpoint.keeper import SEALS
from rota.errors import TransportError
from rota.shared import buckets
from rota.shared.aligned import AlignedLayout, round_up
from rota.shared.flat import bytes_of, is_flat
from rota.shared.memory import map_pages

MAGIC = int.from_bytes(b"rota-cp2", "little")
DATA_BEGIN = mmap.PAGESIZE
_ZEROED_AT_ONCE = 1 << 20


class Identity(NamedTuple):
    """Which version it is; equal on all ranks that have saved it together.

    Sessions are the times between two loads. Their numbers grow, so the greatest identity is the
    newest, also after a return to an older step; `token` tells apart two sessions that could not
    know of each other.
    """

    session: int
    step: int
    token: str
    world_size: int


@dataclass(frozen=True)
class Tail:
    """What describes a version."""

    identity: Identity
    rank: int
    looks: Sequence[Look]  # of the tensors, from which their places follow
    rest: bytes  # of the state, without its tensors (contents.py)
    checksums: bytes  # words, one for each bucket of the tensors, in their order

    def to_bytes(self) -> bytes:
        looks = [tuple(look) for look in self.looks]
        fields = (tuple(self.identity), self.rank, looks, self.rest, self.checksums)
        return pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def from_bytes(cls, text: bytes) -> Tail:
        identity, rank, looks, *fields = pickle.loads(text)
        return cls(Identity(*identity), rank, [Look(*look) for look in looks], *fields)

    def damaged(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The name of the first of these tensors that differs from its checksum when saved."""
        checksums = iter(array("Q", self.checksums))
        for tensor, look in zip(tensors, self.looks, strict=True):
            for bucket in buckets.buckets_of(bytes_of(tensor)):
                if _C.checksum(bucket) != next(checksums):
                    return look.name
        return None


class Memory:
    """Shared memory, mapped (`bytes`, uint8); it lives as long as anybody maps it or has a
    descriptor of it, such as `fd`, which is closed with this object."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._is_populated = False
        with torch.inference_mode(False):  # later versions may be written outside of it
            self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
            self._head = self.bytes[: buckets.checked_bytes(4)]
        self.fd = fd

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @classmethod
    def reserve(cls, num_bytes: int) -> Memory:
        """New memory, all of which is there; TransportError if there is too little."""
        free = _C.available_memory()
        if num_bytes > free:
            raise _too_little(num_bytes, "that is more than there is")
        fd = os.memfd_create("rota-checkpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            _write_zeros(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            memory = cls(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise _too_little(num_bytes, str(error)) from error
        memory.populate()
        return memory

    @classmethod
    def open(cls, fd: int) -> Memory:
        """Maps sealed memory that another process has made; takes the descriptor over."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise TransportError(f"{WHAT}: the keeper holds memory that is not sealed")
            return cls(fd, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise

    def populate(self) -> None:
        """Fills this process's page table, once; may run beside a copy, in another thread."""
        if not self._is_populated:
            self._is_populated = True
            map_pages(self.bytes)

    # ---- head

    def clear_head(self) -> None:
        self._head.zero_()

    def write_head(self, tail_begin: int, tail: bytes) -> None:
        buckets.write_checked(self._head, [MAGIC, tail_begin, len(tail), buckets.checksum(tail)])

    def version(self) -> Version | None:
        """The version in it; None if there is none, or its tail is damaged."""
        magic, begin, length, expected = buckets.read_checked(self._head) or (0, 0, 0, 0)
        if magic != MAGIC or begin + length > len(self.bytes):
            return None
        tail = self.bytes[begin:][:length].numpy().tobytes()
        if buckets.checksum(tail) != expected:
            return None
        return Version(self, Tail.from_bytes(tail), begin + length)


def _write_zeros(fd: int, num_bytes: int) -> None:
    """Reserves memory; what posix_fallocate() reserves would be zeroed later, page by page."""
    zeros = memoryview(bytes(_ZEROED_AT_ONCE))
    end = 0
    while end < num_bytes:
        end += os.pwrite(fd, zeros[: num_bytes - end], end)


def _too_little(num_bytes: int, why: str) -> TransportError:
    return TransportError(
        f"{WHAT}: cannot reserve {num_bytes} bytes of shared memory for a version ({why}; "
        f"{_C.available_memory()} bytes free); nothing was saved, and the last version is still "
        f"there; free memory or raise the container's limit"
    )


@dataclass(frozen=True)
class Version:
    """A whole version."""

    memory: Memory
    tail: Tail
    num_bytes: int  # of the memory that are in use, from its start on

    @property
    def identity(self) -> Identity:
        return self.tail.identity

    def tensors(self) -> list[torch.Tensor]:
        """What was saved, in place."""
        return list(_layout(self.tail.looks).views(self.memory.bytes).values())

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Copies to tensors of any strides, and compares checksums; returns the name of the first
        damaged one, after which none is copied."""
        checksums = iter(array("Q", self.tail.checksums))
        for tensor, saved, look in zip(tensors, self.tensors(), self.tail.looks, strict=True):
            target = tensor if is_flat(tensor) else look.empty()
            copied = buckets.copy_with_checksums(bytes_of(target), bytes_of(saved))
            if copied != list(itertools.islice(checksums, len(copied))):
                return look.name
            if target is not tensor:
                tensor.copy_(target)
        return None


def write_version(
    contents: Contents, identity: Identity, rank: int, make_room: Callable[[int, int], Memory]
) -> Version:
    """Copies a rank's state into memory that make_room(rank, num_bytes) finds for it."""
    layout = _layout(contents.looks)
    num_buckets = sum(-(-tensor.nbytes // buckets.BUCKET_BYTES) for tensor in contents.tensors)
    # Checksums of other values take as many bytes.
    tail = Tail(
        identity, rank, contents.looks, contents.rest, bytes(num_buckets * buckets.WORD_BYTES)
    )
    num_bytes = round_up(layout.end + len(tail.to_bytes()), mmap.PAGESIZE)
    memory = make_room(rank, num_bytes)
    memory.clear_head()
    checksums = array("Q")
    places = layout.views(memory.bytes).values()
    for place, tensor in zip(places, contents.tensors, strict=True):
        checksums.extend(buckets.copy_with_checksums(bytes_of(place), bytes_of(tensor)))
    tail = replace(tail, checksums=checksums.tobytes())
    text = tail.to_bytes()
    buckets.write_bytes(memory.bytes[layout.end :], text)
    memory.write_head(layout.end, text)
    return Version(memory, tail, layout.end + len(text))


def _layout(looks: Sequence[Look]) -> AlignedLayout[int]:
    sections = [(getattr(torch, look.dtype), look.shape) for look in looks]
    return AlignedLayout(dict(enumerate(sections)), DATA_BEGIN)
