"""torch's own conformance suite for backends, runnable one test at a time.

The suite is `torch.testing._internal.distributed.distributed_test`, which torch's wheel contains. It
reads the backend and the world size from the environment when it is imported, so a process of its
own (`serve`) runs all tests of one backend at one world size. Every test gets fresh ranks, forked
from that process, which has torch loaded but has no threads and no group.
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
from types import ModuleType
from typing import Any, Literal, NamedTuple

# What DistTestCases.backend_feature has to list for torch to run the tests of a feature.
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")
# Decorators that let only Gloo or MPI run a test; those of other devices stay.
_NAME_GATE = re.compile(
    r"""BACKEND != ["'](gloo|mpi)["']|require_backend_is_available\(\{["']gloo["']\}\)"""
)
_ERROR = re.compile(r"[\w.]*(Error|Exception|PeerFailed|Timeout|Mismatch): .*")


class Result(NamedTuple):
    status: Literal["pass", "skip", "fail"]
    gate: str = ""  # the line of torch that skips the test
    error: str = ""

    @property
    def letter(self) -> str:
        """As in the list of expected results; see expected.py."""
        if self.status == "pass":
            return "l" if self.gate else "p"
        return self.status[0]

    def __str__(self) -> str:
        return "; ".join(text for text in (self.gate, self.error) if text)


class _NameLikeGloo(str):
    """The name of a backend that the suite's tests take for Gloo's, and torch for what it is."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other


def serve(backend: str, world_size: int, timeout_s: int, log: Path, pipe: Connection) -> None:
    """Runs tests for the parent: sends their names, then receives a name and sends its Result.

    All output of a test goes to the file `log`, which then holds that of the latest test.
    """
    os.setsid()  # so that the parent can kill the ranks with their parent
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    suite = load(backend, world_size, timeout_s)
    case = make_case(suite)
    pipe.send(unittest.TestLoader().getTestCaseNames(case))
    with contextlib.suppress(EOFError):
        while True:
            name = pipe.recv()
            os.truncate(log, 0)
            pipe.send(run_test(suite, case, name))


def load(backend: str, world_size: int, timeout_s: int) -> ModuleType:
    """Imports the suite for a backend and a world size; once per process."""
    os.environ["BACKEND"] = backend
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["INIT_METHOD"] = "file://"  # some tests need a file; each test has its own
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(timeout_s)
    # Ranks outnumber the cores, so a thread pool per rank would only slow them down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Gloo otherwise resolves the host's name, which sandboxes often cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from torch.testing._internal import common_distributed

    import rota  # noqa: F401  (registers the backend)

    for feature in FEATURES:
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def make_case(suite: ModuleType) -> type[unittest.TestCase]:
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
        def _run(cls, *args: Any, **options: Any) -> None:
            # A spawned rank would read this while it imports the suite.
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            super()._run(*args, **options)

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


def run_test(suite: ModuleType, case: type[unittest.TestCase], name: str) -> Result:
    """Runs a test, also one that torch lets only Gloo or MPI run, for no reason but the name."""
    method = getattr(case, name)
    gates = list(_gates(suite, method))
    gate = gates[0].reason if gates else ""
    if gates and all(gate.is_name for gate in gates):
        method.__unittest_skip__ = False
        suite.BACKEND = _NameLikeGloo(suite.BACKEND)
    elif gates:
        return Result("skip", gate)
    result = unittest.TestResult()
    try:
        case(name).run(result)
    finally:
        suite.BACKEND = str(suite.BACKEND)
    for _, text in result.errors + result.failures:
        print(text, file=sys.stderr, flush=True)
        return Result("fail", gate, _error_line(text))
    for _, why in result.skipped:
        return Result("skip", gate or f"{_file(suite)}:{_first_line(method)} {why}")
    return Result("pass", gate)


def _error_line(traceback: str) -> str:
    """The error of the first rank that failed, from a traceback that quotes all ranks' errors."""
    errors = [line for line in traceback.splitlines() if _ERROR.match(line)]
    of_ranks = [line for line in errors if not line.startswith("RuntimeError: Process")]
    return next(iter(of_ranks or errors), "no message")


class _Gate(NamedTuple):
    reason: str
    is_name: bool


def _gates(suite: ModuleType, method: Any) -> Iterator[_Gate]:
    """The decorators of a test that skip it on this machine, from the outermost."""
    test = inspect.unwrap(method)
    lines, first_line = inspect.getsourcelines(test)
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
    """Why a decorator of the suite skips a test, here one that does nothing; None if it does not."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    test = decorator(lambda self: None)
    if getattr(test, "__unittest_skip__", False):
        return str(test.__unittest_skip_why__)
    try:
        test(None)
    except SystemExit as exit:
        return next(skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exit.code)
    return None


def _file(suite: ModuleType) -> str:
    return Path(str(suite.__file__)).name


def _first_line(method: Any) -> int:
    return int(inspect.unwrap(method).__code__.co_firstlineno)
