"""The demo trains on GPUs, in every variant that it shows there: a small model, a few steps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the demo needs matplotlib")
pytest.importorskip("rich", reason="the demo needs rich")
from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import demo
from demo_model import train_gpt
from on_gpu import DEVICE, LIMIT_S, on_ranks
from ranks import Rank

pytestmark = pytest.mark.torch_kernels
WORLD_SIZE = 2
NUM_STEPS = 3


@on_ranks(WORLD_SIZE, timeout_s=2 * LIMIT_S)
def test_demo_trains_its_variants_on_ranks_that_share_a_gpu(rank: Rank) -> None:
    torch.cuda.set_device(DEVICE)
    rank.init("gloo")
    config = train_gpt.GPTConfig(context=16, num_layers=1, num_heads=2, width=32)
    scale = train_gpt.Scale(config, batch=2, lr=1e-3, max_minutes=1.0)
    train_gpt.SCALES["cuda"] = scale
    args = argparse.Namespace(
        variants=demo.default_variants("gloo"),
        steps=NUM_STEPS,
        batch=scale.batch,
        lr=scale.lr,
        max_minutes=scale.max_minutes,
        seed=0,
    )
    text = torch.arange(20_000).remainder(251).to(torch.uint8)
    runs = demo.train_in_turns(args, text, text, Console(quiet=True), DEVICE)
    results = {name: demo.gather(demo.VARIANTS[name], run) for name, run in runs.items()}
    assert results.pop("none").spread > 0
    for name, result in results.items():
        assert result.spread == 0, name
        assert result.losses == pytest.approx(results["gloo"].losses, rel=0.02), name
