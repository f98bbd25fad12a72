"""Members that were told different things: the same error on all, and another attempt succeeds."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import rota
from elastic_workers import store_of
from ranks import Rank, Ranks, check_error, error_of, kill_self, on_ranks, run_ranks
from rota.elastic import Handle, Membership
from rota.elastic.roster import Roster
from rota.rendezvous.documents import Documents

pytestmark = pytest.mark.same_in_every_build


# ---- the roster


def test_roster_takes_ranks_that_are_asked_for_then_survivors_then_newcomers() -> None:
    roster = Roster()
    for name, rank in (("a", 7), ("b", None), ("c", 0)):
        roster.arrive(name, rank)
    roster.propose("1")
    assert (roster.number, roster.members) == (1, ["c", "a", "b"]) and not roster.clashes
    for name, rank in (("d", 7), ("c", 0), ("a", 7)):
        roster.arrive(name, rank)
    assert roster.awaited == ["b"] and not roster.can_propose(1)
    roster.remove(["b"])
    assert roster.members == ["c", "a", "b"]  # of the proposal, whoever is gone
    assert roster.can_propose(3) and not roster.can_propose(4) and not Roster().can_propose(1)
    document: dict[str, Any] = {}
    roster.write(document)
    assert Roster.of(json.loads(json.dumps(document))) == roster
    roster.propose("2")
    assert roster.clashes == [(7, ["a", "d"])] and roster.arrived == {}


def count(rank: Rank, port: int) -> None:
    documents = Documents(store_of(port))
    for _ in range(200):
        documents.change("sum", lambda document: document.update(n=document.get("n", 0) + 1))


def test_documents_lose_no_change(port: int) -> None:
    run_ranks(3, count, port)
    assert Documents(store_of(port)).read("sum") == {"n": 600}


# ---- members of next()


def ask_for_ranks(rank: Rank, port: int, asked: list[int | None]) -> Any:
    membership = Membership(store_of(port), rank=asked[rank.rank])
    try:
        generation = membership.next(min_members=len(asked))
        generation.communicator.barrier()
        return generation.rank
    except ValueError as error:
        membership._rank = None
        # The same processes can come again.
        assert membership.next(min_members=len(asked)).world_size == len(asked)
        return str(error)


def test_ranks_that_are_asked_for(port: int) -> None:
    assert run_ranks(3, ask_for_ranks, port, [None, 5, 2]) == [2, 1, 0]


def test_rank_asked_for_twice_is_an_error_on_every_member(store: dist.TCPStore) -> None:
    with Ranks(3, ask_for_ranks, store.port, [1, 0, 1]) as ranks:
        texts = ranks.results()
        pids = [ranks.pid(process) for process in (0, 2)]
    for text in texts:
        assert "rank 1 is asked for by" in text
        assert all(f"pid {pid} " in text for pid in pids)


def test_arguments_are_checked() -> None:
    store = dist.HashStore()
    for rank in (-1, "0"):
        with pytest.raises(ValueError, match="rank"):
            Membership(store, rank=rank)
    with pytest.raises(ValueError, match="min_members"):
        Membership(store).next(min_members=0)


@on_ranks(2)
def test_default_group_of_the_user_is_refused(rank: Rank, port: int) -> None:
    rank.init()
    check_error(error_of(Membership(store_of(port)).next), "RotaError", "destroy_process_group")


def time_out(rank: Rank, port: int) -> tuple[str, str] | None:
    membership = Membership(store_of(port), timeout=timedelta(seconds=2))
    generation = membership.next(min_members=2)
    rank.tell(generation.rank)
    if generation.rank == 1:
        rank.hear()
        return None
    return error_of(membership.next)


def test_living_member_that_does_not_come_is_named(store: dist.TCPStore) -> None:
    with Ranks(2, time_out, store.port) as ranks:
        at_rank = {ranks.hear(process): process for process in range(2)}
        error, text = ranks.hear_result(at_rank[0])
        pid = ranks.pid(at_rank[1])
        assert error == "Timeout" and f"pid {pid} " in text and "is it alive?" in text
        assert f"pid {pid} " in ranks.stderr(at_rank[0])
        ranks.tell(at_rank[1])
        ranks.results()


@on_ranks(2)
def test_groups_that_cannot_connect_are_an_error_on_every_member(rank: Rank, port: int) -> None:
    options = rota.BackendOptions(slot_bytes=4096 * (rank.rank + 1))
    membership = Membership(store_of(port), pg_options=options)
    error = error_of(membership.next, min_members=2)
    membership._pg_options = None
    (error, text), world_size = error, membership.next(min_members=2).world_size
    assert error == "TransportError", text
    assert "slots of" in text and "failed" in text
    assert world_size == 2


# ---- reconfigure()


def exchange(rank: Rank, store: dist.Store, membership: Membership) -> list[str]:
    """The handles of all processes."""
    store.set(f"handle/{rank.rank}", membership.handle)
    return [store.get(f"handle/{other}").decode() for other in range(rank.world_size)]


@on_ranks(3)
def test_reconfigure_takes_the_callers_members_and_order(rank: Rank, port: int) -> None:
    store = store_of(port)
    membership = Membership(store)
    handles = exchange(rank, store, membership)
    seen = []
    for i, order in enumerate(([0, 1, 2], [2, 0], [1, 2, 0])):
        if rank.rank in order:
            generation = membership.reconfigure(f"step {i}", [handles[place] for place in order])
            assert generation.handles[generation.rank] == membership.handle
            generation.communicator.barrier()
            seen.append((generation.rank, generation.world_size))
        rank.say(f"done {i}") if rank.rank in order else rank.await_word(f"done {i}")
    expected = {0: [(0, 3), (1, 2), (2, 3)], 1: [(1, 3), (0, 3)], 2: [(2, 3), (0, 2), (1, 3)]}
    assert seen == expected[rank.rank]


@on_ranks(3, timeout_s=180)
def test_bad_reconfigure_is_the_same_error_on_every_member(rank: Rank, port: int) -> None:
    store = store_of(port)
    membership = Membership(store)
    handles = exchange(rank, store, membership)
    a, b, c = handles
    pids = [f"pid {Handle.parse(handle).pid} " for handle in handles]
    p0, p1, p2 = (f"{pid}.*" for pid in pids)
    of_another_job = json.dumps(json.loads(a) | {"job": "another"})
    everyone = range(3)
    # Who names which members, and the error of all.
    cases = [
        ([2], [b, a, c], "Mismatch", f"{p2} says that the members are .{p1}, {p0}, {p2}"),
        ([2], [b, c], "Mismatch", f"{p2} says that the members are .{p1}, {p2}"),
        (everyone, [a, b, b, c], "ValueError", "the same process has ranks 1 and 2"),
        (
            [1],
            [of_another_job, b, c],
            "ValueError",
            f"{p1} but rank 0, {p0}, is of another job, an",
        ),
        ([1], ["nonsense", b, c], "ValueError", f"{p1}'nonsense' is no handle"),
        ([1], [a, c], "ValueError", f"{p1} but it is not among the members"),
    ]
    for number, (odd, members, kind, pattern) in enumerate(cases):
        own = members if rank.rank in odd else handles
        error, text = error_of(membership.reconfigure, f"bad {number}", own)
        assert error == kind and re.search(pattern, text), (pattern, error, text)
        assert all(pid in text for pid in pids), text
        membership.reconfigure(f"good {number}", handles).communicator.barrier()
    error = error_of(membership.reconfigure, "good 0", handles)
    check_error(error, "ValueError", "generation good 0", "was used before")


@on_ranks(3, killed=[1])
def test_reconfigure_with_a_member_that_dies_raises_on_the_others(rank: Rank, port: int) -> None:
    store = store_of(port)
    membership = Membership(store)
    handles = exchange(rank, store, membership)
    if rank.rank == 1:
        rank.await_word("0 agrees")
        rank.await_word("2 agrees")
        kill_self()
    rank.say(f"{rank.rank} agrees")
    error = error_of(membership.reconfigure, "first", handles)
    check_error(error, "PeerFailed", f"rank 1, pid {Handle.parse(handles[1]).pid} ")
    assert membership.reconfigure("second", [handles[0], handles[2]]).world_size == 2
