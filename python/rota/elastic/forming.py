"""How processes agree on one generation: all of them have it, or all have the same error.

A document in the store, of the generation's uuid, holds what each has said, who has connected, and
the outcome. The outcome is set once, by a transaction, so nobody can have another one. It is
"formed" when the last member has connected. Whoever sees a member gone, or the members disagree,
sets a failure, unless it is too late for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from rota.errors import Mismatch, PeerFailed, TransportError
from rota.rendezvous.documents import Documents
from rota.rendezvous.polling import POLL_S, NamedPauses, poll
from rota.shared.liveness import Handle, Processes

# After processes have said different things, how long the others may take to say theirs.
GRACE_S = 1.0
FORMED = "formed"
# What an outcome is raised as. ValueError: wrong arguments, which no other attempt mends.
_ERRORS: dict[str, type[Exception]] = {
    "PeerFailed": PeerFailed,
    "Mismatch": Mismatch,
    "TransportError": TransportError,
    "ValueError": ValueError,
}


class Forming:
    """One attempt to form a generation, on one of its members, under a uuid that no other has used;
    handles are by rank."""

    def __init__(
        self,
        documents: Documents,
        own: Handle,
        processes: Processes,
        uuid: str,
        handles: Sequence[Handle | str],
        timeout: timedelta,
    ) -> None:
        self._documents = documents
        self._own = own
        self._processes = processes
        self._uuid = uuid
        self.handles: list[Handle] = []
        self._unreadable = ""
        try:
            self.handles = [
                handle if isinstance(handle, Handle) else Handle.parse(handle) for handle in handles
            ]
        except ValueError as error:
            self._unreadable = str(error)
        self._timeout = timeout
        self._key = f"generation/{uuid}"

    def agree(self) -> None:
        """Blocks until all members have said the same."""
        self._say()
        pauses = NamedPauses(self._prefix(), self._timeout)
        disagreed_at: float | None = None
        while True:
            document = self._documents.read(self._key)
            self._raise_outcome(document)
            said: Said = document["said"]
            awaited = _silent(said)
            if _disagree(said):
                disagreed_at = disagreed_at or time.monotonic()
                has_all = len(said) > 1 and not awaited
                if has_all or time.monotonic() - disagreed_at > GRACE_S:
                    self._conclude(_kind_of(said), _describe(said))
                    continue
            elif not awaited:
                return
            if self._conclude_if_gone():
                continue
            pauses.sleep(awaited)

    def check(self) -> None:
        """Raises what agree() raises once this attempt has failed; for waits while connecting."""
        self._conclude_if_gone()
        self._raise_outcome(self._documents.read(self._key))

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """A context for what this member does to connect; waits for the others at its end.

        An error inside is raised by all members, as rota.PeerFailed if a member is gone.
        """
        try:
            yield
        except Exception as error:
            self._conclude_because_of(error)
            self._raise_outcome(self._documents.read(self._key), error)
            raise
        except BaseException:  # Ctrl-C
            self._conclude("PeerFailed", f"{self._own.who} was interrupted")
            raise
        document = self._count_as_connected()
        pauses = NamedPauses(self._prefix(), self._timeout)
        while document["outcome"] != [FORMED, ""]:
            self._raise_outcome(document)
            if not self._conclude_if_gone():
                pauses.sleep(
                    [handle.who for handle in self.handles if handle.name not in document["ready"]]
                )
            document = self._documents.read(self._key)

    # ---- transactions

    def _say(self) -> None:
        problem = self._problem()
        is_used = False

        def say(document: dict[str, Any]) -> None:
            nonlocal is_used
            document.setdefault("outcome", None)
            document.setdefault("ready", [])
            said = document.setdefault("said", {})
            is_used = self._own.name in said or document["outcome"] == [FORMED, ""]
            if not is_used:
                said[self._own.name] = {
                    "who": self._own.who,
                    "members": {handle.name: handle.who for handle in self.handles},
                    "ranks": [handle.name for handle in self.handles],
                    "problem": problem,
                }

        document = self._documents.change(self._key, say)
        if is_used:
            raise ValueError(
                f"{self._prefix()}: its uuid was used before, by "
                f"{', '.join(said['who'] for said in document['said'].values())}; every attempt "
                f"needs a new one"
            )

    def _count_as_connected(self) -> dict[str, Any]:
        def count(document: dict[str, Any]) -> None:
            if document["outcome"] is not None or self._own.name in document["ready"]:
                return
            document["ready"].append(self._own.name)
            if len(document["ready"]) == len(self.handles):
                document["outcome"] = [FORMED, ""]

        return self._documents.change(self._key, count)

    def _conclude(self, kind: str, text: str) -> None:
        def conclude(document: dict[str, Any]) -> None:
            if document["outcome"] is None:
                document["outcome"] = [kind, text]

        self._documents.change(self._key, conclude)

    def _conclude_because_of(self, error: Exception) -> None:
        """Sets the outcome after an error here, which another member may know the cause of."""
        if isinstance(error, (PeerFailed, TransportError)):

            def has_outcome() -> bool:
                is_gone = self._conclude_if_gone()
                return is_gone or self._documents.read(self._key)["outcome"] is not None

            if poll(has_outcome, time.monotonic() + GRACE_S, POLL_S):
                return
        name = type(error).__name__
        kind = name if name in ("Mismatch", "ValueError") else "TransportError"
        self._conclude(kind, f"{self._own.who} failed: {error}")

    def _conclude_if_gone(self) -> bool:
        who = self._processes.describe_gone(self.handles)
        if who:
            self._conclude("PeerFailed", f"{who} has died or left before all were connected")
        return bool(who)

    # ---- texts

    def _raise_outcome(self, document: dict[str, Any], cause: Exception | None = None) -> None:
        outcome = document["outcome"]
        if outcome is None or outcome[0] == FORMED:
            return
        kind, text = outcome
        raise _ERRORS[kind](f"{self._prefix()}: {text}") from cause

    def _prefix(self) -> str:
        return f"rota.elastic: generation {self._uuid}"

    def _problem(self) -> str:
        """What is wrong with this process's own arguments; empty: nothing."""
        if self._unreadable:
            return self._unreadable
        names = [handle.name for handle in self.handles]
        foreign = [handle for handle in self.handles if handle.job != self._own.job]
        if foreign:
            return (
                f"rank {self.handles.index(foreign[0])}, {foreign[0].who}, is of another job, "
                f"{foreign[0].job}; this one is {self._own.job}"
            )
        for name in names:
            if names.count(name) > 1:
                ranks = [str(rank) for rank, other in enumerate(names) if other == name]
                return f"the same process has ranks {' and '.join(ranks)}"
        if self._own.name not in names:
            return "it is not among the members that it was given"
        return ""


# What members have said: by name, "who" it is, the "ranks" it was given (names by rank), who these
# "members" are, and the "problem" with its own arguments.
Said = dict[str, dict[str, Any]]


def _disagree(said: Said) -> bool:
    lists = [of_one["ranks"] for of_one in said.values()]
    return lists.count(lists[0]) < len(lists) or _kind_of(said) == "ValueError"


def _kind_of(said: Said) -> str:
    return "ValueError" if any(of_one["problem"] for of_one in said.values()) else "Mismatch"


def _silent(said: Said) -> list[str]:
    """Who is a member for anyone, and has said nothing yet."""
    members = {name: who for of_one in said.values() for name, who in of_one["members"].items()}
    return [who for name, who in members.items() if name not in said]


def _describe(said: Said) -> str:
    texts = []
    for of_one in said.values():
        members = ", ".join(of_one["members"][name] for name in of_one["ranks"])
        problem = f", but {of_one['problem']}" if of_one["problem"] else ""
        texts.append(f"{of_one['who']} says that the members are [{members}]{problem}")
    texts += [f"{who} has said nothing yet" for who in _silent(said)]
    return f"{'; '.join(texts)}; give every member the same handles, by rank"
