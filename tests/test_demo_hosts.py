"""`make demo-hosts`, shortened: what trains over simulated hosts, and what they send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hosts import Hosts
from programs import run_python

pytestmark = pytest.mark.same_in_every_build

FLOAT32_BYTES = 4
NUM_PARAMETERS = 2 * (256 * 128) + 2 * 12 * 128**2  # embedding and head; two blocks


# What a host sends in a step, as a multiple of the gradients.
SENT = {
    "gloo": 1.5,  # a ring over all ranks
    "rota": 1.0,  # 2 (H - 1) / H for H = 2 hosts
    "rota_fp16": 1 / 2 + 1 / 64 / 4,
    "rota_fp8": 1 / 4 + 1 / 32 / 4,
    "none": 0.0,
}


def test_short_run_has_the_losses_of_gloo_and_sends_its_share(tmp_path: Path) -> None:
    with Hosts((1,)):  # skips where hosts cannot be simulated
        pass
    path = tmp_path / "record.json"
    done = run_python("benchmarks/demo_hosts.py", "--quick", "--json", str(path), timeout=400)
    assert json.loads(done.stdout.splitlines()[-1])["num_wrong"] == 0
    assert path.with_suffix(".png").stat().st_size > 10_000
    record = json.loads(path.read_text())

    assert len(record["held_out"]) == 6
    for row in record["held_out"]:
        assert row["same_losses_at_every_rate"], row
    gloo, rota = record["held_out"][:2]
    assert (gloo["gradients"], rota["gradients"]) == ("Gloo", "rota, float32")
    # Sums of four are rounded in another order.
    assert rota["held_out_bits"] == pytest.approx(gloo["held_out_bits"], abs=1e-3)

    for variant, times_the_gradients in SENT.items():
        expected = times_the_gradients * NUM_PARAMETERS * FLOAT32_BYTES
        rows = [row for row in record["step_times"] if row["variant"] == variant]
        assert [row["rate"] for row in rows] == ["1gbit", "100mbit"]
        for row in rows:
            # Headers, acknowledgements and barriers; signs of life, more where a step takes long.
            assert expected <= row["sent_bytes_per_step"] <= 1.05 * expected + 80_000, row
