"""The self-test of a GPU: what it finds, what it records, and that no GPU is joined where it fails.

On simulated GPUs, where the environment names kernels that give wrong results
(simulated_gpu/kernel_faults.h). Calls that then go to NCCL end in NCCL's own error there.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rota
from ranks import error_of
from rota import _C
from simulated_processes import (
    Outcome,
    SimulatedProcesses,
    contribution,
    init_group,
    sum_of_two,
    values_of,
)
from test_cuda_fallbacks import check_through_host

WORLD_SIZE = 2
NUM_ELEMS = 70_001  # auto: two_shot of float32
HANG_S = 10.0  # kHostTimeout of csrc/tensor/cuda/self_test.cpp


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The folder for a test's self-test records; empty at first."""
    return tmp_path / "cache"


def records(cache: Path) -> list[Path]:
    return sorted(cache.glob("*"))


def start(rank: int, store_path: str) -> rota.Communicator:
    if not dist.is_initialized():
        init_group(rank, WORLD_SIZE, store_path, timeout_s=50)
    return rota.Communicator()


def check_all_reduce(
    comm: rota.Communicator, algorithm: str = "auto", num_elems: int = NUM_ELEMS
) -> None:
    tensor = contribution(comm.rank, num_elems).cuda()
    comm.all_reduce(tensor, algorithm=algorithm)
    assert torch.equal(tensor.cpu(), sum_of_two(num_elems))


def run_ranks(
    processes: SimulatedProcesses, function: Callable[..., Any], folder: Path, **env: str
) -> list[Outcome]:
    env.setdefault("ROTA_CACHE_DIR", str(folder / "cache"))
    outcomes = processes.ranks(function, Path(tempfile.mkdtemp(dir=folder)), **env)
    values_of(outcomes)
    return outcomes


def join_twice(rank: int, store_path: str) -> str | None:
    comms = []
    for _ in range(2):
        comms.append(start(rank, store_path))
        check_all_reduce(comms[-1])
    return comms[-1].peer_access


def test_self_test_that_passes_is_silent_and_remembered(
    processes: SimulatedProcesses, tmp_path: Path, cache: Path
) -> None:
    for outcome in run_ranks(processes, join_twice, tmp_path):
        assert outcome.value == "CUDA IPC"
        assert outcome.warnings == []
    [record] = records(cache)
    text = record.read_text()
    assert text.startswith("rota self-test\ngpu simulated GPU ") and text.endswith("\n0 failed\n")
    # With a record, kernels are not tested again, so a kernel that is wrong now goes unnoticed.
    for outcome in run_ranks(
        processes, join_only, tmp_path, SIMULATED_GPU_FLIP_BIT="two_shot_kernel"
    ):
        assert outcome.warnings == []
    assert record.read_text() == text


def join_only(rank: int, store_path: str) -> str | None:
    comm = start(rank, store_path)
    comm.connect_device(torch.device("cuda", 0))
    return comm.peer_access


@pytest.fixture(scope="module")
def passed(processes: SimulatedProcesses, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a self-test that passed, which tests copy."""
    folder = tmp_path_factory.mktemp("passed")
    run_ranks(processes, join_only, folder)
    [record] = records(folder / "cache")
    return record


@pytest.mark.parametrize(
    ("damage", "env"),
    [
        pytest.param(str, {"SIMULATED_GPU_DRIVER_VERSION": "13030"}, id="new-driver"),
        pytest.param(str, {"ROTA_GPU_SELF_TEST": "always"}, id="always"),
        pytest.param(
            lambda text: text.replace(f"build {_C.build_id()}", "build " + 40 * "0"),
            {},
            id="new-build",
        ),
        pytest.param(lambda text: text[:-3], {}, id="cut"),
        pytest.param(lambda text: "", {}, id="empty"),
        pytest.param(lambda text: "".join(map(chr, range(256))), {}, id="binary"),
        pytest.param(None, {}, id="unreadable"),
    ],
)
def test_self_test_runs_again_when_the_record_does_not_hold(
    damage: Callable[[str], str] | None,
    env: dict[str, str],
    processes: SimulatedProcesses,
    passed: Path,
    tmp_path: Path,
    cache: Path,
) -> None:
    cache.mkdir()
    record = Path(shutil.copy(passed, cache))
    whole = record.read_text()
    if damage is not None:
        record.write_text(damage(whole), encoding="latin-1")
    else:
        record.unlink()
        record.mkdir()
    outcomes = run_ranks(
        processes, join_only, tmp_path, SIMULATED_GPU_FLIP_BIT="two_shot_kernel", **env
    )
    for outcome in outcomes:
        assert outcome.value == "the host's memory"
        assert outcome.stderr.count("rota: self-test of simulated GPU") == 1, outcome.stderr
    if damage is not None:
        assert "two_shot" not in whole
        assert "failed" in record.read_text().splitlines()[4]


def test_self_test_where_nothing_can_be_remembered_runs_each_time(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    env = {"ROTA_CACHE_DIR": str(tmp_path / "file" / "cache")}
    for flipped in ("", "two_shot_kernel"):
        env["SIMULATED_GPU_FLIP_BIT"] = flipped
        for outcome in run_ranks(processes, join_only, tmp_path, **env):
            assert outcome.value == ("the host's memory" if flipped else "CUDA IPC")
            assert ("self-test" in outcome.stderr) == bool(flipped)


def get_wrong_bits(rank: int, store_path: str) -> None:
    with pytest.raises(AssertionError):
        check_all_reduce(start(rank, store_path))


def test_self_test_never_runs_if_told_so(
    processes: SimulatedProcesses, tmp_path: Path, cache: Path
) -> None:
    """The wrong kernel, which the self-test would have excluded, is then used."""
    env = {"ROTA_GPU_SELF_TEST": "never", "SIMULATED_GPU_FLIP_BIT": "two_shot_kernel"}
    for outcome in run_ranks(processes, get_wrong_bits, tmp_path, **env):
        assert outcome.warnings == []
    assert records(cache) == []


def call_with_bad_setting(rank: int, store_path: str) -> tuple[str, str]:
    comm = start(rank, store_path)
    return error_of(check_all_reduce, comm)


def test_self_test_setting_that_is_none_is_refused(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    text = "rota: ROTA_GPU_SELF_TEST is 'maybe', expected once, always or never"
    for outcome in run_ranks(
        processes, call_with_bad_setting, tmp_path, ROTA_GPU_SELF_TEST="maybe"
    ):
        assert outcome.value == ("ValueError", text)


def use_with_a_wrong_kernel(rank: int, store_path: str) -> None:
    if rank == 1:
        os.environ["SIMULATED_GPU_FLIP_BIT"] = "two_shot_kernel"
    # One record per rank, as if each had its own GPU.
    os.environ["ROTA_CACHE_DIR"] += f"/{rank}"
    use_the_host(rank, store_path)


def use_the_host(rank: int, store_path: str) -> None:
    comm = start(rank, store_path)
    for num_elems in (100, NUM_ELEMS):
        check_all_reduce(comm, num_elems=num_elems)
    check_all_reduce(comm, algorithm="ring")
    check_through_host(comm)


def test_wrong_kernel_of_one_rank_sends_all_through_the_host(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    for outcome in run_ranks(processes, use_with_a_wrong_kernel, tmp_path):
        [warning] = outcome.warnings
        assert warning.startswith(
            "rota: self-test of simulated GPU (driver CUDA 13.2): two_shot of float32: element 0 "
            "of local rank 0 is 0x"
        ), warning
        assert "(on rank 1)" in warning and "go through the host's memory" in warning


# The two_shot kernel of float16 that sums in groups; other dtypes, and sums in a tree, still work.
FLOAT16 = "two_shot_kernel<rota::cuda::Codec<(rota::DType)2, false>, (rota::cuda::Sums)0>"


@pytest.mark.parametrize(
    "broken",
    [FLOAT16, "shot_kernel", "pack_kernel", "broadcast_kernel", "::o", "all_gather_kernel"],
    ids=["one-format", "shot", "pack", "broadcast", "o", "all_gather"],
)
def test_any_wrong_kernel_sends_everything_through_the_host(
    broken: str, processes: SimulatedProcesses, tmp_path: Path
) -> None:
    for outcome in run_ranks(processes, use_the_host, tmp_path, SIMULATED_GPU_FLIP_BIT=broken):
        [warning] = outcome.warnings
        assert "rota: self-test of simulated GPU" in warning
        if broken == FLOAT16:
            assert "two_shot of float16: element 0" in warning
            assert "more" not in warning.split(" (on rank")[0]


def use_what_the_host_refuses(rank: int, store_path: str) -> None:
    comm = start(rank, store_path)
    shard, whole = torch.zeros(100).cuda(), contribution(rank, 200).cuda()
    with pytest.raises(rota.TransportError, match="reduce_scatter"):
        comm.reduce_scatter(shard, whole)
    with pytest.raises(rota.TransportError, match=r"rota.send: "):
        comm.send(whole, 1 - rank)
    # NCCL is not available here: the calls must fail in NCCL, not earlier.
    with (
        pytest.warns(UserWarning, match="reduce_scatter of CUDA tensors"),
        pytest.raises(dist.DistBackendError, match="NCCL"),
    ):
        dist.reduce_scatter_tensor(shard, whole)
    check_all_reduce(comm)


def test_what_does_not_go_through_the_host_goes_to_nccl_or_is_refused(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    run_ranks(
        processes, use_what_the_host_refuses, tmp_path, SIMULATED_GPU_FLIP_BIT="scatter_kernel"
    )


def go_around_a_hang(rank: int, store_path: str) -> float:
    if rank == 1:
        os.environ.pop("SIMULATED_GPU_HANG", None)
        os.environ.pop("SIMULATED_GPU_DESERT", None)
    started = time.monotonic()
    comm = start(rank, store_path)
    check_all_reduce(comm)
    seconds = time.monotonic() - started
    assert comm.peer_access == "the host's memory"
    again = start(rank, store_path)
    started = time.monotonic()
    check_all_reduce(again)  # not tested again
    assert time.monotonic() - started < HANG_S / 2
    assert again.peer_access == "the host's memory"
    return seconds


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("SIMULATED_GPU_HANG", "ring has not come to an end within 10 s"),
        ("SIMULATED_GPU_DESERT", "ring gave up: rank "),
    ],
    ids=["hang", "deadline"],
)
def test_kernel_that_hangs_on_one_rank_sends_all_through_the_host(
    fault: str, said: str, processes: SimulatedProcesses, tmp_path: Path
) -> None:
    for outcome in run_ranks(processes, go_around_a_hang, tmp_path, **{fault: "cuda::ring_kernel"}):
        assert f"rota: self-test of simulated GPU (driver CUDA 13.2): {said}" in outcome.stderr
        assert "go through the host's memory" in outcome.stderr
        assert outcome.value < 4 * HANG_S


def interrupt_a_hang(rank: int, store_path: str) -> tuple[tuple[str, str], float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 1:
        del os.environ["SIMULATED_GPU_HANG"]
    comm = start(rank, store_path)
    tensor = contribution(rank).cuda()
    started = time.monotonic()
    if rank == 0:
        threading.Timer(HANG_S / 3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return error_of(comm.all_reduce, tensor), time.monotonic() - started


def test_ctrl_c_ends_a_self_test_that_hangs_and_peers_are_told(
    processes: SimulatedProcesses, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        processes, interrupt_a_hang, tmp_path, SIMULATED_GPU_HANG="cuda::low_latency_kernel"
    )
    (own, own_s), (of_peer, peer_s) = values_of(outcomes)
    assert own == ("KeyboardInterrupt", "")
    assert "rank 0 was interrupted in the self-test of its GPU" in of_peer[1]
    assert own_s < HANG_S and peer_s < HANG_S
