"""The demo's model and its choice of devices, for benchmarks that measure on them."""

from __future__ import annotations

import sys

from machine import REPOSITORY

sys.path.append(str(REPOSITORY / "examples"))

import devices as devices
import train_gpt as train_gpt
