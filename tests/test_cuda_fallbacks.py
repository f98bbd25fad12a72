"""CUDA tensors without rota's kernels: fallbacks to host memory and NCCL, and their warnings.

Always on simulated GPUs. These have no symmetric memory, so allowing only that, or forbidding the
other means, leaves no way to join them. They have no NCCL either, so calls that fall back to it end
in NCCL's own error.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import check_error, error_of
from simulated_processes import (
    SimulatedProcesses,
    contribution,
    cuda_runtime,
    init_group,
    sum_of_two,
    values_of,
)

WORLD_SIZE = 2


def check_through_host(comm: rota.Communicator) -> None:
    """Collectives of two ranks that have not joined their GPUs."""
    rank, total = comm.rank, sum_of_two()
    tensor = contribution(rank).cuda()
    comm.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), total)
    tensor = contribution(rank).cuda()
    work = comm.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor.cpu(), total)

    bucket, stats = contribution(rank).cuda(), torch.zeros(2, dtype=torch.float64).cuda()
    comm.reduce_bucket(bucket, stats, wire_dtype=torch.float32, block_scaling=False)
    assert torch.equal(bucket.cpu(), total)
    assert stats.cpu().tolist() == [0.0, total.double().square().sum().item()]

    tensor = contribution(rank).cuda()
    comm.broadcast(tensor, 1)
    assert torch.equal(tensor.cpu(), contribution(1))
    gathered = torch.zeros(2 * len(total)).cuda()
    comm.all_gather(gathered, contribution(rank).cuda())
    assert torch.equal(gathered.cpu(), torch.cat([contribution(0), contribution(1)]))
    assert comm.peer_access == "the host's memory"


def go_through_host(rank: int, store_path: str) -> None:
    init_group(rank, WORLD_SIZE, store_path)
    comm = rota.Communicator()
    check_through_host(comm)
    with pytest.raises(rota.TransportError, match="could not be joined"):
        comm.send(torch.ones(9).cuda(), 1 - rank)
    # torch would attribute a leftover error to its next kernel.
    assert cuda_runtime().cudaPeekAtLastError() == 0


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"ROTA_PEER_MEMORY": "symmetric"}, "libnvidia-ml.so.1 is not found"),
        ({"SIMULATED_GPU_IPC": "0"}, "cudaIpcOpenMemHandle failed"),
    ],
    ids=["no-symmetric-memory", "no-ipc"],
)
def test_gpus_that_cannot_be_joined_go_through_the_host(
    environment: dict[str, str], why: str, processes: SimulatedProcesses, tmp_path: Path
) -> None:
    outcomes = processes.ranks(go_through_host, tmp_path, **environment)
    values_of(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert outcome.stderr.count("go through the host's memory, which is slow") == 1
        assert f"of rank {rank} go" in outcome.stderr
        assert why in outcome.stderr


def connect_with_little_memory(rank: int, store_path: str) -> list[str | None]:
    """Each time, another allocation of pinned memory fails on rank 1."""
    init_group(rank, WORLD_SIZE, store_path)
    means = []
    for number in range(20):
        comm = rota.Communicator()
        if rank == 1:
            cuda_runtime().simulated_gpu_fail_host_allocation(number)
        tensor = contribution(rank).cuda()
        comm.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), sum_of_two())
        means.append(comm.peer_access)
        comm.close()
        if means[-1] != "the host's memory":
            break
    return means


def test_ranks_go_one_way_whichever_allocation_fails_on_one(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    first, second = values_of(
        processes.ranks(connect_with_little_memory, tmp_path, ROTA_GPU_SELF_TEST="never")
    )
    assert first == second
    assert len(first) > 2 and first[-1] == "CUDA IPC"


def refuse_unknown_means(rank: int, store_path: str) -> tuple[str, str]:
    init_group(rank, WORLD_SIZE, store_path)
    return error_of(lambda: rota.Communicator().connect_device(torch.device("cuda", 0)))


def test_unknown_means_are_refused(processes: SimulatedProcesses, tmp_path: Path) -> None:
    outcomes = processes.ranks(refuse_unknown_means, tmp_path, ROTA_PEER_MEMORY="nvlink")
    facts = ("ROTA_PEER_MEMORY is 'nvlink'", "expected auto, symmetric or ipc")
    for error in values_of(outcomes):
        check_error(error, "ValueError", *facts)


def hand_over_to_nccl(rank: int, store_path: str) -> list[str]:
    init_group(rank, WORLD_SIZE, store_path)
    tensor = contribution(rank).cuda()
    parts = [tensor[:1], tensor[1:3]]  # of different lengths
    shard = torch.zeros(rank + 1).cuda()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            # NCCL is not available here: the call must fail in NCCL, not earlier.
            with pytest.raises(dist.DistBackendError, match="NCCL"):
                dist.reduce_scatter(shard, parts)
    dist.all_reduce(tensor)  # rota itself still works
    assert torch.equal(tensor.cpu(), sum_of_two())
    return [str(warning.message) for warning in caught if "rota" in str(warning.message)]


def test_what_has_no_kernel_goes_to_nccl_and_is_said_once(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    for said in values_of(processes.ranks(hand_over_to_nccl, tmp_path)):
        assert len(said) == 1
        assert "rota: reduce_scatter of CUDA tensors runs on NCCL" in said[0]
