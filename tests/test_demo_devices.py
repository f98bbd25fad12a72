"""The demo's choice of devices and baseline, for made-up hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from devices import Gpus, default_num_ranks, find_gpus, place
from train_gpt import StepTimer


def _devices(num_ranks: int, gpus: Gpus) -> list[str]:
    return [str(place(rank, num_ranks, gpus).device) for rank in range(num_ranks)]


def test_place_without_gpu_is_the_cpu_beside_gloo() -> None:
    gpus = Gpus(0, "torch finds no GPU")
    assert default_num_ranks(gpus) == 2
    assert _devices(3, gpus) == ["cpu"] * 3
    placement = place(1, 2, gpus)
    assert placement.baseline == "gloo"
    assert placement.note == "2 ranks on the CPU (torch finds no GPU); baseline: Gloo"


def test_place_with_one_gpu_is_shared_and_says_so() -> None:
    gpus = Gpus(1)
    assert default_num_ranks(gpus) == 2
    assert _devices(2, gpus) == ["cuda:0", "cuda:0"]
    placement = place(1, 2, gpus)
    assert placement.baseline == "gloo"
    assert placement.note.startswith("2 ranks share 1 GPU, on which processes take turns: ")
    assert placement.note.endswith("baseline: Gloo, since NCCL takes one rank per GPU")


@pytest.mark.parametrize("num_gpus", (2, 4, 8))
def test_place_with_a_gpu_each_is_beside_nccl(num_gpus: int) -> None:
    gpus = Gpus(num_gpus)
    assert default_num_ranks(gpus) == num_gpus
    assert _devices(num_gpus, gpus) == [f"cuda:{index}" for index in range(num_gpus)]
    placement = place(0, num_gpus, gpus)
    assert placement.baseline == "nccl"
    assert placement.note == f"{num_gpus} ranks, one GPU each; baseline: NCCL"


def test_place_with_fewer_ranks_than_gpus_leaves_some_idle() -> None:
    assert _devices(1, Gpus(2)) == ["cuda:0"]
    assert place(0, 1, Gpus(2)).baseline == "nccl"


def test_place_with_too_few_gpus_spreads_the_ranks() -> None:
    assert _devices(5, Gpus(2)) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    placement = place(4, 5, Gpus(2))
    assert placement.baseline == "gloo"
    assert placement.note.startswith("5 ranks share 2 GPUs, ")


def test_place_without_nccl_is_beside_gloo() -> None:
    placement = place(1, 2, Gpus(2, have_nccl=False))
    assert (str(placement.device), placement.baseline) == ("cuda:1", "gloo")
    assert placement.note.endswith("baseline: Gloo, since this torch has no NCCL")


def test_find_gpus_on_request_for_the_cpu_finds_none() -> None:
    assert find_gpus("cpu") == Gpus(0, "--device cpu")


def test_find_gpus_where_there_is_none_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_gpus("auto") == Gpus(0, "torch finds no GPU")
    with pytest.raises(ValueError, match="torch finds no GPU; use --device cpu"):
        find_gpus("cuda")


@pytest.mark.parametrize("archs", ([], ["sm_90"]))
def test_find_gpus_takes_them_if_rota_has_kernels(
    archs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("rota._C.cuda_archs", lambda: archs)
    gpus = find_gpus("auto")
    assert gpus.count == (3 if archs else 0)
    assert ("built without CUDA kernels" in gpus.why_none) == (not archs)


class _FakeStream:
    """Fake CUDA events and synchronize on a stream whose clock the test sets."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.done_ms = 0.0  # work up to this time has been waited for

    def synchronize(self, device: torch.device) -> None:
        self.done_ms = self.now_ms

    def event(self, *, enable_timing: bool) -> _FakeEvent:
        assert enable_timing
        return _FakeEvent(self)


class _FakeEvent:
    def __init__(self, stream: _FakeStream) -> None:
        self._stream = stream

    def record(self) -> None:
        self.at_ms = self._stream.now_ms

    def elapsed_time(self, end: _FakeEvent) -> float:
        assert end.at_ms <= self._stream.done_ms, "torch raises for events that are not done"
        return end.at_ms - self.at_ms


def test_step_timer_on_gpu_times_events_once_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.synchronize)
    timer = StepTimer(torch.device("cuda", 1))
    for _ in range(2):  # the second turn must not be affected by the first
        timer.start()
        for step_ms in (3.0, 5.0):
            stream.now_ms += step_ms
            timer.mark()
        assert timer.step_ms() == [3.0, 5.0]
        stream.now_ms += 100.0


def test_step_timer_on_cpu_has_one_time_per_step() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    timer.mark()
    timer.mark()
    assert len(timer.step_ms()) == 2
