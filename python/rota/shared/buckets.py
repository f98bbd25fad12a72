"""Bytes with checksums, which readers compare with those of what they have copied.

Checksums are against damage, and against what was overwritten during a copy; not against forgery.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch

from rota import _C

# Bytes that one checksum covers. Copies of this length go past the caches if the last one has 32
# MiB or less (csrc/cpu/copy.cpp).
BUCKET_BYTES = 16 << 20
WORD_BYTES = 8


def buckets_of(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """What each checksum of these bytes (uint8) covers; nothing for no bytes."""
    return iter(content.split(BUCKET_BYTES)) if len(content) else iter(())


def copy_with_checksums(to: torch.Tensor, source: torch.Tensor) -> list[int]:
    return [
        _C.copy_with_checksum(to_bucket, bucket)
        for to_bucket, bucket in zip(buckets_of(to), buckets_of(source), strict=True)
    ]


def checksum(content: bytes) -> int:
    return _C.checksum(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def write_bytes(place: torch.Tensor, content: bytes) -> None:
    """Writes to the start of a place (uint8)."""
    if content:
        place[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def checked_bytes(num_words: int) -> int:
    return (num_words + 1) * WORD_BYTES


def write_checked(place: torch.Tensor, words: Sequence[int]) -> None:
    """Writes 64-bit words, and their checksum behind them."""
    content = array("Q", words)
    content.append(checksum(content.tobytes()))
    write_bytes(place, content.tobytes())


def read_checked(place: torch.Tensor) -> array[int] | None:
    """The words that fill a place; None if they are damaged, or just being written."""
    words = array("Q", place.numpy().tobytes())
    own = words.pop()
    return words if checksum(words.tobytes()) == own else None
