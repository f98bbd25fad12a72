"""The memory of one publisher: two buffers, of which the newest whole version is in one.

Publication number n = 1, 2, ... of a publisher is version n of a double buffer
(shared/double_buffer.py). It begins only when every publisher is done with n - 1, so the newest
number that all are done with is in a buffer of each. Readers need not trust the order in which they
load bytes and words, because every bucket has a checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from rota import _C
from rota.errors import PeerFailed, TransportError
from rota.shared.aligned import Views
from rota.shared.buckets import read_checked
from rota.shared.double_buffer import DONE, OpenedDoubleBuffer
from rota.weights.layout import Layout


class Publication(NamedTuple):
    """What the header of a buffer says."""

    number: int
    version: int
    checksums: Sequence[int]  # of all buckets


class OpenedPublisher(OpenedDoubleBuffer[Views[str | int]]):
    """Another process's memory, mapped, also when that has ended; its title is for errors."""

    def __init__(self, title: str, address: str, layout: Layout, timeout: timedelta) -> None:
        self.layout = layout
        opened = _C.OpenedTensor(address, title, timeout)
        super().__init__(opened, layout.memory.slots(opened.bytes))
        self.who = f"{title} (pid {opened.pid})"

    def wait_until_done(self, number: int, timeout_s: float) -> bool:
        """Blocks until it is done with a publication; False if it is not within the timeout."""
        try:
            return self.opened.wait(DONE, number, timedelta(seconds=max(0.0, timeout_s)))
        except PeerFailed as error:
            raise PeerFailed(
                f"rota.WeightStore: {self.who} has ended or closed its store after publication "
                f"{self.num_done}, and was awaited for number {number}"
            ) from error

    def publication(self, number: int) -> Publication | None:
        """What the header says of a publication that is done; None if it is overwritten."""
        # What looks damaged may have been written meanwhile, just before BEGUN became visible.
        for _ in range(2):
            words = read_checked(self.slot(number)["header"])
            if self.is_overwritten(number):
                return None
            if words is not None and words[0] == number:
                return Publication(words[0], words[1], words[2:])
        raise self.damage(f"the header of publication {number}")

    def damage(self, what: str) -> TransportError:
        """The error for what differs from its checksum."""
        return TransportError(
            f"rota.WeightStore: {what} of {self.who} does not match its checksum: its memory is "
            f"damaged; pull the next version"
        )
