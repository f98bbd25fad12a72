"""A million replayed all-reduces of ranks that wait for each other, with random delays, every bit
checked.

A graph runs a chain of all-reduces for every number of ranks, algorithm and size, while kernels of
random lengths on another stream take multiprocessors and bandwidth away from some of the ranks'
blocks. Graphs with other delays are replayed in random order.

Each chain is x ← sum of w[r]·x + c[r] over ranks r, in integers modulo 2³². The sum of w is 1
modulo 4 and that of c odd, so an element takes every value before one comes again (Hull and Dobell
1962): a stale slot is an error, no call undoes an error of the one before, and one comparison with
n such steps, computed on the CPU, checks all n.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu import bench
from gpu.bench import Bench
from gpu.local_ranks import GROUP_SIZE
from gpu.timing import Body, capture
from rota.gpu import LocalGroup

NUM_CALLS = 1_000_000
LIMIT_S = 38.0  # ends earlier on a slow GPU, and says after how many calls
RANKS = (2, 3, 4, 8)
HIERARCHICAL_RANKS = (4, 8)
ALGORITHMS = ("low_latency", "one_shot", "two_shot", "ordered_ring", "ring", "hierarchical")
ELEMS = (1, 1023, 16_411)
MAX_LOW_LATENCY_ELEMS = 2048
NUM_GRAPHS = 4
REPLAYS_PER_CHECK = 500
MODULUS = 1 << 32


@dataclass(frozen=True)
class Chain:
    """All-reduces of one group by one algorithm, each on the result of the one before."""

    group: LocalGroup
    algorithm: str
    start: Tensor  # (num_elems,) int32, on the CPU
    ranks: list[Tensor]  # the same number of int32 each, on the GPU

    @property
    def weights(self) -> list[int]:
        """Their sum is 1 modulo 4; all are odd, but for one if there is an even number of ranks."""
        others = [2 * rank + 1 for rank in range(1, self.group.world_size)]
        return [(1 - sum(others)) % 4 or 4, *others]

    @property
    def terms(self) -> list[int]:
        """What each rank adds; their sum is odd."""
        others = [5 * rank + 3 for rank in range(1, self.group.world_size)]
        return [1 + sum(others) % 2, *others]

    def call(self) -> None:
        torch._foreach_mul_(self.ranks, self.weights)
        torch._foreach_add_(self.ranks, self.terms)
        group_size = GROUP_SIZE if self.algorithm == "hierarchical" else None
        self.group.all_reduce(self.ranks, "sum", self.algorithm, group_size=group_size)

    def num_wrong(self, num_calls: int) -> int:
        """Elements that differ from those after `num_calls` steps on the CPU, over all ranks."""
        factor, term = steps(sum(self.weights), sum(self.terms), num_calls)
        expected = self.start.numpy().view(np.uint32) * np.uint32(factor) + np.uint32(term)
        return sum(
            int((rank.cpu().numpy().view(np.uint32) != expected).sum()) for rank in self.ranks
        )


def steps(factor: int, term: int, num: int) -> tuple[int, int]:
    """The factor and term of x ← factor·x + term applied `num` times."""
    all_factor, all_term = 1, 0
    while num:
        if num % 2:
            all_factor, all_term = all_factor * factor % MODULUS, all_term * factor + term
        factor, term = factor * factor % MODULUS, (term * factor + term) % MODULUS
        num //= 2
    return all_factor, all_term % MODULUS


def make_chains(bench: Bench) -> list[Chain]:
    """One chain for each number of ranks, algorithm and size."""
    chains: list[Chain] = []
    for num_ranks in RANKS[:2] if bench.is_small else RANKS:
        group = LocalGroup(num_ranks, bench.device)
        for algorithm in ALGORITHMS:
            if algorithm == "hierarchical" and num_ranks not in HIERARCHICAL_RANKS:
                continue
            for num_elems in ELEMS[:2] if bench.is_small else ELEMS:
                if algorithm == "low_latency" and num_elems > MAX_LOW_LATENCY_ELEMS:
                    continue
                generator = torch.Generator().manual_seed(len(chains))
                whole = (-(1 << 31), 1 << 31)
                start = torch.randint(*whole, (num_elems,), dtype=torch.int32, generator=generator)
                ranks = [start.to(bench.device) for _ in range(num_ranks)]
                chains.append(Chain(group, algorithm, start, ranks))
    return chains


def make_graph(chains: list[Chain], noise: Tensor, seed: int) -> Body:
    """Captures one call of each chain in random order, with random delays beside."""
    choose = random.Random(seed)
    order = choose.sample(chains, len(chains))
    beside = torch.cuda.Stream()

    def body() -> None:
        for chain in order:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                # Lengths over all magnitudes: from one block to all, from 1 to 30 µs.
                noise[: int(noise.numel() ** choose.random())].fill_(choose.random())
            chain.call()
        torch.cuda.current_stream().wait_stream(beside)

    return capture(body)


def benchmark(bench: Bench) -> None:
    """Replays until there are enough calls or no time is left; a row for each chain."""
    (noise_bytes,) = bench.sizes
    noise = bench.random(noise_bytes // 4, seed=0)
    chains = make_chains(bench)
    for chain in chains:  # outside of a graph first: the first use of a kernel loads it
        chain.call()
    num_graphs = 2 if bench.is_small else NUM_GRAPHS
    graphs = [make_graph(chains, noise, seed) for seed in range(num_graphs)]
    choose = random.Random(0)
    num_calls = 1
    wrong = [0] * len(chains)
    begin = time.monotonic()
    num_wanted = 3 if bench.is_small else NUM_CALLS // len(chains)
    while num_calls < num_wanted and not any(wrong) and time.monotonic() < begin + LIMIT_S:
        num_replays = min(REPLAYS_PER_CHECK, num_wanted - num_calls)
        for _ in range(num_replays):
            choose.choice(graphs)()
        num_calls += num_replays
        wrong = [chain.num_wrong(num_calls) for chain in chains]
    seconds = time.monotonic() - begin
    for chain, num_wrong in zip(chains, wrong, strict=True):
        row = {"label": f"rota {chain.algorithm}", "op": "soak", "num_bytes": 4 * len(chain.start)}
        row |= {"ranks": chain.group.world_size, "calls": num_calls, "num_wrong": num_wrong}
        bench.keep(row)
    bench.note(
        f"{num_calls * len(chains):,} replayed all-reduces of ranks that wait for each other, with "
        f"random delays, in {seconds:.1f} s: {sum(wrong)} elements wrong"
    )


if __name__ == "__main__":
    bench.main("soak", __doc__, benchmark, "64M", "64K", bench.LOCAL_RANKS)
