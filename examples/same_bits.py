"""Trains the demo's GPT on 1, 2, 4 and 8 ranks, and prints the same hashes for all.

    python examples/same_bits.py                          # 50 steps, starts its own ranks
    python examples/same_bits.py --optimizer sgd --ranks 1 3 6 mixed

A step is 8 logical shards (rota.LogicalShards), whatever the number of ranks. "mixed" goes on with
another number of ranks every 10 steps. The run fails if any hash of the parameters differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from run_ranks import run_ranks
from torch import nn
from train_gpt import GPT, SCALES, learning_rate, positive, read_corpus, windows

import rota

NUM_SHARDS = 8
MIXED = (2, 8, 1, 4, 3)
HASH_EVERY = 10  # steps
CONFIG = SCALES["cpu"].config


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:12]


def train(
    rank: int, num_steps: int, saved_state: Path, text: torch.Tensor, args: argparse.Namespace
) -> list[str]:
    """One rank: goes on for num_steps from the last saved state; returns hashes."""
    torch.manual_seed(args.seed)
    model = GPT(dataclasses.replace(CONFIG, context=args.context))
    optimizer = make_optimizer(args.optimizer, model)
    state = rota.HookState(
        wire_dtype=getattr(torch, args.wire_dtype), num_shards=NUM_SHARDS, model=model
    )
    shards = rota.LogicalShards(model, NUM_SHARDS, state=state, seed=args.seed)
    if saved_state.exists():
        saved = torch.load(saved_state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        shards.load_state_dict(saved["shards"])

    hashes = []
    for _ in range(num_steps):
        peak = optimizer.defaults["lr"]
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(shards.num_steps, args.steps, peak)
        for shard in shards:
            with shards.backward_of(shard):
                chosen = shards.samples(shard, len(text) // (args.context + 1), args.batch)
                model(*windows(text, chosen * (args.context + 1), args.context)).backward()
        shards.reduce()
        rota.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if shards.num_steps % HASH_EVERY == 0 or shards.num_steps == args.steps:
            hashes.append(hash_of(model))
    if rank == 0:
        trained: dict[str, Any] = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "shards": shards.state_dict(),
        }
        torch.save(trained, saved_state)
    return hashes


def run(ranks: str, text: torch.Tensor, args: argparse.Namespace) -> list[str]:
    """Trains all steps; returns the hash of the parameters after every HASH_EVERY."""
    hashes: list[str] = []
    parts = [(int(ranks), args.steps)] if ranks != "mixed" else mixed_parts(args.steps)
    with tempfile.TemporaryDirectory(prefix="rota-same-bits-") as name:
        for num_ranks, num_steps in parts:
            hashes += run_ranks(num_ranks, train, num_steps, Path(name, "state.pt"), text, args)[0]
    return hashes


def mixed_parts(num_steps: int) -> list[tuple[int, int]]:
    """Numbers of ranks and steps, by turns."""
    lengths = [min(HASH_EVERY, num_steps - begin) for begin in range(0, num_steps, HASH_EVERY)]
    return list(zip(itertools.cycle(MIXED), lengths, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", nargs="+", default=["1", "2", "4", "8", "mixed"])
    parser.add_argument("--steps", type=positive(int), default=50)
    parser.add_argument("--batch", type=positive(int), default=1, help="sequences of a shard")
    parser.add_argument("--context", type=positive(int), default=CONFIG.context)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument(
        "--wire-dtype", default="float32", help="a narrower one gives other bits for other ranks"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    text, _ = read_corpus()
    first: list[str] = []
    for ranks in args.ranks:
        begin = time.monotonic()
        hashes = run(ranks, text, args)
        first = first or hashes
        verdict = "the same" if hashes == first else "DIFFERENT"
        seconds = time.monotonic() - begin
        print(f"{ranks:>5} ranks: {' '.join(hashes)}  {verdict} ({seconds:.0f} s)", flush=True)
        if hashes != first:
            sys.exit(f"the parameters on {ranks} ranks differ from those on {args.ranks[0]}")


if __name__ == "__main__":
    main()
