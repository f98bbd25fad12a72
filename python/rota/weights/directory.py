"""How publishers and readers of a WeightStore find each other: keys in a torch Store.

| key | writer | value |
|---|---|---|
| claim/RANK | the newest publisher of the rank, if the one before has ended | its Claim |
| layout/TOKEN | the publisher with this token | its Layout |
| seen/RANK | the publisher | the tokens of all claims that it has seen last |
| current | rank 0, once it has published a version | the claims of all publishers |

Publishers that start together have all seen the same claims. When they start again, their claims
are others, so what is left of the last start cannot be mistaken for theirs.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from rota import _C
from rota.errors import Mismatch, Timeout, TransportError
from rota.rendezvous.polling import poll
from rota.weights.layout import Layout
from rota.weights.memory import OpenedPublisher


@dataclass(frozen=True)
class Claim:
    """One publisher: a process that wants to publish, or does.

    Attributes:
        address: of its memory.
        error: why it cannot publish, or "".
        is_mismatch: whether that is because publishers disagree.
    """

    token: str
    name: str
    rank: int
    num_publishers: int
    pid: int
    host: str
    address: str
    error: str
    is_mismatch: bool

    @classmethod
    def make(
        cls, name: str, rank: int, num_publishers: int, address: str, error: Exception | None
    ) -> Claim:
        """The claim of this process."""
        return cls(
            uuid4().hex,
            name,
            rank,
            num_publishers,
            os.getpid(),
            _C.host_id(),
            address,
            "" if error is None else str(error),
            isinstance(error, Mismatch),
        )

    @property
    def title(self) -> str:
        """For texts in which the extension adds the pid."""
        return f"publisher {self.rank}/{self.num_publishers} of {self.name!r}"

    @property
    def who(self) -> str:
        return f"{self.title} (pid {self.pid})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Claim:
        return cls(**json.loads(text))


# The claims with errors that this process has raised.
_told: set[str] = set()


class Directory:
    """The keys of one name.

    Args:
        store: the user's.
        name: of the weights.

    Attributes:
        was_told: whether the last error of meet() was another publisher's, which told all.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store = dist.PrefixStore(f"rota/weights/{name}", store)
        self.was_told = False

    def claim(self, claim: Claim, layout: Layout | None, last: Claim | None) -> None:
        """Makes this process the publisher of its rank.

        Args:
            layout: None in a claim with an error.
            last: an earlier claim of this publisher, if any, which this one replaces.

        Raises:
            rota.Mismatch: another publisher of the rank is open; names both.
        """
        if layout is not None:
            self._store.set(f"layout/{claim.token}", layout.to_json())
        key = f"claim/{claim.rank}"
        while True:
            text = self._get(key) or ""
            if text:
                other = Claim.from_json(text)
                if (last is None or other.token != last.token) and self._is_open(other):
                    raise Mismatch(
                        f"rota.WeightStore.publish: there are two publishers of rank {claim.rank}: "
                        f"{other.who} on host {other.host}, and this one (pid {claim.pid}) on host "
                        f"{claim.host}; nothing was published; give each another rank, or close "
                        f"the first"
                    )
            if self._store.compare_set(key, text, claim.to_json()).decode() == claim.to_json():
                return

    def meet(self, own: Claim, deadline: float) -> list[Claim]:
        """Blocks until all publishers have seen the same claims; returns these, by rank.

        Raises:
            rota.TransportError: one has failed, or is on another host.
            rota.Mismatch: another number of publishers, or one has found a mismatch.
            rota.Timeout: one did not publish in time; names it.
        """
        claims: list[Claim | None] = []
        self.was_told = False

        def have_agreed() -> bool:
            nonlocal claims
            texts = [self._get(f"claim/{rank}") for rank in range(own.num_publishers)]
            claims = [None if text is None else Claim.from_json(text) for text in texts]
            for claim in claims:
                if claim is not None:
                    self._check_fits(own, claim)
            tokens = " ".join("" if claim is None else claim.token for claim in claims)
            self._store.set(f"seen/{own.rank}", tokens)
            if any(claim is None or claim.error for claim in claims):
                return False
            return all(self._get(f"seen/{rank}") == tokens for rank in range(own.num_publishers))

        if not poll(have_agreed, deadline):
            own_seen = self._get(f"seen/{own.rank}")
            missing = [
                f"{rank}" if claim is None else f"{rank} (pid {claim.pid}, not started again)"
                for rank, claim in enumerate(claims)
                if claim is None or claim.error or self._get(f"seen/{rank}") != own_seen
            ]
            raise Timeout(
                f"rota.WeightStore.publish: {own.who} waited in vain for publisher "
                f"{', '.join(missing)}; every publisher must publish: is it alive?"
            )
        return [claim for claim in claims if claim is not None]

    def announce(self, claims: list[Claim]) -> None:
        """Shows readers the publishers."""
        self._store.set("current", json.dumps([asdict(claim) for claim in claims]))

    def current(self) -> list[Claim] | None:
        """The publishers that have been announced last."""
        text = self._get("current")
        return None if text is None else [Claim(**fields) for fields in json.loads(text)]

    def layout(self, claim: Claim) -> Layout:
        """The layout of a publisher without an error."""
        return Layout.from_json(self._store.get(f"layout/{claim.token}").decode())

    @classmethod
    def open(cls, claim: Claim, layout: Layout, timeout: timedelta) -> OpenedPublisher:
        """Maps a publisher's memory.

        Raises:
            rota.TransportError: it has ended, or is on another host.
            rota.Timeout: its process does not answer.
        """
        cls._check_host(_C.host_id(), "this process", claim)
        return OpenedPublisher(claim.title, claim.address, layout, timeout)

    @staticmethod
    def _check_host(host: str, who: str, claim: Claim) -> None:
        if claim.host != host:
            raise TransportError(
                f"rota.WeightStore: {claim.who} is on host {claim.host}, {who} on host {host}; "
                f"publishers and readers must share one host"
            )

    def _check_fits(self, own: Claim, other: Claim) -> None:
        if other.error:
            # Before it starts again. This process may have been told already, and have begun anew.
            if other.token in _told or not self._is_open(other):
                return
            _told.add(other.token)
            kind = Mismatch if other.is_mismatch else TransportError
            self.was_told = True
            raise kind(f"rota.WeightStore.publish: {other.who} failed: {other.error}")
        if other.num_publishers != own.num_publishers and self._is_open(other):
            raise Mismatch(
                f"rota.WeightStore.publish: {own.who} and {other.who} differ in the number of "
                f"publishers; nothing was published"
            )
        if other.num_publishers == own.num_publishers:
            self._check_host(own.host, own.who, other)

    @staticmethod
    def _is_open(claim: Claim) -> bool:
        if claim.host != _C.host_id():
            return True  # nobody can know here
        try:
            return _C.OpenedTensor(claim.address, claim.title, timedelta(seconds=1)).is_open
        except Timeout:
            return True  # stopped
        except TransportError:
            return False

    # Never waits in the Store, where Ctrl-C could not interrupt it.
    def _get(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()
