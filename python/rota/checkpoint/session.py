"""How the ranks of a Checkpoint agree, over a torch Store and without a process group.

A session begins when all ranks have seen the same claims (rota.rendezvous.claims) and each has
counted itself in session/TOKEN/begun. Then they take joint steps (rota.rendezvous.joint), whose
keys stay until the next step or session has begun, so that a rank that is ahead takes nothing away
from those that still wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from rota.checkpoint.contents import WHAT
from rota.checkpoint.version import Identity
from rota.errors import Mismatch, PeerFailed, RotaError, Timeout
from rota.rendezvous.claims import Claim, Claims
from rota.rendezvous.joint import JointSteps
from rota.rendezvous.polling import LAST_POLL_S

T = TypeVar("T")


@dataclass(frozen=True)
class RankClaim(Claim):
    """What a rank says at the start of a session."""

    call: str  # the method that begins it
    held: dict[int, list[Identity]]  # whole versions that it can read, by the rank whose they are

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


class Session(JointSteps):
    """What the ranks have agreed on; each takes part until one of them fails.

    Its number is greater than that of every version that a rank can read; its token is of it alone.
    `left` returns ranks of this host that have ended.
    """

    _last_pause_s = LAST_POLL_S
    _tells_of_waits = False  # this rank has done its part, and may be the late one

    def __init__(
        self,
        store: dist.Store,
        own: RankClaim,
        claims: Sequence[RankClaim],
        left: Callable[[], list[int]],
    ) -> None:
        self.token = session_token(claims)
        own_store = _store_of(store, self.token)
        super().__init__(own_store, own.rank, own.world_size, timedelta.max, WHAT)
        self._present = Claims(store, RankClaim)
        self._own = own
        self._left = left
        self.claims = claims
        self.number = 1 + max((identity.session for identity in self.identities()), default=0)

    def identities(self) -> set[Identity]:
        return {
            identity
            for claim in self.claims
            for identities in claim.held.values()
            for identity in identities
        }

    def whole(self, identity: Identity, *, in_place: bool = False) -> bool:
        """Whether the state of every rank can be read somewhere; in_place: by the rank itself."""
        owners = {
            owner
            for claim in self.claims
            for owner, identities in claim.held.items()
            if identity in identities and not (in_place and owner != claim.rank)
        }
        return owners >= set(range(identity.world_size))

    def run(self, part: Callable[[], T], deadline: float, step: int = -1) -> T:
        """Runs this rank's part, and blocks until all ranks have run theirs; returns its result.

        `step` is what it saves. Raises rota.PeerFailed also where a rank has begun another session.
        """
        result: list[T] = []

        def run() -> int:
            result.append(part())
            return step

        steps = self.step(run, deadline)
        if self.rank == 0 and self.num_steps > 1:  # all have left it
            self.store.delete_key(f"step/{self.num_steps - 2}")
        for claim, other in zip(self.claims, steps, strict=True):
            if other != step:
                raise Mismatch(
                    f"{WHAT}.save: {self._own.who} has saved step {step}, {claim.who} step "
                    f"{other}; both are dropped: all ranks must save the same steps"
                )
        return result[0]

    def _ends_of(self, ranks: Sequence[int]) -> dict[int, str]:
        left, claims = self._left(), self._present.all(self.world_size)
        ends = {}
        for rank in ranks:
            claim = self.claims[rank]
            if rank in left and claim.host == self._own.host:
                end = "has ended or closed"
            elif claims[rank] != claim:
                end = "has begun anew, or another process has its rank"
            else:
                continue
            ends[rank] = f"{claim.who} {end}; when all ranks are back, load()"
        return ends

    def _prefix(self) -> str:
        return WHAT

    def _name_of(self, rank: int) -> str:
        return self.claims[rank].who

    def _late(self, missing: Sequence[int]) -> str:
        who = ", ".join(self.claims[rank].who for rank in missing)
        return (
            f"{WHAT}: {self._own.who} waited in vain for {who} to finish its save() or load(); is "
            f"it alive?"
        )

    def _wait_for_all(self, deadline: float) -> list[Any]:
        with _naming_the_store():
            return super()._wait_for_all(deadline)


class Sessions(Claims[RankClaim]):
    """The keys of one name in the user's store."""

    def __init__(
        self, store: dist.Store, name: str, why_ended: Callable[[int], str] | None = None
    ) -> None:
        super().__init__(dist.PrefixStore(f"rota/checkpoint/{name}", store), RankClaim, why_ended)
        self._last: Session | None = None

    def begin(self, own: RankClaim, deadline: float, left: Callable[[], list[int]]) -> Session:
        """Blocks until all ranks have seen the same claims."""
        token = ""  # of what this rank has seen all agree on last

        def have_begun(claims: Sequence[RankClaim] = ()) -> bool:
            """Whether all have seen that all agree. One that starts again prevents that."""
            nonlocal token
            if claims and token != session_token(claims):
                token = session_token(claims)
                _store_of(self.store, token).add("begun", 1)
            return token != "" and _store_of(self.store, token).add("begun", 0) == own.world_size

        def check(
            claims: Sequence[RankClaim | None], met: Sequence[RankClaim], alike: Sequence[RankClaim]
        ) -> None:
            for claim in claims:
                if claim and claim.rank == own.rank and claim.token != own.token:
                    raise Mismatch(
                        f"{own.what}: there are two processes of rank {own.rank}: pid {own.pid} on "
                        f"host {own.host}, and pid {claim.pid} on host {claim.host}; give each a "
                        f"rank of its own"
                    )
            for claim, what in itertools.product(alike, ("world_size", "call")):
                if getattr(claim, what) != getattr(own, what):
                    raise Mismatch(
                        f"{WHAT}: ranks disagree: {own.who} has {what} {getattr(own, what)!r}, "
                        f"{claim.who} has {getattr(claim, what)!r}"
                    )
            ended = left()
            for claim in met:
                has_ended = claim.rank in ended and claim.host == own.host
                # What has begun may go on and end.
                if has_ended and not have_begun():
                    raise PeerFailed(
                        f"{own.what}: {claim.who} has ended; when all ranks are back, load()"
                    )

        own = self.take(own)
        try:
            claims = self.agree(own, deadline, check, "call it", "from an earlier call", have_begun)
        except (PeerFailed, Timeout, KeyboardInterrupt) as error:
            self.take(replace(own, token=uuid4().hex, error=str(error) or "interrupted"))
            raise
        self._last, last = Session(self.store, own, claims, left), self._last
        if last is not None and own.rank == 0:  # all have left it
            for key in ("begun", f"step/{last.num_steps - 1}"):
                last.store.delete_key(key)
        return self._last

    def read_all(self, keys: list[str]) -> list[str | None]:
        with _naming_the_store():
            return super().read_all(keys)


@contextlib.contextmanager
def _naming_the_store() -> Iterator[None]:
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RotaError(
            f"{WHAT}: the store is lost ({error}); it must outlive all ranks: let a process serve "
            f"it that is none of them"
        ) from error


def _store_of(store: dist.Store, token: str) -> dist.Store:
    return dist.PrefixStore(f"session/{token}", store)


def session_token(claims: Sequence[RankClaim]) -> str:
    return hashlib.sha256(" ".join(claim.token for claim in claims).encode()).hexdigest()[:16]


def token_of(store: dist.Store) -> str:
    """Random; the same for all who use this store, whatever its prefix, and for nobody else."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.compare_set("rota/checkpoint/meeting", "", uuid4().hex).decode())
