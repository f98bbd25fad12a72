"""Skips the tests of this folder, with a reason, without a GPU that this build of rota can use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rota import _C

HERE = Path(__file__).parent


def reason_to_skip() -> str | None:
    if not _C.cuda_archs():
        return "needs a build of rota with CUDA kernels (ROTA_CUDA=1)"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints failures at once as well: a run on a GPU may be stopped before its summary."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}", flush=True)
