"""Who takes part, as one document: the decisions of a membership, without processes or a store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Roster:
    """The newest generation that was proposed, and who has arrived for the next one.

    Processes are told apart by their names. A proposal names all that have arrived. The next one
    waits until each of its members has arrived again or is gone: so nobody misses a proposal that
    names it, and all know how one has ended before there is another.
    """

    # Of the proposal; 0: there was none yet.
    number: int = 0
    uuid: str = ""
    members: list[str] = field(default_factory=list)  # by rank
    # Ranks that several of them ask for, and who; then it cannot become a generation.
    clashes: list[tuple[int, list[str]]] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # members that are not known to be gone
    # The rank that each process asks for, or None, in the order of their arrival.
    arrived: dict[str, int | None] = field(default_factory=dict)
    is_finished: bool = False  # nobody needs to come any more

    @staticmethod
    def of(document: dict[str, Any]) -> Roster:
        return Roster(**document)

    def write(self, document: dict[str, Any]) -> None:
        document.update(asdict(self))

    @property
    def awaited(self) -> list[str]:
        """Who must arrive or go before the next proposal."""
        return [name for name in self.expected if name not in self.arrived]

    @property
    def present(self) -> list[str]:
        """All that are not known to be gone."""
        return [*self.expected, *(name for name in self.arrived if name not in self.expected)]

    def arrive(self, name: str, rank: int | None) -> None:
        self.arrived.setdefault(name, rank)

    def remove(self, names: Collection[str]) -> None:
        """Takes out who is gone."""
        self.expected = [name for name in self.expected if name not in names]
        self.arrived = {name: rank for name, rank in self.arrived.items() if name not in names}

    def finish(self) -> None:
        self.is_finished = True

    def can_propose(self, min_members: int) -> bool:
        return not self.awaited and len(self.arrived) >= max(min_members, 1)

    def propose(self, uuid: str) -> None:
        """Proposes a generation of all that have arrived: those that ask for a rank, in the order
        of these numbers, members of the last proposal in theirs, and newcomers as they arrived."""
        askers: dict[int, list[str]] = {}
        others: list[str] = []
        for name in self.present:
            rank = self.arrived[name]
            if rank is None:
                others.append(name)
            else:
                askers.setdefault(rank, []).append(name)
        self.clashes = [(rank, names) for rank, names in sorted(askers.items()) if len(names) > 1]
        self.members = [name for _, names in sorted(askers.items()) for name in names] + others
        self.number += 1
        self.uuid = uuid
        self.expected = list(self.members)
        self.arrived = {}
