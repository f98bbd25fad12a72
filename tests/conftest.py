"""What every test relies on, before torch is loaded anywhere."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from simulated_processes import SimulatedProcesses

# Its checks are to say what they saw, as those of the tests do.
pytest.register_assert_rewrite("cpp_program")
# Ranks share few cores: a thread pool in each of them would only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Gloo otherwise resolves the host's name, which sandboxes often cannot.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# The self-test of a GPU runs once for all tests, and leaves nothing in the user's home.
if "ROTA_CACHE_DIR" not in os.environ:
    os.environ["ROTA_CACHE_DIR"] = tempfile.mkdtemp(prefix="rota-tests-")
    atexit.register(shutil.rmtree, os.environ["ROTA_CACHE_DIR"], ignore_errors=True)
# A script that starts the tests in the background (`make test &`) has them ignore Ctrl-C,
# which every process they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def processes() -> Iterator[SimulatedProcesses]:
    """Runs functions on simulated GPUs; skips the test where there can be none."""
    import simulated_gpu
    from simulated_processes import SimulatedProcesses

    try:
        simulated_gpu.check_available()
    except simulated_gpu.NotAvailable as reason:
        pytest.skip(f"no GPU can be simulated: {reason}")
    with contextlib.closing(SimulatedProcesses()) as server:
        yield server


@pytest.fixture
def print_at_end(
    record_property: Callable[[str, object], None],
) -> Callable[[str, list[str]], None]:
    """Takes a title and lines that belong into the log of a run that passes."""
    return record_property


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for title, lines in report.user_properties:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
