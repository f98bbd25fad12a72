"""What the benchmarks run on: a GPU, or what stands in for one in a dry run.

Everything that differs between the two is here and in dry.py, so that benchmarks are the same code
in both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu.clock import Clock, CudaEvents, HostClock

Body = Callable[[], object]


class LocalGroup(Protocol):
    """What benchmarks use of rota.LocalGroup."""

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: str = "sum",
        algorithm: str = "auto",
        group_size: int | None = None,
    ) -> None: ...
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str = "sum"
    ) -> None: ...
    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None: ...
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None: ...
    def send_recv(self, src: int, dst: int, tensors: Sequence[Tensor]) -> None: ...


class GradientBucket(Protocol):
    """What benchmarks use of rota.GradientBucket."""

    wire: Tensor
    stats: Tensor

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_wire_bytes(self) -> int: ...
    def pack(self, *, contribution_factor: float = 1.0) -> None: ...
    def unpack(self, *, result_factor: float = 1.0) -> None: ...


class Target(Protocol):
    """A device, its clock, and rota's entries for it.

    Attributes:
        is_dry: whether times are made up.
        runs_torch_kernels: whether torch itself can compute there; a simulated GPU runs rota's
            kernels, copies and fills.
        l2_bytes: what has to be exceeded for a buffer to come from memory.
    """

    device: torch.device
    clock: Clock
    is_dry: bool
    runs_torch_kernels: bool
    l2_bytes: int

    def synchronize(self) -> None:
        """Waits until everything queued is done."""

    def capture(self, body: Body) -> Body:
        """Records `body` as a graph; what comes back replays it on the current stream."""

    def num_launches(self, body: Body) -> int | None:
        """Kernels that `body` launches; None where that cannot be seen."""

    def local_group(self, world_size: int, timeout_s: float = 10.0) -> LocalGroup: ...
    def gradient_bucket(
        self, gradients: Sequence[Tensor], wire_dtype: torch.dtype, block_scaling: bool | None
    ) -> GradientBucket: ...


class CudaTarget:
    """The first GPU; a simulated one where `is_dry`."""

    def __init__(self, is_dry: bool, runs_torch_kernels: bool) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "torch finds no GPU (torch.cuda.is_available() is False); check nvidia-smi and "
                "that torch is a CUDA build, or try the script with --dry-run"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.is_dry = is_dry
        self.runs_torch_kernels = runs_torch_kernels
        self.clock: Clock = HostClock() if is_dry else CudaEvents()
        self.l2_bytes: int = torch.cuda.get_device_properties(self.device).L2_cache_size

    def synchronize(self) -> None:
        """Waits until the GPU has done everything queued."""
        torch.cuda.synchronize(self.device)

    def capture(self, body: Body) -> Body:
        """As a CUDA graph; other threads may go on calling CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        replay: Body = graph.replay
        return replay

    def num_launches(self, body: Body) -> int | None:
        """As torch's profiler sees them, copies and fills not counted."""
        if self.is_dry:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            body()
            self.synchronize()
        names = [
            event.name
            for event in profile.events() or []
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
        return len(kernels) if names else None

    def local_group(self, world_size: int, timeout_s: float = 10.0) -> LocalGroup:
        """rota's own."""
        import rota

        group: Any = rota
        made: LocalGroup = group.LocalGroup(
            world_size, self.device, timeout=timedelta(seconds=timeout_s)
        )
        return made

    def gradient_bucket(
        self, gradients: Sequence[Tensor], wire_dtype: torch.dtype, block_scaling: bool | None
    ) -> GradientBucket:
        """rota's own."""
        import rota

        bucket: Any = rota
        made: GradientBucket = bucket.GradientBucket(
            list(gradients), wire_dtype=wire_dtype, block_scaling=block_scaling
        )
        return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says where a script runs."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only in a dry run")
    add("--dry-run", action="store_true", help="few calls, small sizes, times made up")
    add(
        "--torch-kernels",
        action="store_true",
        help="in a dry run on cuda: the simulated GPU computes for torch too",
    )


def open_target(args: argparse.Namespace) -> Target:
    """The GPU, or, in a dry run on "cpu", what stands in for it.

    Args:
        args: those of `add_arguments`.

    Raises:
        RuntimeError: there is no such device, or a measurement was asked for on a CPU.
    """
    if args.device == "cuda":
        return CudaTarget(args.dry_run, args.torch_kernels or not args.dry_run)
    if not args.dry_run:
        raise RuntimeError("these benchmarks measure a GPU; only --dry-run runs on --device cpu")
    from gpu.dry import HostTarget

    return HostTarget()
