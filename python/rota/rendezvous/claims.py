"""How processes meet that may start again, under a name in a Store that outlives them.

| key | writer | value |
|---|---|---|
| claim/RANK | the newest process of the rank | its Claim |
| seen/RANK | the same | the tokens of all claims that it has seen last |

Processes that meet have all seen the same claims. Each claim has a token of its own, so what an
earlier start has left in the store cannot be mistaken for this one. Attempts to meet are numbered,
by all ranks alike: an attempt that fails on one of them fails on all, and an error of an earlier
one is none of the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import torch.distributed as dist

from rota import _C, errors
from rota.errors import Mismatch, PeerFailed, Timeout, TransportError
from rota.rendezvous.polling import Ends, known_ends, poll


@dataclass(frozen=True)
class Claim:
    """What a process says when it takes a rank."""

    NOUN: ClassVar[str] = "rank"

    rank: int
    world_size: int
    _: KW_ONLY
    attempt: int = 1  # the number of the attempt that it is made in
    error: str = ""  # why this has failed, if it has: the text that all ranks raise
    kind: str = TransportError.__name__  # of the error that they raise, in rota.errors
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=_C.host_id)
    token: str = field(default_factory=lambda: uuid4().hex)

    @property
    def what(self) -> str:
        """The call that makes it, for errors."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        return f"{self.NOUN} {self.rank}/{self.world_size}"

    @property
    def who(self) -> str:
        return f"{self.title} (pid {self.pid})"

    @classmethod
    def of(cls: type[C], fields: dict[str, Any]) -> C:
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


C = TypeVar("C", bound=Claim)


class Claims(Generic[C]):
    """The claims of one name, to which the store belongs, as one process sees them; why_ended says
    how a rank has ended, if that is known."""

    def __init__(
        self, store: dist.Store, kind: type[C], why_ended: Callable[[int], str] | None = None
    ) -> None:
        self.store = store
        self._kind = kind
        self._why_ended = why_ended
        self._own_token = ""  # of the last claim
        self._attempt = 0  # that has not failed here; 0 if the next claim begins one
        self._heard = ""  # the last error of another rank that was raised here

    def take(self, own: C, check_free: Callable[[C], None] = lambda _: None) -> C:
        """Makes this process the holder of its rank; returns its claim, numbered.

        check_free raises if a claim that stands for the rank is that of a living process.
        """
        key = f"claim/{own.rank}"
        while True:
            text = self.read(key) or ""
            if text and (last := self._parse(text)).token != self._own_token:
                check_free(last)
            attempts = [
                claim.attempt + bool(claim.error and claim.rank == own.rank)
                for claim in self.all(own.world_size)
                if claim is not None
            ]
            claim = replace(own, attempt=self._attempt or max([1, *attempts]))
            new = claim.to_json()
            if self.store.compare_set(key, text, new).decode() == new:
                self._own_token, self._attempt = claim.token, 0 if claim.error else claim.attempt
                return claim

    def failure(self, own: C, error: Exception) -> C:
        """A claim that tells the others of an error, or passes on what this rank was told."""
        text = str(error)
        if text != self._heard:
            text = f"{own.what}: {own.who} failed: {error}"
        kind = type(error) if isinstance(error, Mismatch | PeerFailed) else TransportError
        return replace(own, error=text, kind=kind.__name__)

    def raise_error(self, own: C, other: C, is_held: Callable[[C], bool]) -> None:
        """Raises the error of another's claim, if it has one, is held by a living process, and is
        not of an earlier attempt."""
        if not other.error or other.attempt < own.attempt or not is_held(other):
            return
        self._attempt = other.attempt  # which thereby fails here
        self._heard = other.error
        raise getattr(errors, other.kind)(other.error)

    def agree(
        self,
        own: C,
        deadline: float,
        check: Callable[[Sequence[C | None], Sequence[C], Sequence[C]], None],
        must: str,
        stale: str,
        have_begun: Callable[[list[C]], bool] = lambda _: True,
    ) -> list[C]:
        """Blocks until all have seen the same claims, of which own is one; returns these, by rank.

        Args:
            check: raises if they will not agree. Gets the claims; those of processes that have seen
                this one's, since others may be left from an earlier start; and of these the ones
                that must be like it.
            must, stale: what every rank must do, and what is wrong with the claim of one that has
                not, for errors.
            have_begun: whether they have gone on; asked until then, and of the newest claims.
        """
        claims: list[C | None] = []
        seen: list[str | None] = []
        met: list[C] = []
        together: list[C] = []
        ends = Ends(lambda ranks: known_ends(self._why_ended, ranks, own.rank))

        def missing() -> list[int]:
            there = {claim.rank for claim in met if not claim.error}
            return [rank for rank in range(own.world_size) if rank not in there]

        def have_agreed() -> bool:
            nonlocal claims, seen, met, together
            if together and have_begun(together):
                return True
            claims = self.all(own.world_size)
            tokens = " ".join("" if claim is None else claim.token for claim in claims)
            if seen == [] or seen[own.rank] != tokens:
                self.store.set(f"seen/{own.rank}", tokens)
            seen = self.read_all([f"seen/{rank}" for rank in range(own.world_size)])
            met = [
                claim
                for claim, text in zip(claims, seen, strict=True)
                if claim is not None and has_seen(claim, own, text)
            ]
            # One of another attempt has waited in vain with this rank, which is about to find that,
            # and goes on.
            are_all = len(met) == own.world_size
            check(claims, met, [c for c in met if are_all or c.attempt == own.attempt])
            for end in ends.of(missing()):
                raise PeerFailed(f"{own.what}: {own.who}: {end}")
            if any(claim is None or claim.error for claim in claims) or {*seen} != {tokens}:
                return False
            together = [claim for claim in claims if claim is not None]
            return have_begun(together)

        if not poll(have_agreed, deadline):
            awaited = [
                f"{rank}" if claim is None else f"{rank} (pid {claim.pid}, {stale})"
                for rank, claim in ((rank, claims[rank]) for rank in missing())
            ]
            raise Timeout(
                f"{own.what}: {own.who} waited in vain for {own.NOUN} {', '.join(awaited)}; "
                f"every {own.NOUN} must {must}: is it alive?"
            )
        return together

    def all(self, world_size: int) -> list[C | None]:
        """The claims that stand, by rank."""
        texts = self.read_all([f"claim/{rank}" for rank in range(world_size)])
        return [None if text is None else self._parse(text) for text in texts]

    def _parse(self, text: str) -> C:
        return self._kind.of(json.loads(text))

    # Never waits in the Store, where Ctrl-C could not interrupt it.
    def read_all(self, keys: list[str]) -> list[str | None]:
        """Values; None for keys that nobody has set."""
        if self.store.check(keys):
            return [value.decode() for value in self.store.multi_get(keys)]
        return [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]

    def read(self, key: str) -> str | None:
        return self.read_all([key])[0]


def has_seen(claim: Claim, own: Claim, seen: str | None) -> bool:
    """Whether the process of a claim has seen this one's, by the tokens that its rank has seen,
    which are read after the claim: it may have been replaced between the two."""
    tokens = (seen or "").split(" ")
    return own.token in tokens and claim.token in tokens
