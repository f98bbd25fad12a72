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
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

Status = Literal["pass", "skip", "fail"]

# What DistTestCases.backend_feature has to list for torch to run the tests of a feature.
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")


class Result(NamedTuple):
    status: Status
    reason: str = ""  # of a skip: the line of torch that causes it; of a failure: the error


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
        def setUp(self) -> None:  # noqa: N802
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:  # noqa: N802
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            # A spawned rank would read this while it imports the suite.
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            super()._run(*args, **options)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            # torch looks at rank 0 only.
            codes = [process.exitcode for process in self.processes]
            if fn not in self.skip_return_code_checks and len(set(codes)) > 1:
                raise RuntimeError(f"the ranks ended with different exit codes: {codes}")

    return Conformance


def run_test(suite: ModuleType, case: type[unittest.TestCase], name: str) -> Result:
    result = unittest.TestResult()
    case(name).run(result)
    for _, text in result.errors + result.failures:
        print(text, file=sys.stderr, flush=True)
        return Result("fail", _error_line(text))
    for _, why in result.skipped:
        return Result("skip", _skip_line(suite, case, name, why))
    return Result("pass")


def _error_line(traceback: str) -> str:
    """The line of a traceback that names the error of the first rank that failed."""
    lines = traceback.splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Timeout|Mismatch):", line)]
    # The last is the parent's, which quotes those of the ranks.
    return (errors or lines or ["no message"])[0].strip()


def _skip_line(suite: ModuleType, case: type[unittest.TestCase], name: str, why: str) -> str:
    """The decorator in the suite that skips a test, as `file:line why`."""
    test = inspect.unwrap(getattr(case, name))
    lines, first_line = inspect.getsourcelines(test)
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(function, ast.FunctionDef)
    for node in function.decorator_list:
        text = ast.unparse(node)
        if re.match(r"(unittest\.)?(nccl_)?(skip|require)", text) and _skips(suite, text):
            return f"{Path(str(suite.__file__)).name}:{first_line + node.lineno - 1} {why}"
    return f"{Path(str(suite.__file__)).name}:{first_line} {why}"


def _skips(suite: ModuleType, decorator: str) -> bool:
    """Whether a decorator of the suite skips a test that does nothing."""
    test = eval(decorator, vars(suite))(lambda self: None)
    if getattr(test, "__unittest_skip__", False):
        return True
    try:
        test(None)
    except (unittest.SkipTest, SystemExit):
        return True
    return False
