"""The demo's choice of devices and baseline, for made-up hosts."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
import torch
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


@pytest.mark.parametrize(
    ("wanted", "has_gpus", "archs", "found"),
    [
        ("cpu", True, ["sm_90"], Gpus(0, "--device cpu")),
        ("auto", False, [], Gpus(0, "torch finds no GPU")),
        ("auto", True, [], Gpus(0, "rota was built without CUDA kernels, see *")),
        ("auto", True, ["sm_90"], Gpus(3)),
    ],
)
def test_find_gpus_takes_them_if_rota_has_kernels(
    wanted: str, has_gpus: bool, archs: list[str], found: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("rota._C.cuda_archs", lambda: archs)
    gpus = find_gpus(wanted)
    assert gpus.count == found.count and fnmatch(gpus.why_none, found.why_none)
    if wanted == "auto" and not has_gpus:
        with pytest.raises(ValueError, match="torch finds no GPU; use --device cpu"):
            find_gpus("cuda")


def test_step_timer_on_cpu_has_one_time_per_step() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    timer.mark()
    timer.mark()
    assert len(timer.step_ms()) == 2
