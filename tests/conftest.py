"""Fixtures and settings of all tests; the environment must be set before torch is loaded."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from simulated_processes import SimulatedProcesses

# Makes its failed assertions show their values, as in test modules.
pytest.register_assert_rewrite("cpp_program")
# Ranks share few cores, so a thread pool per rank would only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Gloo otherwise resolves the host's name, which sandboxes often cannot.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Ranks that wait long for a core are not lost; the tests of lost hosts take the default.
os.environ.setdefault("ROTA_HOST_SILENCE_MS", "30000")
# The GPU self-test runs once for all tests and writes nothing to the user's home.
if "ROTA_CACHE_DIR" not in os.environ:
    os.environ["ROTA_CACHE_DIR"] = tempfile.mkdtemp(prefix="rota-tests-")
    atexit.register(shutil.rmtree, os.environ["ROTA_CACHE_DIR"], ignore_errors=True)
# If a script starts the tests in the background (`make test &`), they ignore Ctrl-C, and so
# would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def processes() -> Iterator[SimulatedProcesses]:
    """Runs functions on simulated GPUs; skips the test if they are not available."""
    import simulated_gpu
    from simulated_processes import SimulatedProcesses

    try:
        simulated_gpu.check_available()
    except simulated_gpu.NotAvailable as reason:
        pytest.skip(f"no GPU can be simulated: {reason}")
    with contextlib.closing(SimulatedProcesses()) as server:
        yield server


@pytest.fixture
def odd_views() -> dict[str, torch.Tensor]:
    """Tensors whose memory is not simply their elements, though they call themselves contiguous."""
    import torch

    pairs = torch.arange(6.0).view(3, 2)
    return {
        "stride": torch.full((1, 2), 3.0)[:, 0],
        "strides": torch.arange(6, dtype=torch.int16).view(1, 3, 2)[:, 1:2, 1],
        "conjugate": torch.view_as_complex(pairs.clone()).conj(),
        "negative": torch.view_as_complex(pairs.clone()).conj().imag,
    }


@pytest.fixture
def store() -> dist.TCPStore:
    """A store of members that come and go."""
    from elastic_workers import serve_store

    return serve_store()


@pytest.fixture
def port(store: dist.TCPStore) -> int:
    """The port of the store, for ranks."""
    return store.port


@pytest.fixture
def job() -> str:
    """A name that no other checkpoint has."""
    return uuid4().hex


@pytest.fixture
def print_at_end(
    record_property: Callable[[str, object], None],
) -> Callable[[str, list[str]], None]:
    """Takes a title and lines to print at the end of the run if the test passes."""
    return record_property


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for title, lines in report.user_properties:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
