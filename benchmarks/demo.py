"""The demo in examples/, for benchmarks that measure on its model, its text or its training."""

from __future__ import annotations

import sys

from machine import REPOSITORY

sys.path.append(str(REPOSITORY / "examples"))

import compare as compare
import compare_report as compare_report
import train_gpt as train_gpt
