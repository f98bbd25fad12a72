"""What the keeper of a host holds, as one rank uses it: two slots for each rank's state.

A rank writes to the slot that does not hold the newest version that all have, so there is a whole
one at any time. The memory stays mapped here from save to save; if the keeper ends, its successor
gets it from here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rota.checkpoint.keeper import SLOTS
from rota.checkpoint.link import KeeperLink, KeeperLost
from rota.checkpoint.version import Identity, Memory, Version

T = TypeVar("T")


@dataclass
class Slots:
    """The memory of one rank's state."""

    memories: dict[int, Memory]  # by slot
    next: int = 0  # the slot for the next version

    def versions(self) -> dict[int, Version]:
        """The whole ones, by slot."""
        versions = {slot: memory.version() for slot, memory in self.memories.items()}
        return {slot: version for slot, version in versions.items() if version is not None}

    def find(self, identity: Identity) -> Version | None:
        versions = self.versions().values()
        return next((version for version in versions if version.identity == identity), None)

    def protect(self, identity: Identity | None) -> None:
        """Lets the next version take the slot without this one; the older if neither has it."""
        have = {slot: version.identity for slot, version in self.versions().items()}
        holding = [slot for slot in have if have[slot] == identity]
        oldest = min(SLOTS, key=lambda slot: have.get(slot, ()))
        self.next = 1 - holding[0] if holding else oldest


class Holdings:
    """The slots that this rank writes to, and the keeper that holds them; is_in_use says whether
    someone else in this process still reads memory."""

    def __init__(self, link: KeeperLink, is_in_use: Callable[[Memory], bool]) -> None:
        self._link = link
        self._is_in_use = is_in_use
        self._slots: dict[int, Slots] = {}

    def slots(self, owner: int) -> Slots:
        """The slots of a rank's state; from now on this rank writes to them."""
        if owner not in self._slots:
            self._slots[owner] = self.look(owner)
        return self._slots[owner]

    def look(self, owner: int) -> Slots:
        """The same without writing to them."""
        if owner in self._slots:
            return self._slots[owner]
        fetched = self._ask(lambda: self._link.fetch(owner))
        return Slots({slot: Memory.open(fd) for slot, fd in fetched.items()})

    def identities(self) -> dict[int, list[Identity]]:
        """All whole versions that the keeper has, by owner."""
        owners = {*self._ask(self._link.owners), *self._slots}
        return {
            owner: sorted(version.identity for version in self.look(owner).versions().values())
            for owner in sorted(owners)
        }

    def ensure_keeper(self) -> None:
        """Finds or starts a keeper if there is none any more, and hands over all memory again."""
        if self._link.is_alive():
            return
        while True:
            self._link.connect()
            with contextlib.suppress(KeeperLost):
                for owner, slots in self._slots.items():
                    for slot, memory in slots.memories.items():
                        self._link.keep(owner, slot, memory.fd)
                return

    def room(self, owner: int, num_bytes: int) -> Memory:
        """Memory of at least num_bytes in the next slot, without a version; the other stays."""
        slots = self.slots(owner)
        slot = slots.next
        memory = slots.memories.get(slot)
        if memory is not None and len(memory.bytes) >= num_bytes and not self._is_in_use(memory):
            memory.clear_head()
            return memory
        if memory is not None:
            # First, since there may not be room for three versions.
            del slots.memories[slot]
            self._ask(lambda: self._link.drop(owner, slot))
            del memory
        new = Memory.reserve(num_bytes)
        slots.memories[slot] = new
        self._ask(lambda: self._link.keep(owner, slot, new.fd))
        return new

    def advance(self, owner: int) -> None:
        """The version in the next slot is whole."""
        slots = self.slots(owner)
        slots.next = 1 - slots.next

    def drop_all_but(self, owners: set[int]) -> None:
        """Frees what is left of ranks that have moved to another host, or are none any more."""
        for owner in {*self._ask(self._link.owners), *self._slots} - owners:
            self._slots.pop(owner, None)
            for slot in SLOTS:
                self._ask(functools.partial(self._link.drop, owner, slot))

    # A keeper that was just lost has a successor that gets everything first.
    def _ask(self, request: Callable[[], T]) -> T:
        while True:
            try:
                return request()
            except KeeperLost:
                self.ensure_keeper()

    def forget(self) -> None:
        self._slots = {}
