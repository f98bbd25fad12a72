"""One version of one rank's state, in memory that processes hand to each other.

| part | what |
|---|---|
| head | words: MAGIC, where the tail is, its bytes, its checksum, and a checksum of these |
| data | the tensors' elements, each from a multiple of ALIGNMENT on |
| tail | a pickled Tail: which version it is, the tensors' places, and the rest of the state |

The head is cleared before anything else is written, and written last. A process that is killed in
between leaves no version; one that has written the head leaves a whole one. Memory is sealed
against resizing, so that whoever maps it cannot be hurt by its maker.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rota import _C
from rota.checkpoint.contents import WHAT, Contents, Look
from rota.checkpoint.keeper import SEALS
from rota.errors import TransportError
from rota.layout import bytes_of, is_flat
from rota.memory import map_pages, round_up

MAGIC = int.from_bytes(b"rota-cp1", "little")
WORD_BYTES = 8
NUM_WORDS = 5  # of the head
DATA_BEGIN = mmap.PAGESIZE
ALIGNMENT = 64  # bytes; a cache line
# Bytes that one checksum covers. Copies of this length go past the caches (csrc/cpu/copy.cpp).
BUCKET_BYTES = 16 << 20
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


class Entry(NamedTuple):
    """One tensor's place."""

    look: Look
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Tail:
    """What describes a version.

    Attributes:
        rest: of the state, without its tensors (contents.py).
        checksums: words, one for each bucket of the tensors, in their order.
    """

    identity: Identity
    rank: int
    entries: tuple[Entry, ...]
    rest: bytes
    checksums: bytes

    def to_bytes(self) -> bytes:
        fields = (tuple(self.identity), self.rank, self.entries, self.rest, self.checksums)
        return pickle.dumps(fields, protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def from_bytes(cls, text: bytes) -> Tail:
        identity, *fields = pickle.loads(text)
        return cls(Identity(*identity), *fields)

    def damaged(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The name of the first of these tensors that differs from its checksum when saved."""
        checksums = iter(array("Q", self.checksums))
        for tensor, entry in zip(tensors, self.entries, strict=True):
            for bucket in buckets(bytes_of(tensor)):
                if _C.checksum(bucket) != next(checksums):
                    return entry.look.name
        return None


class Memory:
    """Shared memory, mapped; it lives as long as anybody maps it or has a descriptor of it.

    Attributes:
        fd: closed with this object.
        bytes: uint8, of the whole memory.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._is_populated = False
        with torch.inference_mode(False):  # later versions may be written outside of it
            self.bytes = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        self.fd = fd

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @classmethod
    def reserve(cls, num_bytes: int) -> Memory:
        """New memory, all of which is there.

        Raises:
            rota.TransportError: there is too little; names the bytes needed and free.
        """
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
        """Maps what another process has made; takes the descriptor over.

        Raises:
            rota.TransportError: it is not sealed.
        """
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

    # ---- head ----

    def clear_head(self) -> None:
        """From now on there is no version in it."""
        self.bytes[: NUM_WORDS * WORD_BYTES].zero_()

    def write_head(self, tail_begin: int, tail: bytes) -> None:
        """Makes what has been written a version."""
        words = array("Q", [MAGIC, tail_begin, len(tail), _checksum(tail)])
        words.append(_checksum(words.tobytes()))
        self.bytes[: NUM_WORDS * WORD_BYTES].copy_(torch.frombuffer(words, dtype=torch.uint8))

    def version(self) -> Version | None:
        """The version in it; None if there is none, or its tail is damaged."""
        words = array("Q", bytes(self.bytes[: NUM_WORDS * WORD_BYTES].tolist()))
        magic, begin, length, checksum, own = words
        if magic != MAGIC or own != _checksum(words[:-1].tobytes()):
            return None
        if begin + length > len(self.bytes):
            return None
        tail = self.bytes[begin:][:length].numpy().tobytes()
        if _checksum(tail) != checksum:
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


def _checksum(content: bytes) -> int:
    return _C.checksum(torch.frombuffer(bytearray(content), dtype=torch.uint8))


@dataclass(frozen=True)
class Version:
    """A whole version.

    Attributes:
        num_bytes: of the memory that are in use, from its start on.
    """

    memory: Memory
    tail: Tail
    num_bytes: int

    @property
    def identity(self) -> Identity:
        return self.tail.identity

    @property
    def looks(self) -> list[Look]:
        return [entry.look for entry in self.tail.entries]

    def parts(self) -> list[torch.Tensor]:
        """The saved tensors' bytes, in place; uint8."""
        return [self.memory.bytes[entry.begin :][: entry.num_bytes] for entry in self.tail.entries]

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Copies the tensors out, and compares the checksums of what was copied.

        Args:
            tensors: like the saved ones, on the CPU, of any strides.

        Returns:
            The name of the first damaged tensor; later ones are not copied.
        """
        checksums = array("Q", self.tail.checksums)
        next_bucket = 0
        for tensor, part, entry in zip(tensors, self.parts(), self.tail.entries, strict=True):
            target = tensor
            if not is_flat(tensor):
                target = entry.look.empty()
            for to, source in zip(buckets(bytes_of(target)), buckets(part), strict=True):
                if _C.copy_with_checksum(to, source) != checksums[next_bucket]:
                    return entry.look.name
                next_bucket += 1
            if target is not tensor:
                tensor.copy_(target)
        return None


class Plan:
    """Where a state's tensors will lie.

    Attributes:
        num_bytes: of memory that the version takes.
    """

    def __init__(self, contents: Contents, identity: Identity, rank: int) -> None:
        self._contents = contents
        begin = DATA_BEGIN
        entries = []
        num_buckets = 0
        for look, tensor in zip(contents.looks, contents.tensors, strict=True):
            entries.append(Entry(look, begin, tensor.nbytes))
            num_buckets += -(-tensor.nbytes // BUCKET_BYTES)
            begin = round_up(begin + tensor.nbytes, ALIGNMENT)
        no_checksums = bytes(num_buckets * WORD_BYTES)
        self._tail = Tail(identity, rank, tuple(entries), contents.rest, no_checksums)
        self._tail_begin = begin
        # Checksums of other values take as many bytes.
        self.num_bytes = round_up(begin + len(self._tail.to_bytes()), mmap.PAGESIZE)

    def write(self, memory: Memory) -> Version:
        """Copies the state into memory of at least num_bytes."""
        memory.clear_head()
        checksums = array("Q")
        for tensor, entry in zip(self._contents.tensors, self._tail.entries, strict=True):
            target = memory.bytes[entry.begin :][: entry.num_bytes]
            for to, source in zip(buckets(target), buckets(bytes_of(tensor)), strict=True):
                checksums.append(_C.copy_with_checksum(to, source))
        tail = Tail(**{**vars(self._tail), "checksums": checksums.tobytes()})
        text = tail.to_bytes()
        memory.bytes[self._tail_begin :][: len(text)].copy_(
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
        )
        memory.write_head(self._tail_begin, text)
        return Version(memory, tail, self._tail_begin + len(text))


def buckets(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """What each checksum covers; nothing for no bytes."""
    return iter(content.split(BUCKET_BYTES)) if len(content) else iter(())
