"""The simulated GPU (simulated_gpu.py) orders work like a GPU: streams, events and graphs.

Whether the machine has a real GPU makes no difference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from simulated_processes import cuda_runtime, simulated

NUM_ELEMS = 1 << 14
# How often to try something that fails only at times: about once in three tries if it is wrong.
NUM_TRIALS = 60


# ---- streams and events --------------------------------------------------------------------------


def count_stale_copies(waits: bool) -> int:
    """Counts wrong results of a copy on one stream from a tensor that another stream fills."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.arange(float(NUM_ELEMS)).pin_memory()
    middle, last = (torch.empty(NUM_ELEMS, device="cuda") for _ in range(2))
    num_stale = 0
    for _ in range(NUM_TRIALS):
        middle.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            middle.copy_(source, non_blocking=True)
            event = first.record_event()
        with torch.cuda.stream(second):
            if waits:
                second.wait_event(event)
            last.copy_(middle)
        torch.cuda.synchronize()
        num_stale += not torch.equal(last.cpu(), source)
    return num_stale


@simulated()
def test_streams_are_ordered_by_events_alone() -> None:
    assert count_stale_copies(waits=True) == 0
    assert count_stale_copies(waits=False) > 0


@simulated()
def test_events_tell_when_work_is_done() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    assert end.query()  # never recorded
    begin.record()
    tensor = torch.arange(float(NUM_ELEMS)).pin_memory().to("cuda", non_blocking=True)
    end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    assert tensor.cpu()[-1] == NUM_ELEMS - 1
    for _ in range(NUM_TRIALS):
        end.record()
        end.synchronize()
        assert torch.cuda.current_stream().query()  # the record was its last operation


@simulated()
def test_calls_return_before_the_work_is_done() -> None:
    source = torch.arange(float(NUM_ELEMS)).pin_memory()
    tensor = torch.empty(NUM_ELEMS, device="cuda")
    num_late = 0
    for _ in range(NUM_TRIALS):
        tensor.copy_(source, non_blocking=True)
        num_late += not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
    assert num_late > NUM_TRIALS // 4


@simulated()
def test_default_stream_orders_blocking_streams() -> None:
    """Streams made without cudaStreamNonBlocking wait for the default stream."""
    handle = ctypes.c_void_p()
    assert cuda_runtime().cudaStreamCreate(ctypes.byref(handle)) == 0
    assert handle.value is not None
    stream = torch.cuda.ExternalStream(handle.value)
    source = torch.arange(float(NUM_ELEMS)).pin_memory()
    middle, last = (torch.empty(NUM_ELEMS, device="cuda") for _ in range(2))
    for _ in range(NUM_TRIALS):
        middle.zero_()
        torch.cuda.synchronize()
        middle.copy_(source, non_blocking=True)
        with torch.cuda.stream(stream):
            last.copy_(middle)
        assert torch.equal(last.cpu(), source)  # on the default stream again


# ---- graphs --------------------------------------------------------------------------------------


def count_stale_replays(waits: bool) -> int:
    """Like count_stale_copies, of a graph's replays."""
    first, second, third = (torch.zeros(NUM_ELEMS, device="cuda") for _ in range(3))
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if not waits:
            side.wait_stream(torch.cuda.current_stream())
        second.copy_(first)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            third.copy_(second)
        torch.cuda.current_stream().wait_stream(side)
        second.zero_()
    assert not third.cpu().any()  # capturing runs nothing
    num_stale = 0
    for value in range(1, NUM_TRIALS):
        first.fill_(float(value))
        graph.replay()
        num_stale += not bool((third.cpu() == value).all())
        assert not second.cpu().any()
    return num_stale


@simulated()
def test_graph_orders_nodes_by_edges_alone() -> None:
    assert count_stale_replays(waits=True) == 0
    assert count_stale_replays(waits=False) > 0


@simulated(SIMULATED_GPU_TORCH_OPERATORS="1")
def test_torch_operators_are_captured() -> None:
    tensor = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        next_one = tensor + 1
        tensor.copy_(next_one.double().mul_(2))
    for value in (2.0, 6.0, 14.0):
        graph.replay()
        assert tensor.tolist() == [value] * 3


@simulated()
def test_external_event_is_recorded_by_each_replay() -> None:
    """A stream outside of a graph waits for an event in the middle of the graph."""
    source, target, copy = (torch.zeros(NUM_ELEMS, device="cuda") for _ in range(3))
    event = torch.cuda.Event(external=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
        event.record()
    other = torch.cuda.Stream()
    for value in range(1, NUM_TRIALS):
        source.fill_(float(value))
        graph.replay()
        with torch.cuda.stream(other):
            other.wait_event(event)
            copy.copy_(target)
            assert (copy.cpu() == value).all()
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "message",
    ["cudaDeviceSynchronize", "cudaMalloc", "cudaEventQuery", "unjoined work", "not captured"],
)
@simulated()
def test_capture_refuses_what_cuda_refuses(message: str) -> None:
    tensor = torch.zeros(10, device="cuda")
    side, early = torch.cuda.Stream(), torch.cuda.Event()
    early.record()
    torch.cuda.synchronize()

    def allocate() -> None:
        address = ctypes.c_void_p()
        assert cuda_runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(8)) != 0

    def fork() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.zero_()

    calls: dict[str, Callable[[], object]] = {
        "cudaDeviceSynchronize": torch.cuda.synchronize,
        "cudaMalloc": allocate,
        "cudaEventQuery": early.query,
        "unjoined work": fork,
        "not captured": lambda: torch.cuda.current_stream().wait_event(early),
    }
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        calls[message]()
    torch.cuda.synchronize()
    tensor.zero_()  # the capture has failed, not the device
    assert not tensor.cpu().any()
