"""How publishers and readers of a WeightStore find each other: keys in a torch Store.

| key | writer | value |
|---|---|---|
| claim/RANK, seen/RANK | the publishers, to meet each other | as in rota.rendezvous.claims |
| layout/TOKEN | the publisher with this token | its Layout |
| current | rank 0, once it has published a version | the claims of all publishers |
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from rota import _C
from rota.errors import Mismatch, TransportError
from rota.rendezvous.claims import Claim, Claims
from rota.shared.double_buffer import FIRST_FREE_WORD
from rota.shared.liveness import LocalWatch
from rota.shared.memory import empty
from rota.weights.layout import Layout
from rota.weights.memory import OpenedPublisher

_PUBLISH = "rota.WeightStore.publish"
_WATCH_TIMEOUT = timedelta(seconds=1)


@dataclass(frozen=True)
class PublisherClaim(Claim):
    """One publisher: a process that wants to publish, or does."""

    NOUN = "publisher"

    name: str  # of the weights
    address: str  # of its memory

    @property
    def what(self) -> str:
        return _PUBLISH

    @property
    def title(self) -> str:
        return f"{super().title} of {self.name!r}"


class Directory:
    """The keys of one name of weights in the user's store."""

    def __init__(
        self, store: dist.Store, name: str, why_ended: Callable[[int], str] | None
    ) -> None:
        self._name = name
        self._store = dist.PrefixStore(f"rota/weights/{name}", store)
        self._claims = Claims(self._store, PublisherClaim, why_ended)

    def claim(
        self, rank: int, num_publishers: int, memory: _C.ExposedTensor, layout: Layout
    ) -> PublisherClaim:
        """Makes this process the publisher of its rank; Mismatch if another one of it is open."""
        claim = PublisherClaim(rank, num_publishers, self._name, memory.address)
        self._store.set(f"layout/{claim.token}", layout.to_json())
        return self._take(claim)

    def tell(self, rank: int, num_publishers: int, error: Exception) -> _C.ExposedTensor:
        """Claims a rank in order to tell the other publishers, which would wait for it, why not.

        The claim counts while the returned memory exists, so that others do not mistake it for one
        from before their own start.
        """
        memory = _C.ExposedTensor(empty(1), FIRST_FREE_WORD, others_may_write=False)
        claim = PublisherClaim(rank, num_publishers, self._name, memory.address)
        with contextlib.suppress(Mismatch):  # another publisher has the rank
            self._take(self._claims.failure(claim, error))
        return memory

    def _take(self, own: PublisherClaim) -> PublisherClaim:
        def check_free(other: PublisherClaim) -> None:
            if _is_open(other):
                raise Mismatch(
                    f"{_PUBLISH}: there are two publishers of rank {own.rank}: {other.who} on host "
                    f"{other.host}, and this one (pid {own.pid}) on host {own.host}; nothing was "
                    f"published; give each another rank, or close the first"
                )

        return self._claims.take(own, check_free)

    def rendezvous(self, own: PublisherClaim, deadline: float) -> list[PublisherClaim]:
        """Blocks until all publishers have seen the same claims; returns these, by rank."""

        def check(claims: Sequence[PublisherClaim | None], *_: object) -> None:
            for other in claims:
                if other is not None:
                    self._claims.raise_error(own, other, _is_open)
                    _check_fits(own, other)

        return self._claims.agree(own, deadline, check, "publish", "not started again")

    def set_current(self, claims: list[PublisherClaim]) -> None:
        """Shows readers the publishers, of which the first version is whole."""
        self._store.set("current", json.dumps([asdict(claim) for claim in claims]))

    def current(self) -> list[PublisherClaim] | None:
        """The publishers that readers were shown last."""
        text = self._claims.read("current")
        return None if text is None else [PublisherClaim.of(fields) for fields in json.loads(text)]

    def layout(self, claim: PublisherClaim) -> Layout:
        return Layout.from_json(self._store.get(f"layout/{claim.token}").decode())

    @staticmethod
    def open(claim: PublisherClaim, layout: Layout, timeout: timedelta) -> OpenedPublisher:
        _check_host(_C.host_id(), "this process", claim)
        return OpenedPublisher(claim.title, claim.address, layout, timeout)


def _check_fits(own: PublisherClaim, other: PublisherClaim) -> None:
    if other.error:
        return
    if other.world_size == own.world_size:
        _check_host(own.host, own.who, other)
    elif _is_open(other):
        raise Mismatch(
            f"{_PUBLISH}: {own.who} and {other.who} differ in the number of publishers; nothing "
            f"was published"
        )


def _check_host(host: str, who: str, claim: PublisherClaim) -> None:
    if claim.host != host:
        raise TransportError(
            f"rota.WeightStore: {claim.who} is on host {claim.host}, {who} on host {host}; "
            f"publishers and readers must share one host"
        )


def _is_open(claim: PublisherClaim) -> bool:
    # Nobody can know here of one on another host.
    is_here = claim.host == _C.host_id()
    return not is_here or LocalWatch(claim.address, claim.title, _WATCH_TIMEOUT).is_alive()
