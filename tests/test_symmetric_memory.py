"""GPUs joined by torch's symmetric memory: simulated GPUs with a simulated allocator.

Like torch's own, the allocator looks the process group up by name in c10d's registry, which holds
weak references.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import _resolve_process_group

import rota
from simulated_processes import SimulatedProcesses, init_group

WORLD_SIZE = 3
NUM_ELEMS = 1000


def reduce_over_symmetric_memory(rank: int, store_path: str) -> None:
    init_group(rank, WORLD_SIZE, store_path)
    contributions = [torch.arange(NUM_ELEMS) * (peer + 1.0) for peer in range(WORLD_SIZE)]
    for number in range(2):
        name = f"rota/{number}"
        comm = rota.Communicator()
        tensor = contributions[rank].cuda()
        comm.all_reduce(tensor)
        assert comm.peer_access == "torch's symmetric memory"
        assert torch.equal(tensor.cpu(), sum(contributions))
        group = _resolve_process_group(name)
        assert (group.rank(), group.size()) == (rank, WORLD_SIZE)
        del group
        comm.close()
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            _resolve_process_group(name)


@pytest.mark.parametrize("means", ["symmetric", "auto"])
def test_gpus_are_joined_by_symmetric_memory(
    means: str, processes: SimulatedProcesses, tmp_path: Path
) -> None:
    calls = [(reduce_over_symmetric_memory, (rank, f"{tmp_path}/store")) for rank in range(3)]
    processes.run_together(calls, ROTA_PEER_MEMORY=means, SIMULATED_GPU_SYMMETRIC_MEMORY="1")
