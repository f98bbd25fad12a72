"""torch's own conformance suite for backends, runnable one test at a time.

The suite is `torch.testing._internal.distributed.distributed_test`, which torch's wheel contains.
It reads the backend and the world size from the environment when it is imported, so a process of
its own (`serve`) runs all tests of one backend at one world size. Every test gets fresh ranks,
forked from that process, which has torch loaded but has no threads and no group.

Torch lets only Gloo or MPI run some tests, by name. They run on rota nevertheless: without the
decorator, and with a name that the tests take for Gloo's.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import multiprocessing
import os
import re
import sys
import textwrap
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

# What DistTestCases.backend_feature has to list for torch to run the tests of a feature.
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")
# Decorators that let only Gloo or MPI run a test; those of other devices stay.
_NAME_GATE = re.compile(
    r"""BACKEND != ["'](gloo|mpi)["']|require_backend_is_available\(\{["']gloo["']\}\)"""
)
# In the environment: how many ranks claim to share a host; otherwise all do.
RANKS_PER_HOST = "CONFORMANCE_RANKS_PER_HOST"
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|PeerFailed|Timeout|Mismatch): .*", re.MULTILINE)


# dist.monitored_barrier asks for the backend's name before it asks the backend.
_MONITORED_BARRIER = (
    "distributed/distributed_c10d.py",
    "if get_backend(group) != Backend.GLOO:",
    "monitored_barrier is only implemented for GLOO backend",
)
# Tests that no third party's backend can pass, with the file and the line of torch at fault, and a
# part of the error. A test counts as excluded only while torch has the line and the test fails so.
EXCLUSIONS = {
    # DDP's log has the name of the BackendType, which all third parties share.
    "test_ddp_logging_data_cpu": (
        "include/torch/csrc/distributed/c10d/ProcessGroup.hpp",
        'return "custom";',
        "'custom' != ",
    ),
    "test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
}


class Settings(NamedTuple):
    backend: str
    world_size: int
    timeout_s: int  # of a test
    lift_name_gates: bool


class Result(NamedTuple):
    status: Literal["pass", "skip", "excluded", "fail"]
    gate: str = ""  # the line of torch that lets only others run the test, or that excludes it
    error: str = ""  # with N for each number, since pids and times differ from run to run

    @property
    def letter(self) -> str:
        """As in the list of expected results; see expected.py."""
        if self.status == "pass":
            return "l" if self.gate else "p"
        return {"skip": "s", "excluded": "x", "fail": "f"}[self.status]

    def __str__(self) -> str:
        return "; ".join(text for text in (self.gate, self.error) if text)


class _NameLikeGloo(str):
    """The name of a backend that the suite's tests take for Gloo's, and torch for what it is."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def serve(settings: Settings, log: Path, pipe: Connection) -> None:
    """Runs tests for the parent: sends their names, then receives a name and sends its Result.

    All output of a test goes to the file `log`, which then holds that of the latest test.
    """
    os.setsid()  # so that the parent can kill the ranks with their parent
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    suite = load(settings)
    case = make_case(suite)
    pipe.send(unittest.TestLoader().getTestCaseNames(case))
    with contextlib.suppress(EOFError):
        while True:
            name = pipe.recv()
            os.truncate(log, 0)
            pipe.send(run_test(suite, case, name, settings.lift_name_gates))


def load(settings: Settings) -> Any:
    """Imports the suite; once per process, before anything else imports torch."""
    os.environ["BACKEND"] = settings.backend
    os.environ["WORLD_SIZE"] = str(settings.world_size)
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(settings.timeout_s)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the list is about CPU tensors
    os.environ["INIT_METHOD"] = "file://"  # some tests need a file; each test has its own
    # Ranks outnumber the cores, so a thread pool per rank would only slow them down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Gloo otherwise resolves the host's name, which sandboxes often cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from torch.testing._internal import common_distributed

    import rota  # noqa: F401  (registers the backend)

    for feature in FEATURES:
        common_distributed.DistTestCases.backend_feature[feature].add(settings.backend)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def make_case(suite: Any) -> type[unittest.TestCase]:
    """The suite's TestCase, with ranks that are forked instead of spawned: 10 ms instead of 6 s."""

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        @classmethod
        def _run(cls, rank: int, *args: Any, **options: Any) -> None:
            if RANKS_PER_HOST in os.environ:
                os.environ["ROTA_HOST_ID"] = f"host{rank // int(os.environ[RANKS_PER_HOST])}"
            # A spawned rank would read this while it imports the suite.
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            super()._run(rank, *args, **options)

        def run_test(self, *args: Any) -> None:
            assert suite.dist.get_backend() == os.environ["BACKEND"]
            super().run_test(*args)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            # torch looks at rank 0 only.
            codes = [process.exitcode for process in self.processes]
            if fn not in self.skip_return_code_checks and len(set(codes)) > 1:
                raise RuntimeError(f"the ranks ended with different exit codes: {codes}")

    return Conformance


def run_test(suite: Any, case: type[unittest.TestCase], name: str, lift_name_gates: bool) -> Result:
    """Runs a test, even if torch has a decorator that skips it for the backend's name."""
    method = getattr(case, name)
    gates = list(_gates(suite, method))
    closed = [gate for gate in gates if not (gate.is_name and lift_name_gates)]
    if closed:
        return Result("skip", closed[0].line)
    lifted = gates[0].line if gates else ""
    if lifted:
        method.__unittest_skip__ = False
        suite.BACKEND = _NameLikeGloo(suite.BACKEND)
    result = unittest.TestResult()
    try:
        case(name).run(result)
    finally:
        suite.BACKEND = str(suite.BACKEND)
    for _, text in result.errors + result.failures:
        print(text, file=sys.stderr, flush=True)
        error = _error_line(text)
        file, line, its_error = EXCLUSIONS.get(name, (None, "", ""))
        if file is not None and its_error in error:
            path = Path(str(suite.torch.__file__)).parent / file
            number = [text.strip() for text in path.read_text().splitlines()].index(line) + 1
            return Result("excluded", f"{path.name}:{number} `{line}`", error)
        return Result("fail", lifted, error)
    for _, why in result.skipped:
        first_line = inspect.unwrap(method).__code__.co_firstlineno
        return Result("skip", f"{_file(suite)}:{first_line} {why}")
    return Result("pass", lifted)


def _error_line(traceback: str) -> str:
    """The error of the first rank that failed, from a traceback that quotes all ranks' errors."""
    of_parent, *of_ranks = re.split(r"^.*Process \d+ exited.*$", traceback, flags=re.MULTILINE)
    errors = _ERROR.findall(of_ranks[0] if of_ranks else of_parent)
    return re.sub(r"\d+", "N", errors[-1] if errors else "no message")


class _Gate(NamedTuple):
    line: str
    is_name: bool  # whether it looks at the backend's name only


def _gates(suite: Any, method: Any) -> Iterator[_Gate]:
    """The decorators of a test that skip it on this machine, from the outermost."""
    lines, first_line = inspect.getsourcelines(inspect.unwrap(method))
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(function, ast.FunctionDef)
    for node in function.decorator_list:
        text = ast.unparse(node)
        if not re.match(r"(unittest\.)?(nccl_)?(skip|require)", text):
            continue
        why = _why_skipped(eval(text, vars(suite)))
        if why is not None:
            line = first_line + node.lineno - 1
            yield _Gate(f"{_file(suite)}:{line} {why}", _NAME_GATE.search(text) is not None)


def _why_skipped(decorator: Callable[[Any], Any]) -> str | None:
    """Why a decorator of the suite skips a test, found on one that does nothing, or None."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    test = decorator(lambda self: None)
    if getattr(test, "__unittest_skip__", False):
        return str(test.__unittest_skip_why__)
    try:
        test(None)
    except SystemExit as exit:
        return next(skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exit.code)
    return None


def _file(suite: Any) -> str:
    return Path(str(suite.__file__)).name
