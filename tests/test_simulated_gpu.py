"""The simulated GPU (simulated_gpu.py) behaves like a GPU: its memory, alone and shared between
processes, and torch's operators on it. Streams and graphs are in test_simulated_streams.py.

Whether the machine has a real GPU makes no difference.
"""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from simulated_processes import SimulatedProcesses, cuda_runtime, simulated

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


# ---- devices and memory --------------------------------------------------------------------------


def describe_devices() -> list[tuple[str, tuple[int, int], str]]:
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(device.name, (device.major, device.minor), str(device.uuid)) for device in devices]


def test_devices_are_as_many_as_asked_for_and_visible(processes: SimulatedProcesses) -> None:
    first, second, third = processes.run(describe_devices, SIMULATED_GPUS="3")
    assert len({first, second, third}) == 3
    assert first[:2] == ("simulated GPU", (9, 0))
    visible = processes.run(describe_devices, SIMULATED_GPUS="3", CUDA_VISIBLE_DEVICES="2,0")
    assert visible == [third, first]
    assert processes.run(describe_devices, CUDA_VISIBLE_DEVICES="") == []


@simulated()
def test_tensors_of_every_dtype_come_back() -> None:
    assert torch.empty(1000, device="cuda").cpu().isnan().all()  # memory that was never written
    for dtype in DTYPES:
        there = (torch.arange(1000) % 7).to(dtype)
        on_device = there.to("cuda")
        assert on_device.is_cuda
        assert torch.equal(on_device.cpu(), there)
        assert torch.equal(on_device.clone().cpu(), there)
        assert not torch.zeros(1000, dtype=dtype, device="cuda").cpu().any()
        assert torch.full((9,), 1, dtype=dtype, device="cuda").cpu().tolist() == [1] * 9


@simulated(SIMULATED_GPUS="2")
def test_copies_between_devices_arrive() -> None:
    there = torch.arange(1000.0)
    assert torch.cuda.can_device_access_peer(0, 1)
    on_second = there.to("cuda:0").to("cuda:1")
    assert on_second.device.index == 1
    assert torch.equal(on_second.cpu(), there)


def write_behind(num_bytes: int, offset: int) -> None:
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ctypes.memset(tensor.data_ptr() + offset, 0, 1)
    del tensor


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        pytest.param(999, "", id="last-byte"),
        pytest.param(1000, "1000 bytes from the start of an allocation of 1000", id="next-byte"),
        pytest.param(-1, "-1 bytes from the start", id="byte-before"),
        pytest.param(1024, "byte 1024 of an allocation of 1000", id="next-page"),
    ],
)
def test_write_outside_of_allocation_is_found(
    processes: SimulatedProcesses, offset: int, message: str
) -> None:
    [outcome] = processes.outcomes(
        [(write_behind, (1000, offset))], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    assert message in outcome.stderr
    assert (outcome.error is None) == (message == "")


@simulated()
def test_memory_ends() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")


@simulated()
def test_host_memory_is_mapped_where_it_was_allocated_so() -> None:
    runtime = cuda_runtime()
    on_host, on_device = ctypes.c_void_p(), ctypes.c_void_p()
    mapped = 2  # cudaHostAllocMapped
    assert runtime.cudaHostAlloc(ctypes.byref(on_host), ctypes.c_size_t(64), mapped) == 0
    assert runtime.cudaHostGetDevicePointer(ctypes.byref(on_device), on_host, 0) == 0
    assert on_device.value is not None
    own = ctypes.create_string_buffer(64)
    assert runtime.cudaHostGetDevicePointer(ctypes.byref(on_device), own, 0) != 0
    assert torch.empty(10).pin_memory().is_pinned()
    assert not torch.empty(10).is_pinned()


# ---- torch's operators ---------------------------------------------------------------------------


@simulated()
def test_kernel_of_torch_fails_by_name() -> None:
    tensor = torch.zeros(10, device="cuda")
    with pytest.raises(RuntimeError, match=r"CUDAFunctor_add<float>") as raised:
        tensor.add_(tensor)
    assert "operation not supported" in str(raised.value)
    assert torch.equal(tensor.cpu(), torch.zeros(10))  # nothing is broken


# ---- processes -----------------------------------------------------------------------------------


@simulated()
def test_forked_child_is_refused() -> None:
    torch.zeros(1, device="cuda")
    pid = os.fork()
    if pid == 0:
        is_refused = cuda_runtime().cudaDeviceSynchronize() == 3  # cudaErrorInitializationError
        os._exit(0 if is_refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


def share_and_free(path: str) -> None:
    """Frees memory that the other process has mapped, read and written."""
    runtime, handle = cuda_runtime(), IpcHandle()
    tensor = torch.arange(1000.0).to("cuda")
    torch.cuda.synchronize()
    address, own = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p()
    assert runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address) == 0
    assert runtime.cudaIpcOpenMemHandle(ctypes.byref(own), handle, 1) != 0
    with open(path, "wb") as file:
        file.write(bytes(handle))
    with open(path + ".done"):
        pass
    assert tensor.cpu()[0] == 5.0
    del tensor
    with open(path, "wb"):
        return


def map_and_use(path: str, what: str) -> None:
    """Writes to or unmaps the memory once it is freed."""
    torch.zeros(1, device="cuda")  # a process that maps memory also has its own
    handle, address = IpcHandle(), ctypes.c_void_p()
    with open(path, "rb") as file:
        ctypes.memmove(ctypes.byref(handle), file.read(64), 64)
    lazy_peer_access = 1
    runtime = cuda_runtime()
    assert runtime.cudaIpcOpenMemHandle(ctypes.byref(address), handle, lazy_peer_access) == 0
    assert address.value is not None
    floats = (ctypes.c_float * 1000).from_address(address.value)
    assert floats[999] == 999.0
    floats[0] = 5.0
    with open(path + ".done", "w"):
        pass
    with open(path, "rb"):
        pass  # it is freed
    if what == "write":
        ctypes.memset(address, 0, 1)
    assert runtime.cudaIpcCloseMemHandle(address) == 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("write", "byte 0 of an allocation of 4000 bytes that its process has freed"),
        ("unmap", "another process has freed its 4000 bytes while they were mapped"),
    ],
)
def test_processes_map_each_others_memory_and_use_once_it_is_freed_is_found(
    what: str, message: str, processes: SimulatedProcesses, tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "handle")
    for fifo in (path, path + ".done"):
        os.mkfifo(fifo)
    calls = [(share_and_free, (path,)), (map_and_use, (path, what))]
    owner, user = processes.outcomes(calls, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert owner.error is None, owner.error
    assert (user.error is None) == (what == "unmap"), user.error
    assert message in user.stderr
