"""Runs torch's conformance suite on rota and compares the results with the recorded list.

    python tests/conformance/run.py                        everything, at 2, 3, 4 and 8 ranks
    python tests/conformance/run.py -w 2 -k all_gather     tests whose name matches, at 2 ranks
    python tests/conformance/run.py --record               writes the list anew, for Gloo and rota

The run fails if a test does anything but what the list says, even if that is to pass, if the suite
lacks a test of the list, and if a test that Gloo passes fails on rota. See expected.py.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import expected
import suite
from expected import BACKENDS, WORLD_SIZES, Expectation

# For the import of torch and the suite, on a busy machine.
_START_S = 120
# torch ends a test at its time limit; this much later the runner does.
_GRACE_S = 30
COUNTED = {
    "p": "passed",
    "l": "passed with a gate of torch lifted that lets only Gloo or MPI run them",
    "x": "excluded by torch, as with every third party",
    "f": "failed",
    "s": "skipped",
}
_context = multiprocessing.get_context("spawn")

# None for a test that was not selected.
Results: TypeAlias = "dict[str, suite.Result | None]"


class Server:
    """A process that runs tests of one backend at one world size; see suite.serve."""

    def __init__(self, backend: str, world_size: int, timeout_s: int, log: Path) -> None:
        self.log = log
        self._settings = suite.Settings(
            backend,
            world_size,
            timeout_s,
            # Gloo sets the standard by what it passes as torch runs it.
            lift_name_gates=backend != "gloo",
        )
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> Collection[str]:
        """Returns the names of the suite's tests."""
        self._pipe, pipe = _context.Pipe()
        self._process = _context.Process(target=suite.serve, args=(self._settings, self.log, pipe))
        self._process.start()
        pipe.close()
        if not self._pipe.poll(_START_S):
            raise RuntimeError(f"the suite did not start within {_START_S} s; see {self.log}")
        try:
            names: list[str] = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the suite could not be imported; see {self.log}") from None
        return names

    def run(self, name: str) -> suite.Result:
        if self._process is None:
            self.start()
        self._pipe.send(name)
        limit_s = self._settings.timeout_s + _GRACE_S
        if not self._pipe.poll(limit_s):
            self.close()
            return suite.Result("fail", error=f"hung for {limit_s} s")
        try:
            result: suite.Result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.close()
            return suite.Result("fail", error="the process that started the ranks died")
        return result

    def close(self) -> None:
        """Ends the process and its ranks; `run` starts another."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def run_suite(
    backend: str,
    world_size: int,
    select: str = "",
    num_jobs: int = 2,
    timeout_s: int = 120,
    logs: Path = Path("build/conformance"),
) -> Results:
    """Runs the tests whose name matches at one world size, several at a time.

    Args:
        timeout_s: of each test.
        logs: the folder for what failed tests wrote.
    """
    logs = logs.resolve() / f"{backend}-ws{world_size}"
    logs.mkdir(parents=True, exist_ok=True)
    servers = [
        Server(backend, world_size, timeout_s, logs / f"server{index}.log")
        for index in range(num_jobs)
    ]
    waiting: deque[str] = deque()
    results: Results = {}

    def run_waiting(server: Server) -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            start_s = time.monotonic()
            result = results[name] = server.run(name)
            duration_s = time.monotonic() - start_s
            print(f"{backend} ws{world_size} {name}: {result.letter} ({duration_s:.1f} s) {result}")
            if result.status == "fail":
                (logs / f"{name}.log").write_bytes(server.log.read_bytes())

    # After Ctrl-C no test may start, and the servers end before the threads that wait for them.
    with ThreadPoolExecutor(num_jobs) as threads, contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        stack.callback(waiting.clear)
        names, *_ = threads.map(Server.start, servers)
        results.update(dict.fromkeys(names))
        waiting.extend(name for name in names if re.search(select, name))
        list(threads.map(run_waiting, servers))
    return results


def compare(
    expectations: Mapping[str, Expectation],
    counts: Mapping[str, int],
    backend: str,
    world_size: int,
    results: Results,
) -> Iterator[str]:
    """A line for each difference between results and list, whose other tests are counted."""
    for name in sorted(expectations.keys() - results.keys()):
        yield f"{name}: in the list, but not in the suite"
    others = dict.fromkeys(counts, 0)
    for name, result in sorted(results.items()):
        is_listed = name in expectations
        letters = expectations[name].get(backend, world_size) if is_listed else "".join(counts)
        if result is not None and result.letter not in letters:
            yield (
                f"{name}: {backend} at {world_size} ranks: expected {' or '.join(letters)}, "
                f"got {result.letter} {result}"
            )
        elif result is not None and not is_listed:
            others[result.letter] += 1
    if None not in results.values() and others != counts:
        yield f"{backend} at {world_size} ranks: {others} not listed, expected {counts}"


def record(
    expectations: dict[str, Expectation], backend: str, world_size: int, results: Results
) -> None:
    """Enters results into the list."""
    for name, result in results.items():
        entry = expectations.setdefault(name, Expectation())
        if result is not None:
            entry.enter(backend, world_size, result)


def summary(backend: str, world_size: int, results: Results) -> Iterator[str]:
    """The counts, and the tests that torch gates or excludes and those that fail."""
    done = {name: result for name, result in sorted(results.items()) if result is not None}
    yield f"\n{backend} at {world_size} ranks: {len(done)} of {len(results)} tests"
    for letter, what in COUNTED.items():
        named = [f"  {name}: {result}" for name, result in done.items() if result.letter == letter]
        yield f"{len(named)} {what}"
        yield from named if letter in "lxf" else ()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("-w", "--world-sizes", type=int, nargs="+", default=WORLD_SIZES, choices=WORLD_SIZES)
    option("--ranks-per-host", type=int, help="ranks claim to be on hosts of so many")
    option("-k", default="", metavar="REGEX", help="only tests whose name matches")
    option("--record", action="store_true", help="write the list instead, from a whole run")
    args = parser.parse_args(arguments)
    if args.ranks_per_host is not None:
        os.environ[suite.RANKS_PER_HOST] = str(args.ranks_per_host)
    path = expected.list_path(metadata.version("torch"))
    if not path.exists() and not args.record:
        parser.error(f"there is no {path}; write it with --record")
    expectations = {} if args.record else expected.read(path)
    problems: list[str] = []
    for world_size in args.world_sizes:
        for backend in BACKENDS if args.record else ["rota"]:
            results = run_suite(backend, world_size, args.k)
            print(*summary(backend, world_size, results), sep="\n", flush=True)
            if args.record:
                record(expectations, backend, world_size, results)
                expected.write(path, expectations)
            else:
                counts = expected.counts_of(path)
                problems += compare(expectations, counts, backend, world_size, results)
    problems += [
        f"{name}: Gloo passes it and rota does not, for no line of torch"
        for name, entry in expectations.items()
        if entry.lags()
    ]
    if problems:
        print(f"\n{len(problems)} problems:", *problems, sep="\n  ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
