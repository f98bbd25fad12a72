"""The demo's choice of devices and baseline, for made-up hosts."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from devices import Gpus, default_num_ranks, find_gpus, place
from train_gpt import StepTimer

ON_CPU = "2 ranks on the CPU (torch finds no GPU); baseline: Gloo"
ONE_EACH = "{} ranks, one GPU each; baseline: NCCL"


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "devices", "baseline", "note"),
    [
        (Gpus(0, "torch finds no GPU"), 2, ["cpu"] * 2, "gloo", ON_CPU),
        (
            Gpus(1),
            2,
            [0, 0],
            "gloo",
            "2 ranks share 1 GPU, on which processes take turns: * one rank per GPU",
        ),
        *((Gpus(n), n, list(range(n)), "nccl", ONE_EACH.format(n)) for n in (2, 4, 8)),
        (Gpus(2), 1, [0], "nccl", "*"),
        (Gpus(2), 5, [0, 1, 0, 1, 0], "gloo", "5 ranks share 2 GPUs, *"),
        (
            Gpus(2, have_nccl=False),
            2,
            [0, 1],
            "gloo",
            "*baseline: Gloo, since this torch has no NCCL",
        ),
    ],
)
def test_place_gives_devices_in_turn_and_says_what_rota_is_compared_with(
    gpus: Gpus, num_ranks: int, devices: list[int | str], baseline: str, note: str
) -> None:
    places = [place(rank, num_ranks, gpus) for rank in range(num_ranks)]
    assert [one.device for one in places] == [
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        for device in devices
    ]
    assert {one.baseline for one in places} == {baseline}
    assert fnmatch(places[-1].note, note)


def test_default_is_a_rank_for_each_gpu_but_at_least_two() -> None:
    assert [default_num_ranks(Gpus(count)) for count in (0, 1, 2, 4, 8)] == [2, 2, 2, 4, 8]


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
