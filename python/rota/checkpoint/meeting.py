"""How the ranks of a Checkpoint agree, over a torch Store and without a process group.

| key | writer | value |
|---|---|---|
| claim/RANK | the rank, when it begins a session | its Claim |
| seen/RANK | the rank | the tokens of all claims that it has seen last |
| done/SESSION/RANK | the rank, once all have seen the same claims | its last Report |

A session begins when all ranks have written the third of them. Each claim has a token of its own,
so what an earlier start of the job has left in the store cannot be mistaken for this one. Reports
of a session stay until the next one has begun, so that a rank that is ahead takes nothing away from
those that still wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from uuid import uuid4

import torch.distributed as dist

from rota import _C, errors
from rota.checkpoint.contents import WHAT
from rota.checkpoint.version import Identity
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout, TransportError
from rota.rendezvous.polling import poll


@dataclass(frozen=True)
class Claim:
    """What a rank says at the start of a session.

    Attributes:
        call: the method that begins it.
        held: the whole versions that this rank can read, by the rank whose state they are.
    """

    rank: int
    world_size: int
    call: str
    held: dict[int, list[Identity]]
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=_C.host_id)
    token: str = field(default_factory=lambda: uuid4().hex)

    @property
    def who(self) -> str:
        return f"rank {self.rank}/{self.world_size} (pid {self.pid})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Claim:
        fields = json.loads(text)
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

    def __init__(self, directory: Directory, own: Claim, claims: Sequence[Claim]) -> None:
        self._directory = directory
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
        self._directory.report(self._own.rank, self.token, self._last)

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
        missing: list[Claim] = []

        def missing_now() -> list[Claim]:
            reports = self._directory.reports(self.token, len(self.claims))
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

    def _check(self, claim: Claim, report: Report) -> None:
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
        self, missing: Sequence[Claim], left: Callable[[], list[int]]
    ) -> dict[int, str]:
        if not missing:
            return {}
        ended = left()
        tokens = self._directory.tokens([claim.rank for claim in missing])
        problems = {}
        for claim, token in zip(missing, tokens, strict=True):
            if claim.rank in ended and claim.host == self._own.host:
                problems[claim.rank] = "has ended or closed"
            elif token != claim.token:
                problems[claim.rank] = "has begun anew, or another process has its rank"
        return problems


class Directory:
    """The keys of one name.

    Args:
        store: the user's.
        name: of the checkpoint.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self.store = dist.PrefixStore(f"rota/checkpoint/{name}", store)
        self._last_token = ""

    def meeting(self) -> str:
        """Random; the same for all who use this store, whatever its prefix, and for nobody else."""
        store = self.store.underlying_store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store.compare_set("rota/checkpoint/meeting", "", uuid4().hex).decode()

    def begin(self, own: Claim, deadline: float, left: Callable[[], list[int]]) -> Session:
        """Blocks until all ranks have seen the same claims.

        Args:
            left: returns ranks of this host that have ended.

        Raises:
            rota.PeerFailed: a rank of this host has ended after it came.
            rota.Mismatch: another process has taken this rank, or ranks differ in world_size or
                in what they call.
            rota.Timeout: a rank did not come in time; names it.
        """
        # What this rank has seen all agree on: one, and another for each rank that starts again
        # meanwhile, of which only the last can be complete.
        candidates: list[list[Claim]] = []
        keys = [f"claim/{rank}" for rank in range(own.world_size)]
        seen_keys = [f"seen/{rank}" for rank in range(own.world_size)]
        self.store.set(keys[own.rank], own.to_json())
        claims: list[Claim | None] = []
        seen: list[str | None] = []
        own_seen = ""

        def have_agreed() -> bool:
            nonlocal claims, seen, own_seen
            if candidates and self._has_begun(candidates[-1]):
                return True
            texts = self._get_all(keys)
            claims = [None if text is None else Claim.from_json(text) for text in texts]
            tokens = " ".join("" if claim is None else claim.token for claim in claims)
            if tokens != own_seen:
                own_seen = tokens
                self.store.set(seen_keys[own.rank], tokens)
            seen = self._get_all(seen_keys)
            self._check(own, claims, seen)
            self._check_alive(own, claims, seen, left(), candidates)
            together = [claim for claim in claims if claim is not None]
            if len(together) < own.world_size or any(text != tokens for text in seen):
                return False
            if not candidates or candidates[-1] != together:
                candidates.append(together)
                self.report(own.rank, session_token(together), BEGUN)
            return self._has_begun(together)

        if not poll(have_agreed, deadline):
            missing = [
                str(rank) if claim is None else f"{rank} (pid {claim.pid}, from an earlier call)"
                for rank, (claim, text) in enumerate(zip(claims, seen, strict=True))
                if claim is None or own.token not in (text or "")
            ]
            raise Timeout(
                f"{WHAT}.{own.call}: {own.who} waited in vain for rank {', '.join(missing)}; every "
                f"rank must call it: is it alive?"
            )
        session = Session(self, own, candidates[-1])
        if self._last_token:  # all have left it
            self.store.delete_key(f"done/{self._last_token}/{own.rank}")
        self._last_token = session.token
        return session

    def _has_begun(self, claims: Sequence[Claim]) -> bool:
        return None not in self.reports(session_token(claims), len(claims))

    def _check_alive(
        self,
        own: Claim,
        claims: Sequence[Claim | None],
        seen: Sequence[str | None],
        ended: Sequence[int],
        candidates: Sequence[Sequence[Claim]],
    ) -> None:
        for claim, text in zip(claims, seen, strict=True):
            if claim is None or claim.rank not in ended or claim.host != own.host:
                continue
            # What has not seen this rank's claim may start again; what has begun may go on and end.
            has_seen = _has_seen(claim, own, text)
            if has_seen and not (candidates and self._has_begun(candidates[-1])):
                raise PeerFailed(
                    f"{WHAT}.{own.call}: {claim.who} has ended; when all ranks are back, load()"
                )

    @staticmethod
    def _check(own: Claim, claims: Sequence[Claim | None], seen: Sequence[str | None]) -> None:
        for claim, text in zip(claims, seen, strict=True):
            if claim is None:
                continue
            if claim.rank == own.rank and claim.token != own.token:
                raise Mismatch(
                    f"{WHAT}.{own.call}: there are two processes of rank {own.rank}: pid "
                    f"{own.pid} on host {own.host}, and pid {claim.pid} on host {claim.host}; give "
                    f"each a rank of its own"
                )
            # What has not seen this rank's claim may be left from an earlier start.
            if not _has_seen(claim, own, text):
                continue
            for what in ("world_size", "call"):
                if getattr(claim, what) != getattr(own, what):
                    raise Mismatch(
                        f"{WHAT}: ranks disagree: {own.who} has {what} {getattr(own, what)!r}, "
                        f"{claim.who} has {getattr(claim, what)!r}"
                    )

    def report(self, rank: int, token: str, report: Report) -> None:
        self.store.set(f"done/{token}/{rank}", json.dumps(asdict(report)))

    def reports(self, token: str, world_size: int) -> list[Report | None]:
        """What each rank has reported last in a session."""
        texts = self._get_all([f"done/{token}/{rank}" for rank in range(world_size)])
        return [None if text is None else Report(**json.loads(text)) for text in texts]

    def tokens(self, ranks: Sequence[int]) -> list[str]:
        """Of the claims that ranks have made last."""
        texts = self._get_all([f"claim/{rank}" for rank in ranks])
        return ["" if text is None else Claim.from_json(text).token for text in texts]

    # Never waits in the Store, where Ctrl-C could not interrupt it.
    def _get_all(self, keys: list[str]) -> list[str | None]:
        try:
            if self.store.check(keys):
                return [value.decode() for value in self.store.multi_get(keys)]
            return [
                self.store.get(key).decode() if self.store.check([key]) else None for key in keys
            ]
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RotaError(
                f"{WHAT}: the store is lost ({error}); it must outlive all ranks: let a process "
                f"serve it that is none of them"
            ) from error


def _has_seen(claim: Claim, own: Claim, text: str | None) -> bool:
    """Whether the process of a claim has seen this rank's, by the tokens that its rank has seen.

    Those are read after the claim, which may have been replaced between the two.
    """
    tokens = (text or "").split(" ")
    return own.token in tokens and claim.token in tokens


def session_token(claims: Sequence[Claim]) -> str:
    return hashlib.sha256(" ".join(claim.token for claim in claims).encode()).hexdigest()[:16]
