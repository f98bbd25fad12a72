"""Engines for CUDA tensors between hosts: NCCL, or Gloo in its place, as a backend for CUDA alone
that copies tensors to the host's memory and back by itself.

ROTA_TEST_NCCL=1 chooses NCCL. It refuses two ranks of one host on one GPU, so each rank tells it
that it is on a host of its own; their data goes through sockets, whatever the hosts of the test.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

STAND_IN = "device_gloo"
IS_NCCL = os.environ.get("ROTA_TEST_NCCL") == "1"
# Ends waits for a rank that has gone.
_TIMEOUT = timedelta(seconds=20)
# Otherwise torch's watchdog waits a minute after a lost connection, in which destroying the group
# blocks, then ends the process.
_NCCL_LEAVES_THE_PROCESS_ALONE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def _make(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)


def make_engine(*, for_cpu: bool = False) -> dist.ProcessGroup:
    """A new group of all ranks with NCCL for CUDA, or what stands in for it; for the CPU it has
    Gloo or none."""
    if STAND_IN not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAND_IN, _make, devices=["cuda"])
    if IS_NCCL:
        os.environ |= {"NCCL_HOSTID": f"rank {dist.get_rank()}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= _NCCL_LEAVES_THE_PROCESS_ALONE
    backend = "cuda:nccl" if IS_NCCL else f"cuda:{STAND_IN}"
    group: dist.ProcessGroup = dist.new_group(
        backend=f"cpu:gloo,{backend}" if for_cpu else backend, timeout=_TIMEOUT
    )
    return group


def num_exchanges(group: dist.ProcessGroup) -> int:
    """How many collectives of CUDA tensors the group has carried."""
    number: int = group._get_backend(torch.device("cuda"))._get_sequence_number_for_group()
    return number


def fake_engine(rank: int, world_size: int, *, raises: bool = False) -> dist.ProcessGroup:
    """A group for CUDA whose works are done at once and write nothing, or whose collectives
    raise."""
    options = FakeProcessGroup.Options()
    options.error_on_collective = raises
    backend = FakeProcessGroup._create_internal(rank, world_size, options)
    group = dist.ProcessGroup(FakeStore(), rank, world_size)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group
