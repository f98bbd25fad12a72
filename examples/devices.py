"""Where the demo's ranks compute, and which backend rota is compared with there.

`place` decides from numbers alone; the other functions gather them.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rota import _C

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this host that the demo can use."""

    count: int
    why_none: str = ""  # why there is no GPU
    have_nccl: bool = True


@dataclass(frozen=True)
class Placement:
    """One rank's place; the same on all ranks of a host except for the device's number."""

    device: torch.device
    baseline: str  # the backend that rota is compared with: "gloo" or "nccl"
    note: str  # names both and the reason, for readers of the numbers


def find_gpus(wanted: str) -> Gpus:
    """Counts usable GPUs: "auto" uses them if there are any, "cpu" uses none, and "cuda" requires
    one, or this raises a ValueError."""
    if wanted == "cpu":
        return Gpus(0, "--device cpu")
    if not torch.cuda.is_available():
        gpus = Gpus(0, "torch finds no GPU")
    elif not _C.cuda_archs():
        gpus = Gpus(0, "rota was built without CUDA kernels, see python -m rota doctor")
    else:
        gpus = Gpus(torch.cuda.device_count(), have_nccl=dist.is_nccl_available())
    if wanted == "cuda" and gpus.count == 0:
        raise ValueError(f"--device cuda: {gpus.why_none}; use --device cpu")
    return gpus


def use(device: torch.device) -> None:
    """Makes `device` this process's current device; on a GPU also enables TF32."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")


def default_num_ranks(gpus: Gpus) -> int:
    """One per GPU, but at least two, so that there is a peer to communicate with."""
    return max(2, gpus.count)


def place(local_rank: int, num_local_ranks: int, gpus: Gpus) -> Placement:
    """Where a rank of this host computes, and which baseline can run there.

    One GPU each if there are enough, else ranks share them round-robin. NCCL refuses two ranks on
    one GPU, so the baseline is then Gloo, which goes through the host's memory.
    """
    if gpus.count == 0:
        note = f"{num_local_ranks} ranks on the CPU ({gpus.why_none}); baseline: Gloo"
        return Placement(torch.device("cpu"), "gloo", note)
    device = torch.device("cuda", local_rank % gpus.count)
    if num_local_ranks > gpus.count:
        note = (
            f"{num_local_ranks} ranks share {gpus.count} GPU{'s' * (gpus.count > 1)}, on which "
            f"processes take turns: times say nothing about ranks with a GPU each; baseline: Gloo, "
            f"since NCCL takes one rank per GPU"
        )
        return Placement(device, "gloo", note)
    each = f"{num_local_ranks} ranks, one GPU each"
    if not gpus.have_nccl:
        return Placement(device, "gloo", f"{each}; baseline: Gloo, since this torch has no NCCL")
    return Placement(device, "nccl", f"{each}; baseline: NCCL")


def place_this_rank(gpus: Gpus) -> Placement:
    """`place` of the rank that torchrun started; launchers that set only RANK must use one host."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ["RANK"]
    num_local_ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"]
    return place(int(local_rank), int(num_local_ranks), gpus)
