"""rota's kernels run on the simulated GPU (simulated_gpu.py), through torch, as on a real one.

Whether the machine has a real GPU makes no difference. tests/gpu, which also runs on simulated
GPUs, tests what the kernels compute.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import check_error, error_of
from rota.gpu import LocalGroup
from simulated_processes import SimulatedProcesses, cuda_runtime, init_group, simulated

WORLD_SIZE = 4


@simulated()
def test_every_kernel_of_rota_can_run() -> None:
    num_registered, num_known = ctypes.c_int(), ctypes.c_int()
    cuda_runtime().simulated_gpu_count_kernels(
        ctypes.byref(num_registered), ctypes.byref(num_known)
    )
    assert num_known.value == num_registered.value > 100


def make_contributions(num_elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor per rank; their sums are exact."""
    generator = torch.Generator().manual_seed(num_elems)
    return [
        torch.randint(-9, 10, (num_elems,), generator=generator).to(dtype)
        for _ in range(WORLD_SIZE)
    ]


def types_of_captured_nodes(body: Callable[[], object]) -> list[int]:
    """cudaGraphNodeType of each node in a graph captured from `body`."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    runtime = cuda_runtime()
    handle, num_nodes = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(handle, None, ctypes.byref(num_nodes)) == 0
    nodes = (ctypes.c_void_p * num_nodes.value)()
    assert runtime.cudaGraphGetNodes(handle, nodes, ctypes.byref(num_nodes)) == 0
    types = (ctypes.c_int * num_nodes.value)()
    for i, node in enumerate(nodes):
        found = ctypes.byref(types, i * ctypes.sizeof(ctypes.c_int))
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), found) == 0
    return sorted(types)


KERNEL, WAIT, RECORD = 0, 6, 7  # cudaGraphNodeType


@simulated()
def test_all_ranks_of_one_process_are_one_kernel() -> None:
    group = LocalGroup(WORLD_SIZE, device="cuda", num_channels=2)
    tensors = [contribution.to("cuda") for contribution in make_contributions(1000, torch.float32)]
    group.all_reduce(tensors)

    def three_times() -> None:
        for _ in range(3):
            group.all_reduce(tensors)

    assert types_of_captured_nodes(three_times) == [KERNEL] * 3 + [WAIT, RECORD]


@simulated()
def test_bucket_is_three_launches() -> None:
    """pack, the all-reduce and unpack, without launches that prepare memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    communicator = rota.Communicator()
    bucket = torch.ones(5000).to("cuda")
    stats = torch.zeros(2, dtype=torch.float64).to("cuda")

    def reduce() -> None:
        communicator.reduce_bucket(
            bucket, stats, wire_dtype=torch.float16, block_scaling=True, divisor=1.0
        )

    reduce()  # joins the GPUs
    assert types_of_captured_nodes(reduce) == [KERNEL] * 3 + [WAIT, RECORD]


@pytest.mark.parametrize("is_captured", [False, True], ids=["direct", "captured"])
@simulated(SIMULATED_GPU_MULTIPROCESSORS=str(WORLD_SIZE))
def test_two_groups_that_each_fill_the_device_do_not_hold_each_other_up(is_captured: bool) -> None:
    """If half of each grid were resident, both would wait for blocks that never start. Each has its
    own stream; two_shot, because two_shot_in_place never waits."""
    limit = timedelta(seconds=2)
    groups = [LocalGroup(WORLD_SIZE, device="cuda", timeout=limit) for _ in range(2)]
    assert [group.num_channels for group in groups] == [1, 1]
    contributions = make_contributions(1000, torch.float32)
    sources = [contribution.to("cuda") for contribution in contributions]
    tensors = [[torch.empty_like(source) for source in sources] for _ in groups]
    side = torch.cuda.Stream()

    def reduce_in_both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        for group, own, stream in zip(
            groups, tensors, (torch.cuda.current_stream(), side), strict=True
        ):
            with torch.cuda.stream(stream):
                for tensor, source in zip(own, sources, strict=True):
                    tensor.copy_(source)
                group.all_reduce(own, algorithm="two_shot")
        torch.cuda.current_stream().wait_stream(side)

    reduce_in_both()  # loads kernels
    graph = torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph):
            reduce_in_both()
    for _ in range(40):
        if is_captured:
            graph.replay()
        else:
            reduce_in_both()
        for own in tensors:
            for tensor in own:
                assert torch.equal(tensor.cpu(), sum(contributions))


@simulated(SIMULATED_GPU_COOPERATIVE_LAUNCH="0")
def test_local_group_refuses_a_gpu_that_starts_no_grid_as_a_whole() -> None:
    with pytest.raises(ValueError, match="cooperative"):
        LocalGroup(WORLD_SIZE, device="cuda")


# ---- memory and streams that end -----------------------------------------------------------------


class Gate:
    """Holds up what is queued on a stream behind it until it is opened."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._pass = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._wait)

    def _wait(self, _: int | None) -> None:
        self._is_open.wait()

    def put_on(self, stream: int) -> None:
        assert cuda_runtime().cudaLaunchHostFunc(ctypes.c_void_p(stream), self._pass, None) == 0

    def open(self) -> None:
        self._is_open.set()


def look_for_overflow(rank: int, store_path: str) -> tuple[str, str]:
    """Rank 1 dies while rank 0 waits for what the fused hook finds in the gradients of both."""
    init_group(rank, 2, store_path)
    parameter = torch.nn.Parameter(torch.ones(3000, device="cuda"))
    parameter.grad = torch.zeros(3000, device="cuda")
    state = rota.HookState()
    rota.reduce_gradients([parameter], state)
    assert not state.found_inf

    def reduce() -> None:
        rota.reduce_gradients([parameter], state)
        if rank == 1:
            time.sleep(0.5)  # rank 0 waits by now
            os.kill(os.getpid(), signal.SIGKILL)
        assert not state.found_inf, "took a failure for an overflow"

    gate = Gate()
    if rank == 1:
        gate.put_on(torch.cuda.current_stream().cuda_stream)
    return error_of(reduce)


def test_failure_of_a_peer_is_no_overflow_of_gradients(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    first, _ = processes.ranks(look_for_overflow, tmp_path, SIMULATED_GPU_TORCH_OPERATORS="1")
    assert first.error is None, first.error
    check_error(first.value, "PeerFailed")


def make_stream() -> int:
    handle = ctypes.c_void_p()
    assert cuda_runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    assert handle.value is not None
    return handle.value


@simulated()
def test_stream_with_the_handle_of_a_destroyed_one_waits_for_that() -> None:
    group = LocalGroup(WORLD_SIZE, device="cuda", num_channels=2)
    first, second = ([torch.ones(1000).to("cuda") for _ in range(WORLD_SIZE)] for _ in range(2))
    group.all_reduce([torch.ones(1000).to("cuda") for _ in range(WORLD_SIZE)])  # loads kernels
    torch.cuda.synchronize()
    gate, handle = Gate(), make_stream()
    gate.put_on(handle)
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        group.all_reduce(first)
    assert cuda_runtime().cudaStreamDestroy(ctypes.c_void_p(handle)) == 0  # its work goes on
    others = []
    while (again := make_stream()) != handle:
        others.append(again)
        assert len(others) < 1000
    stream = torch.cuda.ExternalStream(again)
    with torch.cuda.stream(stream):
        group.all_reduce(second)
        done = stream.record_event()
    time.sleep(0.2)  # far longer than a sum takes
    assert not done.query(), "did not wait for the stream that had the handle before"
    gate.open()
    torch.cuda.synchronize()
    for tensor in (*first, *second):
        assert tensor.cpu().eq(WORLD_SIZE).all()


@simulated(SIMULATED_GPU_MEMORY_MIB="256")
def test_memory_of_a_list_that_fails_midway_is_kept_until_its_work_is_done() -> None:
    """The second tensor of a list is too long for its packed copy."""
    dist.init_process_group("rota", store=dist.HashStore(), rank=0, world_size=1)
    first = torch.ones(1000).to("cuda")
    dist.all_reduce(first)
    second = torch.empty(2 * 25 << 20, device="cuda")[::2]
    gate = Gate()
    gate.put_on(torch.cuda.current_stream().cuda_stream)
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = True
    error = error_of(dist.group.WORLD.allreduce_coalesced, [first, second], options)
    check_error(error, "OutOfMemoryError", "out of memory")
    address = first.data_ptr()
    del first
    assert torch.empty(1000, device="cuda").data_ptr() != address, "the first sum may still run"
    gate.open()
    torch.cuda.synchronize()


@simulated()
def test_graph_of_a_group_that_is_gone_touches_no_freed_memory() -> None:
    """Algorithms that need the group's memory."""
    contributions = make_contributions(300, torch.float32)
    for algorithm in ("low_latency", "one_shot", "two_shot", "ring"):
        group = LocalGroup(WORLD_SIZE, device="cuda", num_channels=2)
        tensors = [contribution.to("cuda") for contribution in contributions]
        group.all_reduce(tensors, algorithm=algorithm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group.all_reduce(tensors, algorithm=algorithm)
        num_free = torch.cuda.mem_get_info()[0]
        del group
        assert torch.cuda.mem_get_info()[0] == num_free
        graph.replay()
        for tensor in tensors:
            assert tensor.cpu().isnan().all()
        del graph
        gc.collect()
        LocalGroup(WORLD_SIZE, device="cuda", num_channels=2)
        assert torch.cuda.mem_get_info()[0] > num_free, "what the graph has kept is not freed"


# ---- the interpreter's lock ----------------------------------------------------------------------


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def run_python(_: int | None) -> None:
    time.sleep(0.1)


def queue_python() -> None:
    """Queues a host function that needs the interpreter's lock on the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert cuda_runtime().cudaLaunchHostFunc(stream, run_python, None) == 0


def connect_behind_python() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    communicator = rota.Communicator()
    tensor = torch.ones(1000, device="cuda")
    queue_python()
    communicator.all_reduce_future(tensor, "sum", None).wait()


def drop_local_group_behind_python() -> None:
    group = LocalGroup(WORLD_SIZE, device="cuda")
    tensors = [torch.ones(1000).to("cuda") for _ in range(WORLD_SIZE)]
    group.all_reduce(tensors)
    queue_python()
    group.all_reduce(tensors)
    del group


@pytest.mark.parametrize("wait", [connect_behind_python, drop_local_group_behind_python])
@simulated()
def test_nobody_waits_for_the_gpu_with_the_lock_of_the_interpreter(
    wait: Callable[[], None],
) -> None:
    """Earlier work on the GPU may need the lock: a callback, or an operator's last reference."""
    wait()
