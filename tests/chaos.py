"""Chaos: short random programs of all that ranks do together; in half of them one is killed.

    make chaos TRIALS=10000 SEED=1

A trial is a program of collectives, messages, DDP hooks, groups and communicators, on 2 to 4 ranks
of one host or two. It follows from its seed alone, but for the instant of the kill. What must come
out is computed by torch in one process. A rank must return what is right, or, once a rank was
killed, raise rota.PeerFailed, or rota.TransportError where a group meets for the first time; it may
not end in any other way, nor fail to end.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota
from oracle import assert_same
from random_calls import Call, Case, call_communicator, call_group, random_call
from random_programs import Channel, Channels
from ranks import Place, Rank, Ranks

# A group notices a death within milliseconds; ranks on busy cores may take longer to be run at all.
TIMEOUT_S = 60.0
NUM_STEPS = (3, 10)
KINDS = {"collective": 6, "queue": 2, "messages": 3, "hook": 1, "group": 1, "communicator": 1}
HOOKS = (rota.allreduce_hook, rota.fp16_compress_hook, rota.bf16_compress_hook, rota.fused_hook)
MAX_DELAY_S = 0.003  # of a kill, from when its step begins


class Step(NamedTuple):
    kind: str
    channel: int
    number: int  # from which contents follow
    calls: tuple[Call, ...] = ()  # of "queue" several, of other kinds that have any one
    shift: int = 0  # of messages: to the rank so many places on
    num_elems: int = 0  # of a message, or the width of a model
    hook: int = 0
    ranks: tuple[int, ...] = ()  # of a new group


class Kill(NamedTuple):
    rank: int
    step: int
    delay_s: float


class Plan(NamedTuple):
    world_size: int
    num_hosts: int
    channels: list[Channel]
    steps: list[Step]
    kill: Kill | None


def random_step(rng: random.Random, channels: list[Channel], number: int) -> Step:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    step = Step(kind, rng.randrange(len(channels)), number)
    if kind in ("queue", "messages", "hook"):  # which need a group
        step = step._replace(channel=rng.choice([0, len(channels) - 1]))
    size = len(channels[step.channel].ranks)
    match kind:
        case "collective" | "communicator":
            return step._replace(calls=(random_call(rng, size),))
        case "queue":
            return step._replace(
                calls=tuple(random_call(rng, size) for _ in range(rng.randint(2, 6)))
            )
        case "messages":
            return step._replace(
                shift=rng.randint(0, size - 1), num_elems=rng.choice([0, 1, 1000, 100_000])
            )
        case "hook":
            return step._replace(hook=rng.randrange(len(HOOKS)), num_elems=rng.choice([3, 300]))
    ranks = tuple(sorted(rng.sample(channels[0].ranks, rng.randint(1, len(channels[0].ranks)))))
    return step._replace(channel=0, ranks=ranks, calls=(random_call(rng, len(ranks)),))


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    world_size = rng.randint(2, 4)
    everybody = tuple(range(world_size))
    some = tuple(sorted(rng.sample(everybody, rng.randint(2, world_size))))
    channels = [Channel(everybody, False), Channel(everybody, True), Channel(some, False)]
    steps = [random_step(rng, channels, i) for i in range(rng.randint(*NUM_STEPS))]
    kill = None
    if rng.random() < 0.5:
        kill = Kill(
            rng.randrange(world_size), rng.randrange(len(steps)), rng.random() * MAX_DELAY_S
        )
    return Plan(world_size, 2 if rng.random() < 0.2 else 1, channels, steps, kill)


# ---- a rank


class Execution:
    """One rank's part of a plan."""

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank = rank.rank
        self.plan = plan
        self.open = Channels(rank, plan.channels, plan.num_hosts)

    def run(self, step: Step) -> None:
        ranks = self.plan.channels[step.channel].ranks
        if self.rank not in ranks:
            return
        group = self.open.groups[step.channel]
        match step.kind:
            case "collective":
                self.call(
                    step.calls[0],
                    step.number,
                    ranks,
                    self.open.communicators.get(step.channel) or group,
                )
            case "queue":
                self.queue(step, ranks, group)
            case "messages":
                self.messages(step, ranks, group)
            case "hook":
                self.hook(step, ranks, group)
            case "group":
                made = dist.new_group(list(step.ranks), backend="rota")
                if self.rank in step.ranks:
                    self.call(step.calls[0], step.number, step.ranks, made)
                    dist.destroy_process_group(made)
            case "communicator":
                made = rota.Communicator(group)
                self.call(step.calls[0], step.number, ranks, made)
                made.close()

    def call(
        self,
        call: Call,
        number: int,
        ranks: tuple[int, ...],
        through: dist.ProcessGroup | rota.Communicator,
    ) -> None:
        case = Case(call, number, ranks.index(self.rank), len(ranks))
        if isinstance(through, rota.Communicator):
            call_communicator(through, call, case.tensors)
        else:
            call_group(through, call, case.tensors, is_async=False, is_list=number % 2 == 0)
        case.check(str(case.call))

    def queue(self, step: Step, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Calls in flight at the same time."""
        place = ranks.index(self.rank)
        cases = [
            Case(call, step.number + i, place, len(ranks)) for i, call in enumerate(step.calls)
        ]
        works = [call_group(group, c.call, c.tensors, is_async=True, is_list=False) for c in cases]
        for work, case in zip(works, cases, strict=True):
            work.wait()
            case.check(str(case.call))

    def messages(self, step: Step, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """From each rank to the one that is `shift` places on, which may be itself."""
        place = ranks.index(self.rank)
        target, source = (place + step.shift) % len(ranks), (place - step.shift) % len(ranks)
        sent = torch.arange(step.num_elems) + 1000 * place
        received = torch.full_like(sent, -1)
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=target, tag=step.number),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source, tag=step.number),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_same(received, torch.arange(step.num_elems) + 1000 * source, f"{step}: received")

    def hook(self, step: Step, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """One backward pass under DDP, whose gradients are whole numbers in every wire dtype."""
        torch.manual_seed(step.number)
        model = torch.nn.Linear(step.num_elems, 2, bias=False)
        alone = copy.deepcopy(model)
        ddp = DistributedDataParallel(model, process_group=group)
        hook = HOOKS[step.hook]
        state = None
        if hook is rota.fused_hook:
            state = rota.HookState(group)
        elif hook is rota.allreduce_hook:
            state = group
        ddp.register_comm_hook(state if state is not None else group, hook)
        data = [
            torch.full((1, step.num_elems), float(len(ranks) * (i + 1))) for i in range(len(ranks))
        ]
        ddp(data[ranks.index(self.rank)]).sum().backward()
        for one in data:
            (alone(one).sum() / len(ranks)).backward()
        assert_same(model.weight.grad, alone.weight.grad, f"{step}: gradient")


def run_plan(rank: Rank, plan: Plan) -> str:
    """How it ended: "done", or the text of the error."""
    kill = plan.kill
    try:
        execution = Execution(rank, plan)
        for i, step in enumerate(plan.steps):
            if kill is not None and (kill.rank, kill.step) == (rank.rank, i):
                threading.Timer(kill.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            execution.run(step)
        if kill is not None and kill.rank == rank.rank:
            time.sleep(TIMEOUT_S)  # until it is killed
        dist.barrier()  # a process that ends before the others finish counts as dead
    except (rota.PeerFailed, rota.TransportError) as error:
        if kill is None:
            raise
        return str(error)
    return "done"


# ---- all ranks


def stay() -> None:
    """A rank runs beside the test, in no other place."""


def run_trial(seed: int) -> str:
    """Raises AssertionError with what went wrong and the command that repeats it."""
    plan = random_plan(seed)
    killed = [] if plan.kill is None else [plan.kill.rank]
    # Not a FileStore: its readers spin for ever where a rank was killed as it wrote.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(stay, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)})
    places = [place] * plan.world_size
    try:
        with Ranks(plan.world_size, run_plan, plan, timeout_s=TIMEOUT_S, places=places) as ranks:
            ends = ranks.results(killed=killed)
        survivors = [end for rank, end in enumerate(ends) if rank not in killed]
        if plan.kill is not None:
            # The barrier at the end meets nobody in the place of the killed rank.
            assert "done" not in survivors, f"a rank met one that was killed: {ends}"
    except AssertionError as error:
        raise AssertionError(
            f"make chaos TRIALS=1 SEED={seed}  # repeats this: {plan}\n{error}"
        ) from None
    return "without a kill" if plan.kill is None else "with a kill"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial; counts up")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    # Not threads: each start of a process collects the exit codes of all, also of other threads'.
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        seeds = range(options.seed, options.seed + options.trials)
        for trial in as_completed([pool.submit(run_trial, seed) for seed in seeds]):
            if error := trial.exception():
                outcomes["failed"] += 1
                print(error, flush=True)
            else:
                outcomes[trial.result()] += 1
    print(f"{options.trials} trials from seed {options.seed}: ", end="")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return min(outcomes["failed"], 1)


if __name__ == "__main__":
    sys.exit(main())
