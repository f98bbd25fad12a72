"""Random programs of collectives, in which some ranks call something other than the rest.

Each step is one collective, or several coalesced ones, on one of several groups and communicators.
Mostly all ranks agree, and the results are equalities. Where they differ (in the collective, the
reduce op, the dtype, the number of elements, the root, or the order of two calls), every rank must
raise rota.Mismatch with the ranks by what they called, write nothing, and go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch.distributed as dist

import rota
from random_calls import Call, Case, call_communicator, call_group, random_call
from random_programs import Channel, Channels, run_program, seeds
from ranks import Rank

NUM_STEPS = 1500
NUM_STEPS_OVER_HOSTS = 300
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")  # what torch collects in its manager


class Step(NamedTuple):
    """One call on every rank, or several that are coalesced."""

    number: int  # its place in the program, from which the contents of its tensors follow
    channel: int
    rounds: tuple[tuple[Call, ...], ...]  # of each coalesced call, what each rank asks for


class Batch(NamedTuple):
    """Steps that are in flight at the same time, or one that blocks."""

    steps: tuple[Step, ...]
    blocks: bool


# ---- the plan


def other_call(rng: random.Random, world_size: int, call: Call, *, keep: bool = False) -> Call:
    """A call that differs from `call`: in one field, or in all; `keep`: not in collective or op."""
    while True:
        other = random_call(rng, world_size, call.collective, call.op)
        if call.collective != "barrier":
            field = rng.choice(("num_elems", "dtype", "root"))
            other = call._replace(**{field: getattr(other, field)})
        if not keep and rng.random() < 0.5:
            other = random_call(rng, world_size, rng.choice(("", call.collective)))
        if other != call:
            return other


def some_ranks(rng: random.Random, world_size: int) -> set[int]:
    """Some but not all."""
    return set(rng.sample(range(world_size), rng.randint(1, world_size - 1)))


def random_rounds(rng: random.Random, world_size: int) -> Iterator[tuple[tuple[Call, ...], ...]]:
    """The rounds of one step, or of two that some ranks call in the other order."""
    kind = rng.choices(("agree", "differ", "coalesce", "swap"), (70, 12, 12, 6))[0]
    if kind == "coalesce":
        first = random_call(rng, world_size, rng.choice(COALESCED))
        calls = [first]
        while rng.random() < 0.7:
            calls.append(random_call(rng, world_size, first.collective, first.op))
        rounds = [[call] * world_size for call in calls]
        if rng.random() < 0.5:
            odd_round = rng.choice(rounds)
            odd_call = other_call(rng, world_size, odd_round[0], keep=True)
            for rank in some_ranks(rng, world_size):
                odd_round[rank] = odd_call
        yield tuple(tuple(calls) for calls in rounds)
        return
    call = random_call(rng, world_size)
    if kind == "agree":
        yield ((call,) * world_size,)
    else:
        other = other_call(rng, world_size, call)
        odd = some_ranks(rng, world_size)
        yield (tuple(other if rank in odd else call for rank in range(world_size)),)
        if kind == "swap":
            yield (tuple(call if rank in odd else other for rank in range(world_size)),)


def random_plan(
    rng: random.Random, world_size: int, num_steps: int
) -> tuple[list[Channel], list[Batch]]:
    everybody = tuple(range(world_size))
    channels = [Channel(everybody, False), Channel(everybody, False), Channel(everybody, True)]
    while len(channels) < 3 + (world_size - 2):
        ranks = tuple(sorted(rng.sample(everybody, rng.randint(2, world_size))))
        channels.append(Channel(ranks, rng.random() < 0.3))
    batches = []
    number = 0
    while number < num_steps:
        blocks = rng.random() < 0.5
        steps = []
        for _ in range(1 if blocks else rng.randint(1, 8)):
            place = rng.randrange(len(channels))
            if channels[place].is_communicator and not blocks:
                continue
            for rounds in random_rounds(rng, len(channels[place].ranks)):
                steps.append(Step(number, place, rounds))
                number += 1
        if blocks:
            batches += [Batch((step,), True) for step in steps]
        else:
            batches.append(Batch(tuple(steps), False))
    return channels, batches


def names_ranks(text: str, calls: tuple[Call, ...]) -> bool:
    """Whether an error's text tells which ranks called what."""
    if all(call.collective == "all_to_all" and call.dtype == calls[0].dtype for call in calls):
        # Ranks compare the parts of each pair, of which the error names one.
        return any(
            f"rank {i} sends {sent.num_elems} elements to rank {j}, "
            f"which expects {awaited.num_elems}" in text
            for i, sent in enumerate(calls)
            for j, awaited in enumerate(calls)
            if sent != awaited
        )
    ranks_by_call: dict[Call, list[str]] = {}
    for rank, call in enumerate(calls):
        key = call._replace(num_elems=0) if call.collective == "all_to_all" else call
        ranks_by_call.setdefault(key, []).append(str(rank))
    return all(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} called {call.collective}(" in text
        for call, ranks in ranks_by_call.items()
    )


# ---- the executor


class Execution:
    """One rank's part of a program: runs its batches and compares the results with the oracle."""

    def __init__(self, rank: Rank, seed: int, channels: list[Channel], num_hosts: int) -> None:
        self.rank = rank.rank
        self.rng = random.Random(f"{seed} on rank {rank.rank}")  # for what ranks may do differently
        self.channels = channels
        self.num_hosts = num_hosts
        self.open = Channels(rank, channels, num_hosts)

    def run(self, batch: Batch) -> None:
        issued = [
            (step, *self.issue(step, batch.blocks))
            for step in self.in_any_order(batch.steps)
            if self.rank in self.channels[step.channel].ranks
        ]
        self.rng.shuffle(issued)
        for step, cases, wait in issued:
            self.check(step, cases, wait)

    def in_any_order(self, steps: tuple[Step, ...]) -> Iterator[Step]:
        """All steps, those of each channel in their order."""
        queues: dict[int, list[Step]] = {}
        for step in steps:
            queues.setdefault(step.channel, []).append(step)
        while queues:
            channel = self.rng.choice(list(queues))
            yield queues[channel].pop(0)
            if not queues[channel]:
                del queues[channel]

    def issue(self, step: Step, blocks: bool) -> tuple[list[Case], Callable[[], object]]:
        """Calls a step; returns its cases, and what waits for it, or runs it if it blocks."""
        channel = self.channels[step.channel]
        place = channel.ranks.index(self.rank)
        calls = [calls[place] for calls in step.rounds]
        cases = [Case(call, step.number, place, len(channel.ranks)) for call in calls]
        is_list = len(calls) == 1 and self.rng.random() < 0.5

        def start(is_async: bool) -> dist.Work | None:
            group = self.open.groups[step.channel]
            communicator = self.open.communicators.get(step.channel)
            if communicator is not None:
                for case in cases:
                    call_communicator(communicator, case.call, case.tensors)
                return None
            if len(calls) == 1:
                return call_group(group, calls[0], cases[0].tensors, is_async, is_list)
            with dist._coalescing_manager(group, async_ops=is_async) as joint:
                for case in cases:
                    call_group(group, case.call, case.tensors, is_async=False, is_list=False)
            return joint if is_async else None

        if blocks:
            return cases, lambda: start(is_async=False)
        work = start(is_async=True)
        assert work is not None
        if isinstance(work, dist.Work) and self.rng.random() < 0.3:
            return cases, work.get_future().wait
        return cases, work.wait

    def check(self, step: Step, cases: list[Case], wait: Callable[[], object]) -> None:
        differing = [i for i, calls in enumerate(step.rounds) if len(set(calls)) > 1]
        try:
            wait()
        except rota.Mismatch as error:
            assert differing, f"{step}: {error}"
            # Between hosts an error names two sides, not all ranks.
            is_told = self.num_hosts > 1 or names_ranks(str(error), step.rounds[differing[0]])
            assert is_told, f"{step}: {error}"
        else:
            assert not differing, f"{step}: no error"
        for i, case in enumerate(cases):
            case.check(str(step), is_done=not differing or i < differing[0])


def run_plan(rank: Rank, seed: int, num_steps: int, num_hosts: int) -> None:
    channels, batches = random_plan(random.Random(seed), rank.world_size, num_steps)
    execution = Execution(rank, seed, channels, num_hosts)
    for batch in batches:
        execution.run(batch)
    dist.barrier()  # a process that ends before the others finish counts as dead


@pytest.mark.parametrize("seed", seeds(usual=3))
def test_random_mismatches_raise_on_every_rank_and_the_rest_is_right(seed: int) -> None:
    run_program(seed, 2 + seed % 3, run_plan, NUM_STEPS, 1)


@pytest.mark.parametrize("seed", seeds(usual=2))
def test_random_mismatches_over_hosts_raise_on_every_rank(seed: int) -> None:
    run_program(seed, 2 + seed % 3, run_plan, NUM_STEPS_OVER_HOSTS, 2)
