"""How the ranks of a Checkpoint agree, over a torch Store and without a process group.

A session begins when all ranks have seen the same claims (rota.rendezvous.claims) and each has
written its first report, to done/SESSION/RANK. Reports of a session stay until the next one has
begun, so that a rank that is ahead takes nothing away from those that still wait for it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from rota import errors
from rota.checkpoint.contents import WHAT
from rota.checkpoint.version import Identity
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError
from rota.rendezvous.claims import Claim, Claims, has_seen
from rota.rendezvous.polling import poll


@dataclass(frozen=True)
class RankClaim(Claim):
    """What a rank says at the start of a session.

    Attributes:
        call: the method that begins it.
        held: the whole versions that this rank can read, by the rank whose state they are.
    """

    call: str
    held: dict[int, list[Identity]]

    @property
    def what(self) -> str:
        return f"{WHAT}.{self.call}"

    @classmethod
    def of(cls, fields: dict[str, Any]) -> RankClaim:
        held = {
            int(owner): [Identity(*identity) for identity in identities]
            for owner, identities in fields.pop("held").items()
        }
        return cls(held=held, **fields)


@dataclass(frozen=True)
class Report:
    """How far a rank is in its session; `error` ends the session for all.

    Attributes:
        step: that it has saved last; -1 if none.
    """

    number: int
    step: int = -1
    error: str = ""
    kind: str = ""


BEGUN = Report(0)


class Session:
    """What the ranks have agreed on; each takes part until one of them fails.

    Attributes:
        number: greater than that of every version that a rank can read.
        token: of this session alone.
    """

    def __init__(self, sessions: Sessions, own: RankClaim, claims: Sequence[RankClaim]) -> None:
        self._sessions = sessions
        self._own = own
        self.claims = claims
        self.number = 1 + max((identity.session for identity in self.identities()), default=0)
        self.token = session_token(claims)
        self._last = BEGUN

    def identities(self) -> set[Identity]:
        return {
            identity
            for claim in self.claims
            for identities in claim.held.values()
            for identity in identities
        }

    def whole(self, identity: Identity) -> bool:
        """Whether the state of every rank can be read somewhere."""
        owners = {
            owner
            for claim in self.claims
            for owner, identities in claim.held.items()
            if identity in identities
        }
        return owners >= set(range(identity.world_size))

    def whole_in_place(self, identity: Identity) -> bool:
        """Whether every rank can read its own."""
        owners = {claim.rank for claim in self.claims if identity in claim.held.get(claim.rank, ())}
        return owners >= set(range(identity.world_size))

    def report(self, step: int = -1, error: BaseException | None = None) -> None:
        """Tells the others that the next thing is done, or why it failed here."""
        number = self._last.number + 1
        self._last = Report(number, step)
        if error is not None:
            kind = type(error).__name__
            self._last = Report(number, error=str(error) or kind, kind=kind)
        self._sessions.report(self._own.rank, self.token, self._last)

    def wait(self, deadline: float, left: Callable[[], list[int]]) -> None:
        """Blocks until all ranks have done what this one has.

        Args:
            left: returns ranks of this host that have ended.

        Raises:
            rota.RotaError: a rank has failed; of the kind of its error.
            rota.Mismatch: a rank has saved another step.
            rota.PeerFailed: a rank of this host has ended, or any has begun another session.
            rota.Timeout: a rank did not report in time; names it.
        """
        missing: list[RankClaim] = []

        def missing_now() -> list[RankClaim]:
            reports = self._sessions.reports(self.token, len(self.claims))
            pairs = list(zip(self.claims, reports, strict=True))
            for claim, report in pairs:
                if report is not None:
                    self._check(claim, report)
            return [
                claim for claim, report in pairs if (report or BEGUN).number < self._last.number
            ]

        def all_have_reported() -> bool:
            nonlocal missing
            missing = missing_now()
            problems = self._problems_of(missing, left)
            # Whoever reports may go on and end at once.
            for claim in missing_now() if problems else ():
                if claim.rank in problems:
                    raise PeerFailed(
                        f"{WHAT}: {claim.who} {problems[claim.rank]}; when all ranks are back, "
                        f"load()"
                    )
            return not missing

        if not poll(all_have_reported, deadline):
            raise Timeout(
                f"{WHAT}: {self._own.who} waited in vain for "
                f"{', '.join(claim.who for claim in missing)} to finish its save() or load(); "
                f"is it alive?"
            )

    def _check(self, claim: RankClaim, report: Report) -> None:
        # One that failed in what comes after this has done this.
        has_failed = report.error and report.number <= self._last.number
        if has_failed and claim.rank != self._own.rank:
            kind = getattr(errors, report.kind, TransportError)
            raise kind(f"{WHAT}: {claim.who} failed: {report.error}")
        if report.number == self._last.number and report.step != self._last.step:
            raise Mismatch(
                f"{WHAT}.save: {self._own.who} has saved step {self._last.step}, {claim.who} step "
                f"{report.step}; both are dropped: all ranks must save the same steps"
            )

    # Why ranks will not report, by rank.
    def _problems_of(
        self, missing: Sequence[RankClaim], left: Callable[[], list[int]]
    ) -> dict[int, str]:
        if not missing:
            return {}
        ended = left()
        claims = self._sessions.all(len(self.claims))
        problems = {}
        for claim in missing:
            if claim.rank in ended and claim.host == self._own.host:
                problems[claim.rank] = "has ended or closed"
            elif claims[claim.rank] != claim:
                problems[claim.rank] = "has begun anew, or another process has its rank"
        return problems


class Sessions(Claims[RankClaim]):
    """The keys of one name.

    Args:
        store: the user's.
        name: of the checkpoint.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        super().__init__(dist.PrefixStore(f"rota/checkpoint/{name}", store), RankClaim)
        self._last_token = ""

    def begin(self, own: RankClaim, deadline: float, left: Callable[[], list[int]]) -> Session:
        """Blocks until all ranks have seen the same claims.

        Args:
            left: returns ranks of this host that have ended.

        Raises:
            rota.PeerFailed: a rank of this host has ended after it came.
            rota.Mismatch: another process has taken this rank, or ranks differ in world_size or
                in what they call.
            rota.Timeout: a rank did not come in time; names it.
        """
        # What this rank has seen all agree on last: another for each rank that starts again
        # meanwhile.
        token = ""

        def have_begun(claims: Sequence[RankClaim]) -> bool:
            nonlocal token
            if token != session_token(claims):
                token = session_token(claims)
                self.report(own.rank, token, BEGUN)
            return self._has_begun(token, own.world_size)

        def check(claims: Sequence[RankClaim | None], seen: Sequence[str | None]) -> None:
            there = [(claim, text) for claim, text in zip(claims, seen, strict=True) if claim]
            for claim, _ in there:
                if claim.rank == own.rank and claim.token != own.token:
                    raise Mismatch(
                        f"{own.what}: there are two processes of rank {own.rank}: pid {own.pid} on "
                        f"host {own.host}, and pid {claim.pid} on host {claim.host}; give each a "
                        f"rank of its own"
                    )
            # What has not seen this rank's claim may be left from an earlier start, or start again.
            met = [claim for claim, text in there if has_seen(claim, own, text)]
            for claim, what in itertools.product(met, ("world_size", "call")):
                if getattr(claim, what) != getattr(own, what):
                    raise Mismatch(
                        f"{WHAT}: ranks disagree: {own.who} has {what} {getattr(own, what)!r}, "
                        f"{claim.who} has {getattr(claim, what)!r}"
                    )
            ended = left()
            for claim in met:
                has_ended = claim.rank in ended and claim.host == own.host
                # What has begun may go on and end.
                if has_ended and not (token and self._has_begun(token, own.world_size)):
                    raise PeerFailed(
                        f"{own.what}: {claim.who} has ended; when all ranks are back, load()"
                    )

        own = self.take(own)
        claims = self.agree(own, deadline, check, "call it", "from an earlier call", have_begun)
        session = Session(self, own, claims)
        if self._last_token:  # all have left it
            self.store.delete_key(f"done/{self._last_token}/{own.rank}")
        self._last_token = session.token
        return session

    def report(self, rank: int, token: str, report: Report) -> None:
        self.store.set(f"done/{token}/{rank}", json.dumps(asdict(report)))

    def reports(self, token: str, world_size: int) -> list[Report | None]:
        """What each rank has reported last in a session."""
        texts = self.read_all([f"done/{token}/{rank}" for rank in range(world_size)])
        return [None if text is None else Report(**json.loads(text)) for text in texts]

    def _has_begun(self, token: str, world_size: int) -> bool:
        return None not in self.reports(token, world_size)

    def read_all(self, keys: list[str]) -> list[str | None]:
        try:
            return super().read_all(keys)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RotaError(
                f"{WHAT}: the store is lost ({error}); it must outlive all ranks: let a process "
                f"serve it that is none of them"
            ) from error


def session_token(claims: Sequence[RankClaim]) -> str:
    return hashlib.sha256(" ".join(claim.token for claim in claims).encode()).hexdigest()[:16]


def token_of(store: dist.Store) -> str:
    """Random; the same for all who use this store, whatever its prefix, and for nobody else."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.compare_set("rota/checkpoint/meeting", "", uuid4().hex).decode())
