"""The examples that have no other test of their own run, and say what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from programs import run_python

pytestmark = pytest.mark.same_in_every_build


def test_elastic_example_ends_with_the_parameters_of_an_undisturbed_run() -> None:
    """It trains through kills, leaves and joins."""
    done = run_python("examples/train_elastic.py", "--quick", "--seed", "3")
    hashes = re.findall(r"parameters (\w+)", done.stdout)
    assert len(hashes) == 2 and hashes[0] == hashes[1]
    events = re.findall(r"s, step \d+: (\w+)", done.stdout)
    assert events == ["kill", "leave", "join", "kill"]


def test_parameter_server_example_trains_in_every_mode(tmp_path: Path) -> None:
    png = tmp_path / "loss.png"
    done = run_python(
        "examples/parameter_server.py", "--seconds", "0.5", "--staleness", "1", "--png", str(png)
    )
    for mode in ("all-reduce", "sync", "async", "stale"):
        assert f"│ {mode} " in done.stdout
    assert png.stat().st_size > 10_000


@pytest.mark.parametrize("options", [(), ("--wire-dtype", "bfloat16")], ids=["full", "bfloat16"])
def test_samplers_have_the_trainers_weights(options: tuple[str, ...]) -> None:
    """Samplers follow a trainer, and one is killed and comes back."""
    done = run_python("examples/rl_weights.py", "--samples", "2", "--bytes", "4", *options)
    assert "bit for bit" in done.stdout and "sampler 2, back" in done.stdout


def test_hashes_are_the_same_on_any_number_of_ranks() -> None:
    options = ("--context", "8", "--steps", "11", "--optimizer", "adamw")
    done = run_python("examples/same_bits.py", *options, "--ranks", "1", "3", "mixed")
    assert done.stdout.count("the same") == 3


def test_narrow_wire_is_seen_to_round_each_rank() -> None:
    options = ("--context", "8", "--steps", "11", "--wire-dtype", "bfloat16")
    done = run_python("examples/same_bits.py", *options, "--ranks", "1", "4", code=1)
    assert "DIFFERENT" in done.stdout
    assert "the parameters on 4 ranks differ from those on 1" in done.stderr
