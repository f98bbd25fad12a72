"""All-reduce between two processes that share one GPU: what runs there, and how long it takes.

    PYTHONPATH=python:benchmarks python3 -m gpu.shared_gpu --sizes 8K,1M,64M

The GPU switches between processes in time slices, and a rank that waits for another one waits for
its slice: these times say that an entry works and nothing of its speed, and no ratio is made of
them. rota's Communicator, whose label says by which means it joins GPUs; torch's symmetric-memory
ops; and NCCL, which takes two ranks on one GPU only when each claims a host of its own, or, from
2.30 on (torch 2.11 has 2.28), by NCCL_MULTI_RANK_GPU_ENABLE. What does not run is noted with the
reason. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import interleave
import report
import tiles
from arguments import FLOAT32_BYTES
from gpu import frame
from gpu.frame import Bench, first_line
from interleave import Measurement
from protocol import Entry, Reply

RANKS = 2
LIMIT_S = 20.0  # of one entry
TORCH_CUDA = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@dataclass(frozen=True)
class Peer:
    """An entry in processes of its own; in `env`, {rank} stands for the rank.

    Args:
        reduces_on_cpu: it is there to show, in a dry run, that the frame works.
        in_dry_run: False where another entry runs the same lines; processes take seconds to start.
    """

    label: str
    backend: str
    api: str
    env: dict[str, str] = field(default_factory=dict)
    reduces_on_cpu: bool = False
    in_dry_run: bool = True


PEERS = (
    Peer("rota.Communicator", "rota", "rota.Communicator", TORCH_CUDA),
    Peer("symm_mem one_shot_all_reduce", "symm_mem", "one_shot_all_reduce", TORCH_CUDA),
    Peer(
        "symm_mem two_shot_all_reduce_",
        "symm_mem",
        "two_shot_all_reduce_",
        TORCH_CUDA,
        in_dry_run=False,
    ),
    Peer(
        "NCCL, NCCL_HOSTID of each rank",
        "nccl",
        "torch.distributed",
        {"NCCL_HOSTID": "rank{rank}", "NCCL_SOCKET_IFNAME": "lo"},
    ),
    Peer(
        "NCCL, NCCL_MULTI_RANK_GPU_ENABLE",
        "nccl",
        "torch.distributed",
        {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},
        in_dry_run=False,
    ),
    Peer("Gloo on the CPU", "gloo", "torch.distributed", reduces_on_cpu=True),
)


# ---- the ranks


def work(peer: Peer, rank: int, store: str, sizes: list[int], is_cuda: bool, iters: int) -> None:
    """One rank: prints as JSON by which means GPUs were joined, None if nothing tells, and of each
    size its samples, in ns, and how much was wrong."""
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    is_nccl = peer.backend == "nccl"
    dist.init_process_group(
        "nccl" if is_nccl else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        device_id=device if is_nccl else None,
    )
    make = {"rota": rota_all_reduce, "symm_mem": symm_mem_all_reduce}.get(
        peer.backend, torch_all_reduce
    )
    replies = []
    means = None
    for num_bytes in sizes:
        num_elems = num_bytes // FLOAT32_BYTES
        source = torch.empty(num_elems)
        tiles.fill_with_input(source, rank, RANKS, seed=num_bytes)
        tensor, all_reduce, means = make(peer, device, num_elems)
        tensor.copy_(source)
        result = all_reduce("sum").cpu()
        num_wrong = tiles.count_wrong(result, "all_reduce", RANKS, seed=num_bytes)
        sample_ns = []
        for _ in range(iters):
            tensor.copy_(source)
            dist.barrier()
            start_ns = perf_counter_ns()
            all_reduce("sum")
            if is_cuda:
                torch.cuda.synchronize()
            sample_ns.append(perf_counter_ns() - start_ns)
        replies.append({"sample_ns": sample_ns, "num_wrong": num_wrong})
    dist.barrier()  # a peer may still read what is this rank's
    if is_cuda:
        torch.cuda.synchronize()
    print(json.dumps([means, replies]), flush=True)
    # Without a farewell: what a library leaves running must not hold the others up.
    os._exit(0)


# What to fill; the call, which returns the result; by which means GPUs were joined, if it tells.
Entrance = tuple[Tensor, Callable[[str], Tensor], str | None]


def rota_all_reduce(peer: Peer, device: torch.device, num_elems: int) -> Entrance:
    """In place."""
    import rota

    communicator: Any = rota.Communicator()
    if device.type == "cuda":
        communicator.connect_device(device)
    tensor = torch.empty(num_elems, device=device)

    def all_reduce(op: str) -> Tensor:
        communicator.all_reduce(tensor, op)
        return tensor

    return tensor, all_reduce, communicator.device_means


def symm_mem_all_reduce(peer: Peer, device: torch.device, num_elems: int) -> Entrance:
    """On a tensor in symmetric memory; one_shot leaves it as it is and returns another."""
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD
    assert group is not None
    tensor = symm_mem.empty(num_elems, dtype=torch.float32, device=device)
    symm_mem.rendezvous(tensor, group)
    op_of_torch = getattr(torch.ops.symm_mem, peer.api)
    return tensor, lambda op: op_of_torch(tensor, op, group.group_name), None


def torch_all_reduce(peer: Peer, device: torch.device, num_elems: int) -> Entrance:
    """dist.all_reduce, in place."""
    tensor = torch.empty(num_elems, device=device)

    def all_reduce(op: str) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    return tensor, all_reduce, None


# ---- the driver


def benchmark(bench: Bench) -> None:
    """Every entry, in processes of its own."""
    bench.note(
        f"{RANKS} processes share the GPU in time slices: their times are no measure of speed"
    )
    is_cuda = bench.target.device.type == "cuda"
    for number, peer in enumerate(PEERS):
        if (peer.reduces_on_cpu and is_cuda) or (bench.target.is_dry and not peer.in_dry_run):
            continue
        try:
            means, replies = run_ranks(bench, number, is_cuda)
        except RuntimeError as error:
            if peer.backend == "rota":
                bench.fail(peer.label, error)
            else:
                bench.note(f"{peer.label} did not run here: {first_line(error)}")
            continue
        for num_bytes, of_size in zip(bench.sizes, zip(*replies, strict=True), strict=True):
            result = Measurement(
                Entry(f"{peer.label}, {means}" if means else peer.label, peer.backend, peer.api),
                "all_reduce between processes",
                num_bytes // FLOAT32_BYTES,
                num_bytes,
                batch=1,
                times_us=interleave.slowest_rank_us(of_size, 1),
                num_wrong=sum(reply.num_wrong or 0 for reply in of_size),
            )
            row = {**report.row(result, None), "algbw_gb_per_s": None}
            bench.add_row({**row, "ranks": RANKS, "timed": "host, time slices"})


def run_ranks(bench: Bench, number: int, is_cuda: bool) -> tuple[str | None, list[list[Reply]]]:
    """By which means GPUs were joined; replies by rank, then by size.

    Raises:
        RuntimeError: a rank failed or hung; its last words.
    """
    peer = PEERS[number]
    with tempfile.TemporaryDirectory(prefix="rota-gpu-") as folder:
        processes = []
        outputs = [Path(folder) / f"rank{rank}" for rank in range(RANKS)]
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-m", "gpu.shared_gpu", "--work"]
            choices = [number, rank, f"{folder}/store", is_cuda, bench.plan.num_samples]
            command.append(json.dumps([*choices, bench.sizes]))
            # The loopback, to work without a network.
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            env |= {name: value.format(rank=rank) for name, value in peer.env.items()}
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    time.sleep(0.5)  # for the others' words
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done within {LIMIT_S:.0f} s")
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.read_text().strip().splitlines() or ["no output"] for output in outputs]
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                raise RuntimeError(f"rank {rank}: {last_words(texts[rank])}")
        means, replies = zip(*(json.loads(lines[-1]) for lines in texts), strict=True)
        return means[0], [[Reply(**reply) for reply in of_rank] for of_rank in replies]


def last_words(lines: list[str]) -> str:
    """The exception's line: the last that is not of a farewell."""
    errors = [line for line in lines if "Error" in line or "rota." in line]
    return (errors or lines)[-1]


def main() -> int:
    """The exit status: 0 if rota ran and nothing was wrong."""
    if sys.argv[1:2] == ["--work"]:
        number, rank, store, is_cuda, iters, sizes = json.loads(sys.argv[2])
        work(PEERS[number], rank, store, sizes, is_cuda, iters)
    args = frame.parse_arguments(__doc__, "8K,1M,64M", "1K,64K")
    return frame.main("shared_gpu", args, benchmark)


if __name__ == "__main__":
    sys.exit(main())
