"""One rank of benchmarks/recovery.py: trains, and sends facts after each change.

Times are nanoseconds of a clock that all processes of the machine share.
"""

from __future__ import annotations

import time

STARTED = time.monotonic_ns()  # when the process runs Python

import argparse  # noqa: E402
from datetime import timedelta  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import rota  # noqa: E402
import rota.elastic  # noqa: E402
from workers import join  # noqa: E402

IMPORTED = time.monotonic_ns()
FLOAT_BYTES = 4
COPIES = 3  # a parameter and two moments of Adam
LAYER_ELEMS = 1 << 20
NUM_REDUCED = 1 << 18  # elements of the all-reduce that shows that a rank is back
# Ranks are mostly idle, so that the time is that of the recovery and not of a queue for cores.
PACE_S = 0.005
TIMEOUT = timedelta(seconds=60)
NUM_STEPS = 1000  # of which the ends are timed


def make_model(num_bytes: int) -> nn.Module:
    """Layers of a megabyte-sized matrix each; all state together has num_bytes."""
    num_layers = max(1, num_bytes // (COPIES * FLOAT_BYTES * LAYER_ELEMS))
    side = int(LAYER_ELEMS**0.5)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(num_layers)))
    return model.to_empty(device="cpu")  # a newcomer needs no numbers of its own


def check_all_reduce() -> int:
    """Makes an all-reduce, checks its numbers, and returns the time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((NUM_REDUCED,), float(rank + 1))
    dist.all_reduce(tensor)
    now = time.monotonic_ns()
    if not bool((tensor == world_size * (world_size + 1) / 2).all()):
        raise RuntimeError(f"a wrong sum: {tensor[:4].tolist()}")
    return now


def train_elastic(pipe: Connection, store: dist.Store, args: argparse.Namespace) -> None:
    membership = rota.elastic.Membership(store)
    reservation = rota.elastic.Reservation(membership)
    opened = time.monotonic_ns()
    torch.manual_seed(1)
    model = make_model(args.bytes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    state = rota.elastic.State(model=model, optimizer=optimizer, random=rota.elastic.RandomState())
    made = time.monotonic_ns()
    state.take(reservation)
    begin = time.monotonic_ns()
    min_members = args.ranks
    while True:
        generation = membership.next(min_members)
        min_members = 1
        has_copied = state.synchronize(generation)
        synchronised = time.monotonic_ns()
        ddp = DistributedDataParallel(model, init_sync=False)
        wrapped = time.monotonic_ns()
        done = check_all_reduce()
        step_s = None
        if state.num_steps == 0:
            for parameter in model.parameters():
                parameter.data.fill_(0.5)
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            step_s = measure_steps(state, generation)
        terms = dict(generation.seconds)
        terms |= {f"state: {term}": seconds for term, seconds in state.seconds.items()}
        terms |= {"DDP": (wrapped - synchronised) / 1e9, "all-reduce": (done - wrapped) / 1e9}
        memcpy_s = measure_memcpy(state) if has_copied else None
        times = {"started": STARTED, "imported": IMPORTED, "opened": opened, "made": made}
        times |= {"begin": begin, "done": done}
        pipe.send({**times, "terms": terms, "memcpy_s": memcpy_s, "step_s": step_s})
        try:
            while not generation.is_over():
                time.sleep(PACE_S)
            begin = time.monotonic_ns()
        except rota.PeerFailed:
            begin = time.monotonic_ns()
        del ddp


def measure_steps(
    state: rota.elastic.State, generation: rota.elastic.Generation
) -> dict[str, float]:
    """Seconds that the end of a step takes: of the first commit, of others, and of is_over."""
    begin = time.monotonic()
    state.commit()
    moved = time.monotonic()
    for _ in range(NUM_STEPS):
        state.commit()
    committed = time.monotonic()
    for _ in range(NUM_STEPS):
        generation.is_over()
    over = time.monotonic()
    return {
        "first commit": moved - begin,
        "commit": (committed - moved) / NUM_STEPS,
        "is_over": (over - committed) / NUM_STEPS,
    }


def measure_memcpy(state: rota.elastic.State) -> dict[str, float]:
    """Seconds to copy as many bytes in one process, to memory that was and that was not touched."""
    arena = state._kept
    assert arena is not None
    target = torch.empty_like(arena.bytes)
    times = []
    for _ in range(3):
        begin = time.monotonic()
        target.copy_(arena.bytes)
        times.append(time.monotonic() - begin)
    return {"fresh": times[0], "touched": min(times[1:])}


def train_gloo(pipe: Connection, store: dist.Store, args: argparse.Namespace) -> None:
    """Ranks that are told by the parent, through the store, who is left."""
    ballast = torch.ones(args.bytes // FLOAT_BYTES)
    rank, world_size, number = args.rank, args.ranks, 0
    begin = time.monotonic_ns()
    while True:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"gloo/{number}", store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        done = check_all_reduce()
        pipe.send({"begin": begin, "done": done, "kept": ballast[0].item()})
        tensor = torch.ones(NUM_REDUCED)
        try:
            while True:
                dist.all_reduce(tensor)
                time.sleep(PACE_S)
        except RuntimeError:
            begin = time.monotonic_ns()
        dist.destroy_process_group()
        number, world_size = number + 1, world_size - 1


def rank_main(pipe: Connection, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", args.port, timeout=TIMEOUT)
    {"rota": train_elastic, "gloo": train_gloo}[args.backend](pipe, store, args)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="that begin together")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--backend", choices=("rota", "gloo"), required=True)
    parser.add_argument("--rank", type=int, default=0, help="of a Gloo rank")
    join(0, rank_main, parser)


if __name__ == "__main__":
    main()
