"""Members join, leave and die, also while the others agree: the others go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from elastic_workers import (
    PACE_S,
    all_hear,
    change_members,
    first_generation,
    first_order,
    let_die,
    pids_of,
    serve,
    store_of,
)
from own_process import num_descriptors, num_mappings, num_threads
from ranks import Rank, Ranks, check_error, error_of, kill_self, on_ranks
from rota.elastic import Finished, Membership
from rota.elastic import membership as membership_module
from rota.elastic.forming import Forming
from rota.elastic.generation import Generation

pytestmark = pytest.mark.same_in_every_build


# ---- joining and leaving


@pytest.mark.parametrize(
    ("num_members", "changes"),
    [
        pytest.param(2, [([], 1), ([], 1)], id="join"),
        *(pytest.param(3, [([place], 0)], id=f"rank-{place}-dies") for place in range(3)),
        pytest.param(3, [([0, 1], 0)], id="two-die"),
        pytest.param(3, [([0], 1)], id="one-dies-another-joins"),
        pytest.param(2, [([0], 1), ([1], 1)] * 2, id="all-are-replaced"),
    ],
)
def test_survivors_keep_their_order_and_newcomers_are_behind_them(
    store: dist.TCPStore, num_members: int, changes: list[tuple[list[int], int]]
) -> None:
    num_keys = change_members(store, num_members, changes)
    # Nothing of earlier generations stays in the store, but for what is new since the last one.
    assert max(num_keys) <= num_keys[0] + 8


@on_ranks(3)
def test_member_leaves_in_agreement_and_comes_back_behind_the_others(rank: Rank, port: int) -> None:
    """Rank 0 leaves without an error of the others."""
    membership = Membership(store_of(port))
    generation = membership.next(min_members=3)
    history = [(generation.rank, generation.world_size)]
    leaver = generation.rank == 0
    assert generation.is_over(leave=leaver)
    if leaver:
        membership.leave()
        assert membership.generation is None
        rank.await_word()
    else:
        generation = membership.next()
        history.append((generation.rank, generation.world_size))
        generation.communicator.barrier()
        rank.say()
        while not generation.is_over():
            pass
    generation = membership.next()
    history.append((generation.rank, generation.world_size))
    generation.communicator.barrier()
    assert history in ([(0, 3), (2, 3)], [(1, 3), (0, 2), (0, 3)], [(2, 3), (1, 2), (1, 3)])


@on_ranks(2)
def test_member_leaves_without_agreement_peers_raise_and_go_on(rank: Rank, port: int) -> None:
    membership, generation = first_generation(rank, port)
    if rank.rank == 0:
        membership.leave()
        return membership.leave()  # idempotent
    error = error_of(lambda: [generation.is_over() for _ in range(10**9)])
    check_error(error, "PeerFailed", "generation 1", "has left")
    generation = membership.next()
    assert (generation.rank, generation.world_size) == (0, 1)


@on_ranks(2)
def test_finished_job_takes_no_newcomers(rank: Rank, port: int) -> None:
    membership = Membership(store_of(port))
    if rank.rank == 0:
        membership.next()
        membership.finish()
        rank.say()
    rank.await_word()
    assert issubclass(Finished, rota.RotaError)
    with pytest.raises(Finished):
        membership.next()


# ---- deaths while others agree


STAGES = {
    "before it arrives": (Membership, "_await_proposal"),
    "proposed": (Membership, "_form"),
    "said": (Forming, "_say"),
    "agreed": (Generation, "forming"),
    "group made": (dist, "init_process_group"),
    "connected": (membership_module, "Communicator"),
    "counted as connected": (Forming, "_count_as_connected"),
}


def die_at(rank: Rank, port: int, num_members: int, victim: int, stage: str) -> None:
    """serve(), but the victim kills itself at a stage of the generation that rank 3 joins."""
    if rank.rank == victim:
        owner, name = STAGES[stage]
        original = getattr(owner, name)
        calls_to_live = 1 if victim < num_members else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls_to_live
            if calls_to_live == 0 and stage in ("before it arrives", "proposed", "agreed"):
                kill_self()
            result = original(*args, **kwargs)
            if calls_to_live == 0:
                kill_self()
            calls_to_live -= 1
            return result

        setattr(owner, name, call)
    serve(rank, port, num_members)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", [1, 3], ids=["member", "newcomer"])
def test_death_while_others_agree_is_tried_again(
    store: dist.TCPStore, victim: int, stage: str
) -> None:
    with Ranks(4, die_at, store.port, 3, victim, stage) as ranks:
        order = first_order(ranks, 3)
        ranks.tell(3)
        # They may have learned of a newcomer's death, or trained on with nobody to join.
        if victim != 3:
            all_hear(ranks, [rank for rank in [*order, 3] if rank != victim])
        store.set("stop", "")
        ranks.results(killed=[victim])


def die_when_all_are_connected(rank: Rank, port: int) -> None:
    """Rank 1 is the last of four members to connect and dies at once; the others see its death
    before they hear that the generation has been formed."""
    original = Forming._count_as_connected

    def count_as_connected(self: Forming) -> dict[str, Any]:
        if len(self.handles) < 4:
            return original(self)
        if rank.rank == 1:
            while len(self._documents.read(self._key)["ready"]) < 3:
                time.sleep(PACE_S)
            original(self)
            kill_self()
        document = original(self)
        while not self._processes.describe_gone(self.handles):
            time.sleep(PACE_S)
        return document

    Forming._count_as_connected = count_as_connected
    serve(rank, port, 3)


def test_death_of_a_member_that_was_the_last_to_connect(store: dist.TCPStore) -> None:
    with Ranks(4, die_when_all_are_connected, store.port) as ranks:
        order = first_order(ranks, 3)
        ranks.tell(3)
        all_hear(ranks, [rank for rank in [*order, 3] if rank != 1])
        store.set("stop", "")
        ranks.results(killed=[1])


# ---- what was made in a generation


@on_ranks(3, killed=[2], timeout_s=180)
def test_what_was_made_in_an_earlier_generation_raises(rank: Rank, port: int) -> None:
    """Rank 2 dies; its subgroup dies with it, the other one lives on until the next generation."""
    membership, generation = first_generation(rank, port)
    died = f"(pid {pids_of(generation)[2]}) has died"
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    communicator = rota.Communicator()
    window = rota.Window(4)
    tensor = torch.ones(4)
    for first, pair in enumerate(pairs):
        if rank.rank - first in (0, 1):
            dist.all_reduce(tensor, group=pair)
    let_die(2, generation, store_of(port))
    if rank.rank == 1:
        error = error_of(dist.all_reduce, tensor, group=pairs[1])
        check_error(error, "PeerFailed", died)
    for _ in range(100):
        dist.all_reduce(tensor, group=pairs[0])
    check_error(error_of(communicator.barrier), "PeerFailed", died)
    window.get(tensor, 2)  # the memory of the dead can still be read
    after = membership.next()
    of_pair = pairs[0]
    calls: list[tuple[Callable[[], object], str, str]] = [
        (generation.is_over, "RotaError", "generation 1"),
        (generation.communicator.barrier, "RotaError", "has gone on to the next"),
        (communicator.barrier, "PeerFailed", died),
        (lambda: window.get(tensor, 0), "RotaError", "closed"),
        (lambda: of_pair.allreduce([tensor]).wait(), "RotaError", "closed"),
        (lambda: dist.all_reduce(tensor, group=of_pair), "ValueError", "not initialized"),
    ]
    for call, kind, fact in calls:
        check_error(error_of(call), kind, fact)
    after.communicator.barrier()
    assert after.world_size == 2


# What all members make together.
MAKES: dict[str, Callable[[list[int]], object]] = {
    "communicator": lambda everyone: rota.Communicator(),
    "window": lambda everyone: rota.Window(4),
    "subgroup": lambda everyone: dist.barrier(dist.new_group(everyone)),
}


@on_ranks(5, killed=[2, 3, 4], timeout_s=180)
def test_member_killed_before_it_makes_its_part_is_noticed(rank: Rank, port: int) -> None:
    store = store_of(port)
    membership, generation = first_generation(rank, port)
    for what, make in MAKES.items():
        last = generation.world_size - 1
        let_die(last, generation, store)
        error = error_of(lambda make=make, last=last: make(list(range(last + 1))))
        check_error(error, "PeerFailed", f"rank {last}", "has died or left")
        generation = membership.next()
        assert generation.world_size == last, what


@on_ranks(2, timeout_s=180)
def test_member_that_has_gone_on_is_not_awaited(rank: Rank, port: int) -> None:
    membership, generation = first_generation(rank, port)
    for what in (*MAKES, "known subgroup"):
        group = dist.new_group([0, 1])  # each rank has published itself, and none has connected
        generation.communicator.barrier()
        if rank.rank == 1 and what == "known subgroup":
            store_of(port).wait([f"rota/elastic/over/{generation.uuid}"])
            error = error_of(dist.barrier, group)
        elif rank.rank == 1:
            error = error_of(MAKES[what], [0, 1])
        if rank.rank == 1:
            check_error(error, "PeerFailed", "rank 0", "has gone on to the next one")
        generation = membership.next(min_members=2)
        generation.communicator.barrier()


HOOKS: dict[str, Callable[[Any], object]] = {
    "no hook": lambda ddp: None,
    "allreduce_hook": lambda ddp: ddp.register_comm_hook(None, rota.allreduce_hook),
    "fused_hook": lambda ddp: ddp.register_comm_hook(rota.HookState(model=ddp), rota.fused_hook),
}


def use_groups_and_windows(generation: Generation) -> None:
    """Survivors have made more of them than newcomers."""
    everyone = list(range(generation.world_size))
    for _ in range(generation.number):
        group = dist.new_group(everyone)
        communicator = rota.Communicator(group)
        window = rota.Window(4, group)
        total = torch.ones(8)
        dist.all_reduce(total, group=group)
        communicator.all_reduce(total)
        assert total[0] == generation.world_size**2
        window.put(torch.full((1,), float(generation.rank)), 0, generation.rank)
        communicator.barrier()
        if generation.rank == 0:
            assert window.tensor[: generation.world_size].tolist() == everyone
        communicator.barrier()


def train_ddp(rank: Rank, port: int, num_members: int, hook: str) -> tuple[int, list[float]]:
    """DDP, made anew in each generation, whose backward passes meet a death."""
    store = store_of(port)
    is_newcomer = rank.rank >= num_members
    if is_newcomer:
        rank.hear()
    membership = Membership(store)
    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    state = rota.elastic.State(model=model, optimizer=optimizer)
    min_members = 1 if is_newcomer else num_members
    num_failures = 0
    while True:
        generation = membership.next(min_members)
        min_members = 1
        try:
            use_groups_and_windows(generation)
            state.synchronize(generation, check_equal=True)
            rank.tell(generation.world_size)
            ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=0.2)
            HOOKS[hook](ddp)
            while not generation.is_over(leave=store.check(["stop"])):
                ddp(torch.randn(4, 300)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
        except rota.PeerFailed:
            num_failures += 1
            continue
        if store.check(["stop"]):
            membership.leave()
            return num_failures, [parameter.sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", HOOKS)
def test_groups_windows_and_ddp_go_on_after_a_death(store: dist.TCPStore, hook: str) -> None:
    with Ranks(4, train_ddp, store.port, 3, hook) as ranks:
        for process in range(3):
            ranks.hear(process)
        ranks.kill(1)
        ranks.tell(3)
        for process in (0, 2, 3):
            while ranks.hear(process) != 3:
                pass
        store.set("stop", "")
        results = ranks.results(killed=[1])
    assert results[0][0] >= 1 and results[2][0] >= 1
    assert results[0][1] == results[2][1] == results[3][1]


@on_ranks(2)
def test_generations_leave_nothing_behind_in_a_process(rank: Rank, port: int) -> None:
    """Rank 0 stays while the other leaves and comes back."""
    membership = Membership(store_of(port), rank=rank.rank)
    model = torch.nn.Linear(100, 100)
    state = rota.elastic.State(model=model, optimizer=torch.optim.Adam(model.parameters()))
    held = []
    for _ in range(12):
        generation = membership.next(min_members=2)
        state.synchronize(generation)
        state.commit()
        things = rota.Communicator(), rota.Window(8), dist.new_group([0, 1])
        dist.barrier(things[2])
        held.append((num_descriptors(), num_threads(), num_mappings()))
        assert generation.is_over(leave=rank.rank == 1)
        del things
        if rank.rank == 1:
            membership.leave()
    membership.leave()
    # A connection that has ended is closed with the next one. When one more thread than ever runs
    # at once, glibc maps a stack and an arena for it, each in two parts, and keeps them.
    for early, late, more in zip(held[4], held[-1], (2, 2, 6), strict=True):
        assert rank.rank == 1 or late <= early + more, held


def test_stopped_member_is_named_and_awaited(store: dist.TCPStore) -> None:
    with Ranks(3, serve, store.port, 2) as ranks:
        order = first_order(ranks, 2)
        ranks.kill(order[1], signal.SIGSTOP)
        ranks.tell(2)
        ranks.wait_for_stderr(2, f"pid {ranks.pid(order[1])} ")
        ranks.kill(order[1], signal.SIGCONT)
        all_hear(ranks, [*order, 2])
        store.set("stop", "")
        ranks.results()
