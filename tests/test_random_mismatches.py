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
import torch
import torch.distributed as dist

import rota
from oracle import DTYPES, assert_same, exact, exact_inputs, ops_of
from random_programs import Channel, Channels, run_program, seeds
from ranks import Rank

NUM_STEPS = 1500
NUM_STEPS_OVER_HOSTS = 300
# None, one, few, a message of a mailbox, longer than a slot, several slots.
SIZES = (0, 1, 2, 3, 64, 1000, 1001, 16 << 10, 70_000, 150_001)
SIZE_WEIGHTS = (2, 4, 4, 4, 8, 8, 8, 4, 1, 1)

OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
IN_PLACE = ("all_reduce", "reduce", "broadcast", "barrier")
INPUT_PER_RANK = ("reduce_scatter", "scatter", "all_to_all")
OUTPUT_PER_RANK = ("all_gather", "gather", "all_to_all")
COLLECTIVES = tuple(dict.fromkeys((*REDUCING, *ROOTED, *OUTPUT_PER_RANK, "barrier")))
COALESCED = ("all_reduce", "all_gather", "reduce_scatter")  # what torch collects in its manager


class Call(NamedTuple):
    """What a rank asks for; ranks that ask for equal calls agree."""

    collective: str
    dtype: torch.dtype = torch.float32
    num_elems: int = 0  # of a rank's tensor, or of each of its parts
    op: str = ""
    root: int = 0


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


def random_call(rng: random.Random, world_size: int, collective: str = "", op: str = "") -> Call:
    """Any call, or any of a collective, or of it with this op."""
    collective = collective or rng.choice(COLLECTIVES)
    if collective == "barrier":
        return Call("barrier")
    dtype = rng.choice([dtype for dtype in DTYPES if not op or op in ops_of(dtype)])
    return Call(
        collective,
        dtype,
        rng.choices(SIZES, SIZE_WEIGHTS)[0],
        (op or rng.choice(ops_of(dtype))) if collective in REDUCING else "",
        rng.randrange(world_size) if collective in ROOTED else 0,
    )


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


# ---- the oracle


def inputs_of(call: Call, number: int, world_size: int) -> list[torch.Tensor]:
    """By rank; sums of them are exact in every dtype."""
    num_elems = call.num_elems * (world_size if call.collective in INPUT_PER_RANK else 1)
    inputs = exact_inputs(world_size, num_elems, call.dtype, call.op or "sum")
    return [tensor.roll(number) for tensor in inputs]


def output_before(call: Call, own_input: torch.Tensor, world_size: int) -> torch.Tensor:
    """What a rank's output holds before the call, and after one that has failed."""
    if call.collective in IN_PLACE:
        return own_input.clone()
    num_elems = call.num_elems * (world_size if call.collective in OUTPUT_PER_RANK else 1)
    return torch.full((num_elems,), 77).to(call.dtype)


def output_after(
    call: Call, inputs: list[torch.Tensor], before: torch.Tensor, rank: int
) -> torch.Tensor:
    """What rank `rank`'s output holds after a call on which all ranks agree."""
    part = slice(rank * call.num_elems, (rank + 1) * call.num_elems)
    if call.collective in ("reduce", "gather") and rank != call.root:
        return before
    match call.collective:
        case "all_reduce" | "reduce":
            return exact(inputs, call.op)
        case "reduce_scatter":
            return exact(inputs, call.op)[part]
        case "broadcast":
            return inputs[call.root]
        case "scatter":
            return inputs[call.root][part]
        case "all_gather" | "gather":
            return torch.cat(inputs)
        case "all_to_all":
            return torch.cat([tensor[part] for tensor in inputs])
    return before


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


class Tensors(NamedTuple):
    input: torch.Tensor
    output: torch.Tensor


def call_group(
    group: dist.ProcessGroup, call: Call, tensors: Tensors, is_async: bool, is_list: bool
) -> dist.Work | None:
    """Through torch.distributed; `is_list`: through the function that takes a list, if any."""
    own, output = tensors
    options = {"group": group, "async_op": is_async}
    inputs, outputs = own.tensor_split(group.size()), output.tensor_split(group.size())
    at_root = group.rank() == call.root
    match call.collective:
        case "barrier":
            return dist.barrier(**options)
        case "all_reduce":
            return dist.all_reduce(output, OPS[call.op], **options)
        case "reduce":
            return dist.reduce(output, op=OPS[call.op], group_dst=call.root, **options)
        case "broadcast":
            return dist.broadcast(output, group_src=call.root, **options)
        case "scatter":
            parts = list(inputs) if at_root else None
            return dist.scatter(output, parts, group_src=call.root, **options)
        case "gather":
            parts = list(outputs) if at_root else None
            return dist.gather(own, parts, group_dst=call.root, **options)
        case "all_gather" if is_list:
            return dist.all_gather(list(outputs), own, **options)
        case "all_gather":
            return dist.all_gather_into_tensor(output, own, **options)
        case "reduce_scatter" if is_list:
            return dist.reduce_scatter(output, list(inputs), OPS[call.op], **options)
        case "reduce_scatter":
            return dist.reduce_scatter_tensor(output, own, OPS[call.op], **options)
        case "all_to_all" if is_list:
            return dist.all_to_all(list(outputs), list(inputs), **options)
        case "all_to_all":
            return dist.all_to_all_single(output, own, **options)
    raise ValueError(call.collective)


def call_communicator(comm: rota.Communicator, call: Call, tensors: Tensors) -> None:
    own, output = tensors
    at_root = comm.rank == call.root
    match call.collective:
        case "barrier":
            comm.barrier()
        case "all_reduce":
            comm.all_reduce(output, call.op)
        case "reduce":
            comm.reduce(output, call.root, call.op)
        case "broadcast":
            comm.broadcast(output, call.root)
        case "scatter":
            comm.scatter(output, own if at_root else None, call.root)
        case "gather":
            comm.gather(output if at_root else None, own, call.root)
        case "reduce_scatter":
            comm.reduce_scatter(output, own, call.op)
        case "all_gather":
            comm.all_gather(output, own)
        case "all_to_all":
            comm.all_to_all(output, own)


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
        for step, tensors, wait in issued:
            self.check(step, tensors, wait)

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

    def issue(self, step: Step, blocks: bool) -> tuple[list[Tensors], Callable[[], object]]:
        """Calls a step; returns its tensors, and what waits for it, or runs it if it blocks."""
        channel = self.channels[step.channel]
        place = channel.ranks.index(self.rank)
        calls = [calls[place] for calls in step.rounds]
        tensors = []
        for call in calls:
            own = inputs_of(call, step.number, len(channel.ranks))[place]
            tensors.append(Tensors(own, output_before(call, own, len(channel.ranks))))
        is_list = len(calls) == 1 and self.rng.random() < 0.5

        def start(is_async: bool) -> dist.Work | None:
            group = self.open.groups[step.channel]
            communicator = self.open.communicators.get(step.channel)
            if communicator is not None:
                for call, pair in zip(calls, tensors, strict=True):
                    call_communicator(communicator, call, pair)
                return None
            if len(calls) == 1:
                return call_group(group, calls[0], tensors[0], is_async, is_list)
            with dist._coalescing_manager(group, async_ops=is_async) as joint:
                for call, pair in zip(calls, tensors, strict=True):
                    call_group(group, call, pair, is_async=False, is_list=False)
            return joint if is_async else None

        if blocks:
            return tensors, lambda: start(is_async=False)
        work = start(is_async=True)
        assert work is not None
        if isinstance(work, dist.Work) and self.rng.random() < 0.3:
            return tensors, work.get_future().wait
        return tensors, work.wait

    def check(self, step: Step, tensors: list[Tensors], wait: Callable[[], object]) -> None:
        place = self.channels[step.channel].ranks.index(self.rank)
        world_size = len(step.rounds[0])
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
        for i, (calls, (own, output)) in enumerate(zip(step.rounds, tensors, strict=True)):
            call = calls[place]
            inputs = inputs_of(call, step.number, world_size)
            before = output_before(call, inputs[place], world_size)
            is_done = not differing or i < differing[0]
            expected = output_after(call, inputs, before, place) if is_done else before
            assert_same(output, expected, f"{step}: output")
            assert_same(own, inputs[place], f"{step}: input")


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
