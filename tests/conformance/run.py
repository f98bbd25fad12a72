"""Runs torch's conformance suite on rota and compares the results with the recorded list.

    python tests/conformance/run.py                        everything, at 2, 3 and 4 ranks
    python tests/conformance/run.py -w 2 -k all_gather     tests whose name matches, at 2 ranks
    python tests/conformance/run.py --record               writes the list anew, for Gloo and rota

The run fails if a test does anything but what the list says, even if that is to pass, and if the
suite and the list do not name the same tests. See expected.py for the list.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import expected
import suite
from expected import BACKENDS, WORLD_SIZES, Expectation

# The import of torch and the suite, on a busy machine.
_START_S = 120
# How long a test may exceed its own time limit, after which torch stops it.
_GRACE_S = 30
TITLES = {
    "p": "pass",
    "l": "torch lets only Gloo or MPI run these; they pass with that gate lifted",
    "x": "these cannot pass for a backend that is not part of torch",
    "f": "these fail",
    "s": "torch skips these",
}
COUNTED = {
    "p": "passed",
    "l": "passed with a gate lifted",
    "x": "excluded by torch",
    "f": "failed",
    "s": "skipped",
}
_context = multiprocessing.get_context("spawn")


# None for a test that was not selected.
Results: TypeAlias = "dict[str, suite.Result | None]"


class Server:
    """A process that runs tests of one backend at one world size; see suite.serve."""

    def __init__(self, backend: str, world_size: int, timeout_s: int, log: Path) -> None:
        self._timeout_s = timeout_s
        self._pipe, pipe = _context.Pipe()
        self._process = _context.Process(
            target=suite.serve, args=(backend, world_size, timeout_s, log, pipe)
        )
        self._process.start()
        pipe.close()
        if not self._pipe.poll(_START_S):
            self.close()
            raise RuntimeError(f"the suite did not start within {_START_S} s; see {log}")
        try:
            self.names: list[str] = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the suite could not be imported; see {log}") from None

    def run(self, name: str) -> suite.Result:
        self._pipe.send(name)
        if not self._pipe.poll(self._timeout_s + _GRACE_S):
            return suite.Result("fail", error=f"hung for {self._timeout_s + _GRACE_S} s")
        try:
            result: suite.Result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return suite.Result("fail", error="the process that started the ranks died")
        return result

    def close(self) -> None:
        """Also ends the ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()


@dataclass(frozen=True)
class Options:
    select: re.Pattern[str] | Collection[str]
    num_servers: int
    timeout_s: int
    logs: Path

    def selects(self, name: str) -> bool:
        if isinstance(self.select, re.Pattern):
            return self.select.search(name) is not None
        return name in self.select


def run_suite(backend: str, world_size: int, options: Options) -> Results:
    """Runs the selected tests on several servers."""
    logs = options.logs / f"{backend}-ws{world_size}"
    logs.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    queue: SimpleQueue[str] = SimpleQueue()
    is_filled = threading.Event()

    def serve(index: int) -> None:
        log = logs / f"server{index}.log"

        def start() -> Server:
            return Server(backend, world_size, options.timeout_s, log)

        server = start()
        try:
            if index == 0:
                for name in server.names:
                    results[name] = None
                    if options.selects(name):
                        queue.put(name)
                is_filled.set()
            is_filled.wait(_START_S)
            while True:
                try:
                    name = queue.get_nowait()
                except Empty:
                    return
                start_s = time.monotonic()
                result = results[name] = server.run(name)
                print(
                    f"{backend} ws{world_size} {name}: {result.letter} "
                    f"({time.monotonic() - start_s:.1f} s) {result}",
                    flush=True,
                )
                if result.status == "fail":
                    (logs / f"{name}.log").write_bytes(log.read_bytes())
                    server.close()
                    server = start()
        finally:
            is_filled.set()
            server.close()

    with ThreadPoolExecutor(options.num_servers) as threads:
        for future in [threads.submit(serve, index) for index in range(options.num_servers)]:
            future.result()
    return results


def compare(
    expectations: Mapping[str, Expectation], backend: str, world_size: int, results: Results
) -> Iterator[str]:
    """A line for each difference between results and list."""
    for name in sorted(expectations.keys() - results.keys()):
        yield f"{name}: in the list, but not in the suite"
    for name, result in sorted(results.items()):
        if name not in expectations:
            yield f"{name}: in the suite, but not in the list"
        elif result is not None and not expectations[name].is_met_by(backend, world_size, result):
            letter = expectations[name].get(backend, world_size)
            yield (
                f"{name}: {backend} at {world_size} ranks: expected {letter}, "
                f"got {result.letter} {result}"
            )


def record(
    expectations: dict[str, Expectation], backend: str, world_size: int, results: Results
) -> None:
    """Enters results into the list; an x that is still right, and reasons of x and f, stay."""
    for name in expectations.keys() - results.keys():
        del expectations[name]
    for name, result in results.items():
        entry = expectations.setdefault(name, Expectation())
        if result is None or entry.is_met_by(backend, world_size, result):
            continue
        entry.set(backend, world_size, result.letter)
        if backend == "rota":
            entry.reason = str(result)


def summary(
    expectations: Mapping[str, Expectation], backend: str, world_size: int, results: Results
) -> Iterator[str]:
    """The tests that torch gates, those that fail, and the counts."""
    done = {name: result for name, result in sorted(results.items()) if result is not None}
    groups: dict[str, dict[str, suite.Result]] = {letter: {} for letter in TITLES}
    for name, result in done.items():
        entry = expectations.get(name, Expectation())
        is_excluded = entry.get(backend, world_size) == "x" and entry.is_met_by(
            backend, world_size, result
        )
        groups["x" if is_excluded else result.letter][name] = result
    for letter in "lxf":
        if groups[letter]:
            yield f"\n{backend} at {world_size} ranks: {TITLES[letter]}:"
            for name, result in groups[letter].items():
                entry = expectations.get(name, Expectation())
                yield f"  {name} (Gloo: {entry.get('gloo', world_size)}): {entry.reason or result}"
    counts = ", ".join(f"{len(groups[letter])} {COUNTED[letter]}" for letter in TITLES)
    yield f"\n{backend} at {world_size} ranks: {counts}; {len(done)} of {len(results)} tests"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-w", "--world-sizes", type=int, nargs="+", default=WORLD_SIZES, choices=WORLD_SIZES
    )
    parser.add_argument(
        "-b",
        "--backends",
        nargs="+",
        default=None,
        choices=BACKENDS,
        help="default: rota; with --record also gloo",
    )
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument(
        "-j", "--jobs", type=int, default=2, help="tests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=120,
        metavar="S",
        help="seconds per test (default: %(default)s)",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("build/conformance"),
        help="folder for the output of failed tests",
    )
    parser.add_argument("--record", action="store_true", help="write the list instead of comparing")
    args = parser.parse_args(arguments)
    options = Options(re.compile(args.k), args.jobs, args.timeout, args.logs.resolve())
    torch_version = metadata.version("torch")
    path = expected.list_path(torch_version)
    if not path.exists() and not args.record:
        print(
            f"there is no list for torch {torch_version}; write one with --record", file=sys.stderr
        )
        return 2
    expectations = expected.read(path) if path.exists() else {}
    backends = args.backends or (BACKENDS if args.record else ["rota"])
    results = {}
    for world_size in args.world_sizes:
        for backend in backends:
            results[backend, world_size] = run_suite(backend, world_size, options)
            if args.record:
                record(expectations, backend, world_size, results[backend, world_size])
                expected.write(path, expectations)
    differences: list[str] = []
    for (backend, world_size), by_name in results.items():
        print(*summary(expectations, backend, world_size, by_name), sep="\n")
        differences += compare(expectations, backend, world_size, by_name)
    if differences:
        print(f"\n{len(differences)} differences from {path.name}:", *differences, sep="\n  ")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
