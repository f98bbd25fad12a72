"""Claims of processes that may start again, without processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch.distributed as dist

import rota
from rota.rendezvous.claims import Claim, Claims

pytestmark = pytest.mark.same_in_every_build


@dataclass(frozen=True)
class Wish(Claim):
    what = "rota.Wish"


def lives(_: Wish) -> bool:
    return True


def test_error_of_an_earlier_attempt_is_none_of_the_next() -> None:
    store = dist.HashStore()
    claims = [Claims(store, Wish) for _ in range(3)]
    failed = claims[0].take(claims[0].failure(Wish(0, 3), ValueError("odd")))
    own = claims[1].take(Wish(1, 3))
    with pytest.raises(rota.TransportError) as told:
        claims[1].raise_error(own, failed, lives)
    assert str(told.value) == f"rota.Wish: {failed.who} failed: odd"
    passed_on = claims[1].take(claims[1].failure(Wish(1, 3), told.value))

    retried = claims[0].take(Wish(0, 3))
    assert retried.attempt == 2
    claims[0].raise_error(retried, passed_on, lives)
    again = claims[1].take(Wish(1, 3))
    claims[1].raise_error(again, failed, lives)
    # It comes late, and joins the others' second attempt.
    late = claims[2].take(Wish(2, 3))
    assert [claim.attempt for claim in (again, late)] == [2, 2]

    failed = claims[2].take(claims[2].failure(Wish(2, 3), rota.Mismatch("uneven")))
    with pytest.raises(rota.Mismatch, match=r"rank 2/3 .* failed: uneven"):
        claims[0].raise_error(retried, failed, lives)
    claims[0].raise_error(retried, failed, lambda _: False)  # left by a process that has ended


def test_who_has_not_seen_the_same_claims_is_named() -> None:
    store = dist.HashStore()
    own, other = Claims(store, Wish), Claims(store, Wish)
    other.take(Wish(1, 3))
    claim = own.take(Wish(0, 3))
    with pytest.raises(rota.Timeout) as late:
        own.agree(claim, 0.0, lambda *_: None, "come", "not started again")
    missing = f"1 (pid {claim.pid}, not started again), 2; every rank must come: is it alive?"
    assert str(late.value) == f"rota.Wish: {claim.who} waited in vain for rank {missing}"
