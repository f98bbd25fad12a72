"""Trains through kills, leaves and joins, and ends with the parameters of a run without any.

    python examples/train_elastic.py          # starts ranks, and kills one every few seconds
    python examples/train_elastic.py --quick

One process per rank, also by hand: `--serve` runs the store in which all of them meet, and every
other command, on any terminal and at any time, starts a rank; Ctrl-C makes it leave.

    python examples/train_elastic.py --serve 29511
    torchrun --standalone --nproc-per-node 1 examples/train_elastic.py --join 127.0.0.1:29511

A step is 8 logical shards (rota.LogicalShards), which the ranks share out among them, and sums run
in one tree. The final hash therefore does not depend on who took part, and when.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from types import FrameType

import torch
import torch.distributed as dist
from same_bits import hash_of
from torch import nn

import rota
import rota.elastic

NUM_SHARDS = 8
BATCH = 4  # samples of a shard
NUM_SAMPLES = 4096
WIDTH = 64
NUM_CLASSES = 10
PRELOAD = ["rota", "rota.elastic", "torch._dynamo"]
HEARTBEAT_STEPS = 5
POLL_S = 0.02


class Leaving:
    """Whether this rank was asked to leave, by Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.is_asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True


def make_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [NUM_SAMPLES, WIDTH], and int64 classes that depend on it."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    teacher = torch.randn(WIDTH, NUM_CLASSES, generator=generator)
    return inputs, (inputs @ teacher).argmax(dim=1)


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )


def train(address: str, args: argparse.Namespace) -> None:
    """The main function of one rank: joins, trains to the last step, and leaves its hash."""
    torch.set_num_threads(1)  # sums inside a matrix product may depend on the number of threads
    host, port = address.rsplit(":", 1)
    store = dist.TCPStore(host, int(port))
    leaving = Leaving()
    membership = rota.elastic.Membership(store)
    reservation = rota.elastic.Reservation(membership)
    torch.manual_seed(args.seed)
    model = make_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    hook = rota.HookState(wire_dtype=torch.float32, num_shards=NUM_SHARDS, model=model)
    shards = rota.LogicalShards(model, NUM_SHARDS, state=hook, seed=args.seed)
    state = rota.elastic.State(model=model, optimizer=optimizer, hook=hook, shards=shards)
    inputs, classes = make_data(args.seed)
    state.take(reservation)
    min_members = args.ranks
    with contextlib.suppress(rota.elastic.Finished):
        while True:
            generation = membership.next(min_members)
            min_members = 1
            try:
                has_copied = state.synchronize(generation, check_equal=True)
                say(generation, f"step {state.num_steps}" + ", copied" * has_copied, args)
                is_over = False
                while not is_over and state.num_steps < args.steps:
                    for shard in shards:
                        with shards.backward_of(shard):
                            chosen = shards.samples(shard, NUM_SAMPLES, BATCH)
                            logits = model(inputs[chosen])
                            nn.functional.cross_entropy(logits, classes[chosen]).backward()
                    shards.reduce()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
                    if generation.rank == 0 and state.num_steps % HEARTBEAT_STEPS == 0:
                        store.set("step", str(state.num_steps))
                    is_over = generation.is_over(leave=leaving.is_asked)
                if state.num_steps == args.steps:
                    generation.communicator.barrier()  # nobody ends while another needs its state
                    break
            except rota.PeerFailed as error:
                say(generation, f"step {state.num_steps}: {error}", args)
                continue
            if leaving.is_asked:
                membership.leave()
                return
        store.append("hashes", f"{hash_of(model)} ")  # type: ignore[attr-defined]  # not in the stubs
        membership.finish()


def say(generation: rota.elastic.Generation, what: str, args: argparse.Namespace) -> None:
    if not args.quiet:
        rank, world_size = generation.rank, generation.world_size
        print(f"generation {generation.number}, rank {rank}/{world_size}: {what}", flush=True)


class Supervisor:
    """Keeps ranks running, as a cluster's scheduler does, and does harm to them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._context = multiprocessing.get_context("forkserver")
        self._store = serve(0)
        self._ranks: list[BaseProcess] = []
        self._random = random.Random(args.seed)

    def run(self, num_ranks: int, events: list[tuple[int, str]]) -> str:
        """Trains with these events, each at a step; returns the hash that all ranks agree on."""
        begin = time.monotonic()
        args = argparse.Namespace(**vars(self._args) | {"ranks": num_ranks})
        for _ in range(num_ranks):
            self._start(args)
        late = argparse.Namespace(**vars(args) | {"ranks": 1})
        for step, event in events:
            while self._is_training() and self._step() < step:
                time.sleep(POLL_S)
            if not self._is_training():
                raise SystemExit(f"error: the training ended before step {step}, for '{event}'")
            print(f"{time.monotonic() - begin:5.1f} s, step {self._step()}: {event}", flush=True)
            if event == "join":
                self._start(late)
                continue
            victim = self._ranks.pop(self._random.randrange(len(self._ranks)))
            victim.kill() if event == "kill" else victim.terminate()
            victim.join()
            if event == "kill":
                self._start(late)
        for rank in self._ranks:
            rank.join()
            if rank.exitcode != 0:
                raise SystemExit(f"error: a rank ended with {rank.exitcode}")
        hashes = set(self._store.get("hashes").decode().split())
        if len(hashes) != 1:
            raise SystemExit(f"error: ranks have other parameters: {sorted(hashes)}")
        return hashes.pop()

    def _start(self, args: argparse.Namespace) -> None:
        address = f"127.0.0.1:{self._store.port}"
        process = self._context.Process(target=train, args=(address, args), daemon=True)
        process.start()
        self._ranks.append(process)

    def _step(self) -> int:
        return int(self._store.get("step")) if self._store.check(["step"]) else 0

    def _is_training(self) -> bool:
        return any(rank.is_alive() for rank in self._ranks)


def serve(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=3, help="that begin together; default: %(default)s")
    add("--steps", type=int, default=1500, help="default: %(default)s")
    add("--width", type=int, default=256, help="of the model; default: %(default)s")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="fewer steps and events")
    add("--quiet", action="store_true", help="only what the supervisor does")
    add("--serve", type=int, metavar="PORT", help="only run the store")
    add("--join", metavar="HOST:PORT", help="be one rank")
    args = parser.parse_args()
    if args.serve is not None:
        store = serve(args.serve)
        print(f"the store listens on port {store.port}; end it by Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        return
    if args.join is not None:
        return train(args.join, args)

    multiprocessing.set_forkserver_preload(PRELOAD)
    num_events = 4
    if args.quick:
        args.steps, args.width = 300, 64
    else:
        num_events = 12
    names = itertools.cycle(["kill", "leave", "join", "kill"])
    steps = (args.steps * (i + 1) // (num_events + 2) for i in range(num_events))
    events = list(zip(steps, names, strict=False))
    elastic = Supervisor(args).run(args.ranks, events)
    quiet = argparse.Namespace(**vars(args) | {"quiet": True})
    alone = Supervisor(quiet).run(1, [])
    verdict = "the same" if elastic == alone else "DIFFERENT"
    print(f"after {args.steps} steps and {num_events} changes: parameters {elastic}")
    print(f"one rank, no change:           parameters {alone}  {verdict}")
    if elastic != alone:
        sys.exit(1)


if __name__ == "__main__":
    main()
