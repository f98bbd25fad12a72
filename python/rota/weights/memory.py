"""The memory of one publisher: two buffers, of which the newest whole version is in one.

Publication number n = 1, 2, ... lies in buffer n % 2. Two words say how far the publisher is:

| word | writer | readers | at rest | meaning |
|---|---|---|---|---|
| BEGUN | the publisher | readers | 0 | the last publication whose buffer it has begun to write |
| DONE | the publisher | readers, other publishers | 0 | the last that is whole |

Number n begins only when every publisher is done with n - 1, so the newest number that all are done
with is in a buffer of each. A reader copies first and looks at BEGUN afterwards: less than n + 2
means that nothing was overwritten. It need not trust the order of those two loads, because every
bucket has a checksum.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from rota import _C
from rota.errors import PeerFailed, TransportError
from rota.weights.layout import Layout

BEGUN, DONE = 0, 1
NUM_WORDS = 2
WORD_BYTES = 8


class Publication(NamedTuple):
    """What the header of a buffer says."""

    number: int
    version: int
    checksums: Sequence[int]  # of all buckets


def header_bytes(num_buckets: int) -> int:
    """Number, version, a checksum for each bucket, and one of all these."""
    return (num_buckets + 3) * WORD_BYTES


def write_header(buffer: torch.Tensor, publication: Publication) -> None:
    """Writes the start of a buffer (uint8)."""
    words = array("Q", [publication.number, publication.version, *publication.checksums])
    content = torch.frombuffer(words, dtype=torch.uint8)
    end = array("Q", [_C.checksum(content)])
    buffer[: len(content)].copy_(content)
    buffer[len(content) :][:WORD_BYTES].copy_(torch.frombuffer(end, dtype=torch.uint8))


def read_header(buffer: torch.Tensor, num_buckets: int) -> Publication | None:
    """None if it is damaged, or just being written."""
    copy = buffer[: header_bytes(num_buckets)].clone()
    words = array("Q", copy.numpy().tobytes())
    if _C.checksum(copy[:-WORD_BYTES]) != words[-1]:
        return None
    return Publication(words[0], words[1], words[2:-1])


class OpenedPublisher:
    """Another process's memory, mapped; it stays so when the process has ended.

    Args:
        title: of the publisher in errors, such as "publisher 1/2 of 'weights'".

    Raises:
        rota.TransportError: the publisher has ended or closed its store.
        rota.Timeout: its process does not answer.
    """

    def __init__(self, title: str, address: str, layout: Layout, timeout: timedelta) -> None:
        self.layout = layout
        self._opened = _C.OpenedTensor(address, title, timeout)
        self.who = f"{title} (pid {self._opened.pid})"
        self.buffers = self._opened.bytes.split(layout.buffer_bytes)

    @property
    def is_open(self) -> bool:
        """Whether it may publish again."""
        return self._opened.is_open

    @property
    def num_done(self) -> int:
        return self._opened.load(DONE)

    def wait_until_done(self, number: int, timeout_s: float) -> bool:
        """Blocks until it is done with a publication; False if it is not within the timeout.

        Raises:
            rota.PeerFailed: it has ended or closed before.
        """
        try:
            return self._opened.wait(DONE, number, timedelta(seconds=max(0.0, timeout_s)))
        except PeerFailed as error:
            raise PeerFailed(
                f"rota.WeightStore: {self.who} has ended or closed its store after publication "
                f"{self.num_done}, and was awaited for number {number}"
            ) from error

    def is_overwritten(self, number: int) -> bool:
        """Whether the publication's buffer may hold a later one."""
        return self._opened.load(BEGUN) >= number + 2

    def publication(self, number: int) -> Publication | None:
        """What the header says of a publication that is done; None if it is overwritten.

        Raises:
            rota.TransportError: the header is damaged.
        """
        # What looks damaged may have been written meanwhile, just before BEGUN became visible.
        for _ in range(2):
            header = read_header(self.buffers[number % 2], self.layout.num_buckets)
            if self.is_overwritten(number):
                return None
            if header is not None and header.number == number:
                return header
        raise self.damage(f"the header of publication {number}")

    def damage(self, what: str) -> TransportError:
        """The error for what differs from its checksum."""
        return TransportError(
            f"rota.WeightStore: {what} of {self.who} does not match its checksum: its memory is "
            f"damaged; pull the next version"
        )
