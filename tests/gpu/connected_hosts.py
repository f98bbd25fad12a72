"""Communicators of ranks on several hosts whose GPUs are joined through a device engine.

The hosts are simulated by ROTA_HOST_ID, and the engine is NCCL or a stand-in for it
(device_engines.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rota
import several_hosts
from device_engines import make_engine, num_exchanges
from on_gpu import DEVICE, LIMIT_S, WAIT_S, Guarded, init
from oracle import assert_same
from ranks import Rank

TIME_S = 3 * LIMIT_S


on_layout = functools.partial(several_hosts.on_layout, timeout_s=TIME_S)


def communicator_over(engine: dist.ProcessGroup | None, **options: Any) -> rota.Communicator:
    """Its GPUs are not joined yet."""
    return rota.Communicator(engine=engine, timeout=timedelta(seconds=WAIT_S), **options)


class Connected:
    """A communicator with joined GPUs; says whether a call went through them."""

    def __init__(self, rank: Rank, *, for_cpu: bool = False, **options: Any) -> None:
        if not dist.is_initialized():
            init(rank, "gloo")
        self.engine = make_engine(for_cpu=for_cpu)
        self.comm = communicator_over(self.engine, **options)
        self.comm.connect_device(DEVICE)
        assert self.comm.peer_access is not None and "device engine" in self.comm.peer_access

    def goes_through_engine(self, call: Callable[..., object], *args: Any, **options: Any) -> bool:
        before = num_exchanges(self.engine)
        call(*args, **options)
        return num_exchanges(self.engine) > before

    def same_on_both(
        self,
        source: torch.Tensor,
        case: str,
        *,
        offset: int = 0,
        is_staged: bool = False,
        **options: Any,
    ) -> None:
        """All-reduces `source` on the CPU and on the GPU, and compares the results."""
        on_cpu, on_gpu = source.clone(), Guarded(source, offset)
        self.comm.all_reduce(on_cpu, **options)
        through = self.goes_through_engine(self.comm.all_reduce, on_gpu.tensor, **options)
        assert through != (is_staged or source.numel() == 0), case
        assert_same(on_gpu.get(case), on_cpu, case)

    def same_scattered(self, source: torch.Tensor, case: str, op: str = "sum") -> None:
        """Reduce-scatters `source` on the CPU and on the GPU, and compares the results."""
        on_cpu = torch.zeros(source.numel() // dist.get_world_size()).to(source.dtype)
        on_gpu = Guarded(on_cpu)
        self.comm.reduce_scatter(on_cpu, source, op)
        through = self.goes_through_engine(
            self.comm.reduce_scatter, on_gpu.tensor, source.to(DEVICE), op
        )
        assert through == (source.numel() > 0), case
        assert_same(on_gpu.get(case), on_cpu, case)
