"""A trainer publishes weights every step, and two samplers generate text with the newest ones.

    python examples/rl_weights.py                # starts all processes itself, on the CPU
    python examples/rl_weights.py --wire-dtype bfloat16

As in reinforcement learning: trainer and samplers share nothing but a torch Store, through which
WeightStore connects them. One sampler is killed and comes back. The run fails if a sampler has
other weights than the trainer had in that version, or if the trainer is ever delayed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from train_gpt import (
    BYTES,
    GPT,
    GPTConfig,
    make_optimizer,
    norm,
    positive,
    read_corpus,
    sample_batch,
    train_step,
)

from rota.weights import WeightStore

CONFIG = GPTConfig(context=32, num_layers=2, num_heads=2, width=64)
BATCH = 8
PROMPT = b"def "
DELAY_S = 1.0  # more than a busy machine takes a core away from a publish() that waits for nobody
LIMIT_S = 120.0
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rota", "rich.progress", "torch._dynamo"])


def open_store(port: int, **options: Any) -> WeightStore:
    torch.set_num_threads(1)  # sums inside a matrix product may depend on the number of threads
    return WeightStore(dist.TCPStore("127.0.0.1", port, is_master=False), **options)


@torch.no_grad()
def bits_on_test_text(model: GPT, text: torch.Tensor) -> float:
    """Loss in nats on the same few windows everywhere: equal weights give equal bits."""
    return float(model(*sample_batch(text, BATCH, CONFIG.context, (0, 0, 0))))


@torch.no_grad()
def generate(model: GPT, num_bytes: int) -> str:
    """The likeliest continuation of PROMPT."""
    text = list(PROMPT)
    for _ in range(num_bytes):
        inputs = torch.tensor([text[-CONFIG.context :]])
        x = norm(model.embedding(inputs))
        for block in model.blocks:
            x = block(x, model.cos[: inputs.shape[1]], model.sin[: inputs.shape[1]])
        text.append(int(model.head(norm(x))[0, -1].argmax()) % BYTES)
    return bytes(text).decode("latin-1")


def trainer(port: int, pipe: Connection, text: torch.Tensor, wire_dtype: str | None) -> None:
    """Trains and publishes until told to stop; then sends the loss of every version, and times."""
    wire = None if wire_dtype is None else getattr(torch, wire_dtype)
    store = open_store(port, rank=0, wire_dtype=wire, block_scaling=False)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    rounded = GPT(CONFIG)  # what the samplers get
    optimizer = make_optimizer(model)
    losses: list[float] = []
    publish_s: list[float] = []
    while not pipe.poll():
        train_step(
            model, optimizer, sample_batch(text, BATCH, CONFIG.context, (1, 0, len(losses))), 2e-3
        )
        begin = time.perf_counter()
        store.publish(len(losses), model.state_dict())
        publish_s.append(time.perf_counter() - begin)
        rounded.load_state_dict(
            {k: x if wire is None else x.to(wire).float() for k, x in model.state_dict().items()}
        )
        losses.append(bits_on_test_text(rounded, text))
    pipe.send((losses, publish_s))
    pipe.recv()


def sampler(port: int, pipe: Connection, text: torch.Tensor, num_bytes: int) -> None:
    """Generates with every version that is new; sends version, loss and text."""
    store = open_store(port)
    model = GPT(CONFIG)
    version = -1
    while True:
        version, weights = store.pull(at_least=version + 1)
        model.load_state_dict(weights, assign=True)
        pipe.send((version, bits_on_test_text(model, text), generate(model, num_bytes)))


@dataclass
class Worker:
    """A process, and what it has sent."""

    name: str
    process: Any
    pipe: Connection
    samples: list[tuple[int, float, str]] = field(default_factory=list)

    def wait_for(self, num_samples: int) -> None:
        """Blocks until it has sent so many samples more."""
        for _ in range(num_samples):
            if not self.pipe.poll(LIMIT_S):
                raise TimeoutError(f"the {self.name} has sent nothing for {LIMIT_S:g} s")
            self.samples.append(self.pipe.recv())


def start(name: str, function: Callable[..., None], port: int, *args: object) -> Worker:
    pipe, far_end = context.Pipe()
    process = context.Process(target=function, args=(port, far_end, *args), daemon=True)
    process.start()
    far_end.close()
    return Worker(name, process, pipe)


def check(workers: list[Worker], losses: list[float], publish_s: list[float]) -> list[str]:
    """What went wrong."""
    problems = [
        f"{worker.name} has loss {loss} with version {version}, the trainer {losses[version]}"
        for worker in workers
        for version, loss, _ in worker.samples
        if version < len(losses) and loss != losses[version]
    ]
    for worker in workers:
        versions = [version for version, _, _ in worker.samples]
        if versions != sorted(set(versions)):
            problems.append(f"{worker.name} has got versions in the order {versions}")
    if max(publish_s) > DELAY_S:
        problems.append(f"the trainer was delayed: publish() took up to {max(publish_s):.3f} s")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=positive(int), default=6, help="of each sampler's life")
    parser.add_argument("--bytes", type=positive(int), default=40, help="to generate each time")
    parser.add_argument("--wire-dtype", choices=("float16", "bfloat16", "float8_e5m2"))
    args = parser.parse_args()

    text, _ = read_corpus()
    text = text[: 1 << 20].clone()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source = start("trainer", trainer, server.port, text, args.wire_dtype)
    steady = start("sampler 1", sampler, server.port, text, args.bytes)
    killed = start("sampler 2", sampler, server.port, text, args.bytes)
    killed.wait_for(args.samples)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.join()
    steady.wait_for(args.samples)
    back = start("sampler 2, back", sampler, server.port, text, args.bytes)
    back.wait_for(args.samples)
    source.pipe.send("stop")
    if not source.pipe.poll(LIMIT_S):
        sys.exit("the trainer does not stop")
    losses, publish_s = source.pipe.recv()

    table = Table(title=f"{len(losses)} versions published")
    for heading in ("process", "versions", "loss (nats per byte)", "last text"):
        table.add_column(heading)
    workers = [steady, killed, back]
    for worker in workers:
        (first, *_), (last, loss, sample) = worker.samples[0], worker.samples[-1]
        versions = f"{first} to {last}, {len(worker.samples)} pulled"
        table.add_row(worker.name, versions, f"{loss:.3f}", repr(sample))
    Console(width=120).print(table)
    print(
        f"publish(): median {statistics.median(publish_s) * 1e3:.2f} ms, longest "
        f"{max(publish_s) * 1e3:.2f} ms; {killed.name} was killed after version "
        f"{killed.samples[-1][0]} and came back with version {back.samples[0][0]}"
    )
    problems = check(workers, losses, publish_s)
    if back.samples[0][0] <= killed.samples[-1][0]:
        problems.append("the sampler that came back has got an old version")
    for worker in (source, steady, back):
        worker.process.kill()
        worker.process.join()
    if problems:
        sys.exit("\n".join(problems))
    print("all samplers had the trainer's weights, bit for bit")


if __name__ == "__main__":
    main()
