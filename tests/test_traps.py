"""What backends of third parties are known to get wrong, each with the thread that reports it.

Rows that other tests cover:
- split_group, coalescing, get_error, set_timeout: test_backend_methods.py
- coalesced send and recv, pipelines that pop one work of many (pytorch#132644, pytorch#152938):
  test_backend_methods.py, test_training_stacks.py
- tags (pytorch#109401): test_send_recv.py; both ranks send first, or recv first, more than a link
  holds (torchcomms#2885, torchcomms#2992): test_random_messages.py
- who shares a host (ROTA_HOST_ID): test_init.py; two groups over one store: test_backend.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import Rank, Ranks, check_error, error_of, on_ranks
from several_hosts import default_group

CPU = torch.device("cpu")


def reduced(value: float, group: Any = None) -> float:
    dist.all_reduce(tensor := torch.full((3,), value), group=group)
    return tensor[-1].item()


@on_ranks(4)
def test_nested_mesh_of_a_group_with_a_bound_device_splits(rank: Rank) -> None:
    """pytorch#186548"""
    rank.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = mesh["inner"]._unflatten(0, (2, 1), ("left", "right"))
    # torch binds and splits groups only where there is a GPU, so this process claims to have one.
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: CPU
    default_group().bound_device_id = torch.device("cuda:0")
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    half.bound_device_id = torch.device("cuda:0")
    alone = dist.split_group(half, split_ranks=[[0], [1]])
    groups = [
        mesh["outer"].get_group(),
        mesh["inner"].get_group(),
        mesh["outer", "inner"]._flatten("all").get_group(),
        inner["left"].get_group(),
        inner["right"].get_group(),
        half,
        alone,
    ]
    result = [reduced(float(rank.rank), group) for group in groups]
    assert (
        result
        == [
            [2.0, 1.0, 6.0, 1.0, 0.0, 1.0, 0.0],
            [4.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0],
            [2.0, 5.0, 6.0, 5.0, 2.0, 5.0, 2.0],
            [4.0, 5.0, 6.0, 5.0, 3.0, 5.0, 3.0],
        ][rank.rank]
    )


@on_ranks(2)
def test_methods_that_rota_lacks_raise_and_name_it(rank: Rank) -> None:
    """torch-xpu-ops#5385, #2659, #5071, #3305, #3376"""
    rank.init()
    group = default_group()
    backend = group._get_backend(CPU)
    assert backend.options.backend == "rota"
    group.set_timeout(timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.get_error().name == "SUCCESS"
    calls: dict[str, Callable[[], object]] = {
        "suspend": lambda: backend.suspend(),
        "resume": lambda: backend.resume(),
        "memory_stats": lambda: backend.memory_stats(),
        "shrink": lambda: backend.shrink([1]),
        "mem_allocator": lambda: backend.mem_allocator,
    }
    of_this_torch = [call for name, call in calls.items() if hasattr(type(backend), name)]
    for call in (*of_this_torch, lambda: group._register_on_completion_hook(print)):
        check_error(error_of(call), "RuntimeError", "rota")
    assert reduced(1.0) == 2.0  # the group still works


@pytest.mark.parametrize("method", ["abort", "shutdown"])
@on_ranks(2)
def test_call_after_abort_or_shutdown_raises(rank: Rank, method: str) -> None:
    """torch-xpu-ops#5385"""
    rank.init()
    backend = default_group()._get_backend(CPU)
    assert reduced(1.0) == 2.0
    if method == "shutdown" or rank.rank == 0:  # one rank's abort ends the wait of the other
        getattr(backend, method)()
    kind, text = error_of(reduced, 1.0)
    expected = {"abort": "rank 0 aborted", "shutdown": "closed"}[method]
    assert kind in ("RotaError", "PeerFailed") and expected in text, text


@on_ranks(2)
def test_inference_mode_reaches_the_threads_that_write_results(rank: Rank) -> None:
    """pytorch#86830. Strided tensors, which the thread that does the work copies back."""
    rank.init()
    peer = 1 - rank.rank
    with torch.inference_mode():
        tensor = torch.full((4, 6), float(rank.rank + 1))
        dist.all_reduce(tensor[:, ::2], async_op=True).wait()
        dist.all_reduce(tensor[:, ::2])
        sparse = torch.eye(3).to_sparse()
        dist.all_reduce(sparse, async_op=True).wait()
        assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
        assert tensor[:, ::2].eq(6).all() and tensor[:, 1::2].eq(rank.rank + 1).all()
        outputs = torch.zeros(2, 4, 6)
        parts = [outputs[number, :, ::2] for number in range(2)]
        dist.all_gather(parts, torch.full((4, 3), float(rank.rank)), async_op=True).wait()
        assert outputs[1, :, ::2].eq(1).all()
        works = [dist.irecv(tensor[:, ::2], peer), dist.isend(outputs[rank.rank, :, ::2], peer)]
        for work in works:
            work.wait()
        assert tensor[:, ::2].eq(peer).all()


@on_ranks(2)
def test_group_of_rota_and_another_backend_runs_cpu_tensors_and_objects_on_rota(
    rank: Rank,
) -> None:
    """pytorch#187467"""
    rank.init("cpu:rota,cuda:gloo")  # stands for NCCL, which makes no group without a GPU
    group = default_group()
    assert group._get_backend(CPU).name() == "rota"
    gathered: list[Any] = [None] * 2
    dist.all_gather_object(gathered, rank.rank)
    sent = [f"from {rank.rank}"]
    dist.broadcast_object_list(sent, 1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank.rank == 0 else None, 0)
    dist.barrier()
    subgroup = dist.new_group([0, 1])
    assert [gathered, sent, scattered] == [[0, 1], ["from 1"], ["ab"[rank.rank]]]
    assert [reduced(1.0), reduced(2.0, subgroup)] == [2.0, 4.0]
    assert group._get_backend(CPU)._get_sequence_number_for_group() > 5
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the group can be made")
@on_ranks(1)
def test_rota_beside_nccl_without_a_gpu_raises_torchs_error(rank: Rank) -> None:
    kind, text = error_of(rank.init, "cpu:rota,cuda:nccl")
    assert kind in ("RuntimeError", "ValueError") and "NCCL" in text, text


@pytest.mark.parametrize("local_world_size", ["1", "2", "16"])
@on_ranks(2)
def test_local_world_size_does_not_say_who_shares_a_host(rank: Rank, local_world_size: str) -> None:
    """gloo#458"""
    os.environ |= {"LOCAL_WORLD_SIZE": local_world_size, "LOCAL_RANK": "0"}
    rank.init()
    assert reduced(float(rank.rank + 1)) == 3.0


def reduce_often(rank: Rank) -> float:
    rank.init()
    rank.tell()
    rank.hear()
    return [reduced(float(rank.rank + 1)) for _ in range(50)][-1]


def test_two_jobs_at_once_share_no_memory() -> None:
    """vllm#33628, vllm#34169, vllm#40150; both have the same names of groups and the same ranks"""
    names = set(os.listdir("/dev/shm"))
    with Ranks(2, reduce_often) as first, Ranks(3, reduce_often) as second:
        for job in (first, second):
            job.hear_all()
        assert not [name for name in set(os.listdir("/dev/shm")) - names if "rota" in name]
        for job in (first, second):
            job.tell_all()
        assert first.results() == [3.0] * 2
        assert second.results() == [6.0] * 3
