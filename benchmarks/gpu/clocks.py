"""Clocks, power, temperature and throttle reasons of the GPU while something is measured."""

from __future__ import annotations

import atexit
import importlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from time import monotonic, sleep
from typing import Any

import torch

# Reading = (SM MHz, memory MHz, W, °C, throttle reasons).
Reading = tuple[float, float, float, float, int]

PERIOD_S = 0.02
# Bits of nvmlClocksEventReasons, except for an idle GPU and clocks set by a user.
THROTTLE = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def _from_nvml(uuid: str) -> Iterator[Reading]:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    while True:
        yield (
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
        sleep(PERIOD_S)


def _from_smi(uuid: str) -> Iterator[Reading]:
    command = ["nvidia-smi", "-i", uuid, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen([*command, "-lms", "100"], stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    for line in process.stdout:
        sm, memory, power, temperature, reasons = line.split(",")
        yield float(sm), float(memory), float(power), float(temperature), int(reasons, 16)


class Clocks:
    """Reads the clocks in a thread, with pynvml, else with nvidia-smi, else not at all."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, Reading]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        for source in (_from_nvml, _from_smi):
            try:
                for reading in source(uuid):
                    self._readings.append((monotonic(), reading))
            except Exception:  # both may be missing; rows then have no clocks
                continue

    def during(self, spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Summary of the readings in these spans of time, and one before and after each."""
        readings = list(self._readings)
        chosen = []
        for begin, end in spans:
            inside = [i for i, (when, _) in enumerate(readings) if begin <= when <= end]
            before = sum(when < begin for when, _ in readings)
            around = {max(0, before - 1), *inside, before + len(inside)}
            chosen += [readings[i][1] for i in around if i < len(readings)]
        if not chosen:
            return {}
        sm, memory, power, temperature, reasons = zip(*chosen, strict=True)
        active = [name for bit, name in THROTTLE.items() if any(bit & one for one in reasons)]
        return {
            "sm_mhz": [min(sm), max(sm)],
            "memory_mhz": [min(memory), max(memory)],
            "max_power_w": round(max(power), 1),
            "max_temperature_c": max(temperature),
            **({"throttled": active} if active else {}),
        }
