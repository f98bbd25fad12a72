"""Starts the ranks of an example on this host, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

# Imported once for all ranks. The first optimizer imports torch._dynamo.
PRELOAD = ["rich.progress", "rota", "torch._dynamo", "__main__"]


def run_ranks(num_ranks: int, main: Callable[..., Any], *args: object) -> list[Any]:
    """What `main(rank, *args)` returns on each rank, with a default group of rota over all. A rank
    that raises ends the others, and its exception is raised here."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="rota-example-") as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(
            _work, (num_ranks, folder, main, args), num_ranks, start_method="forkserver"
        )
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _work(
    rank: int, num_ranks: int, folder: Path, main: Callable[..., Any], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)  # sums inside a matrix product may depend on the number of threads
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("rota", store=store, rank=rank, world_size=num_ranks)
    torch.save(main(rank, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()
