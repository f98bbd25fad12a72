"""Builds the C++ test program of tests/cpp/ in several flavours, and runs single cases of it.

Objects are cached in build/tests/ under a hash of all their inputs: flags, compiler, source and
every project header that it includes. A rerun compiles nothing, a change recompiles only what
depends on it, and flavours share identical objects. The standard library's headers, which take a
third of a compiler's time, are precompiled once for each set of flags.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
CASES = ROOT / "tests" / "cpp"
BUILD = ROOT / "build" / "tests"

CXX = os.environ.get("CXX", "g++").split()
# setup.py's flags for the numeric contract; -Og because compiling takes longer than running.
CXX_FLAGS = [
    "-std=c++20",
    "-Og",
    "-g1",
    "-ffp-contract=off",
    "-fwrapv",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-Wno-psabi",
]

TSAN_FLAGS = ("-fsanitize=thread",)
TSAN_REPORT_CODE = 66
TSAN = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={TSAN_REPORT_CODE}"}
ASAN_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-D_GLIBCXX_ASSERTIONS",
)
ASAN = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:check_initialization_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

# Time limit of a case. ThreadSanitizer's longest takes 35 s on two idle cores, and several times
# as long on a busy machine.
CASE_TIMEOUT_S = 300.0
TIMEOUT_CODE = -signal.SIGALRM
# Files unused for this long are deleted; a build of another commit may still need newer ones.
STALE_AFTER_S = 86400.0

_BUILDING = threading.Lock()
_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_STANDARD_INCLUDE = re.compile(r"^#include <([a-z_]+)>", re.MULTILINE)  # C++'s have no suffix


class Change(Protocol):
    """A change to a product file, for one flavour."""

    @property
    def file(self) -> str:
        """Path below csrc/."""
        ...

    def apply(self, text: str) -> str: ...


@dataclass(frozen=True)
class Patch:
    """A change in one place."""

    file: str  # below csrc/
    pattern: str  # must occur exactly once
    replacement: str

    def apply(self, text: str) -> str:
        text, num_places = re.subn(self.pattern, self.replacement, text)
        assert num_places == 1, f"{self.file} has {num_places} places like {self.pattern}"
        return text


@dataclass(frozen=True)
class Flavour:
    """One way to compile the program. Sources are names in tests/cpp/ without suffix."""

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    patches: tuple[Change, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    without: tuple[str, ...] = ()  # cases that this flavour does not run

    def patched_files(self) -> dict[str, str]:
        """The patched text of each file, by path below csrc/."""
        texts: dict[str, str] = {}
        for patch in self.patches:
            text = texts.get(patch.file) or (CSRC / patch.file).read_text()
            texts[patch.file] = patch.apply(text)
        return texts


def cases_of(flavour: Flavour) -> list[str]:
    sources = [source for source in flavour.sources if source.endswith("_cases")]
    names = [name for source in sources for name in case_names(source)]
    return [name for name in names if name not in flavour.without]


def each_case(flavours: Iterable[Flavour]) -> pytest.MarkDecorator:
    """Runs a test of `flavour` and `case` for all of them."""
    every = [
        pytest.param(flavour, case, id=f"{flavour.name}-{case}")
        for flavour in flavours
        for case in cases_of(flavour)
    ]
    return pytest.mark.parametrize(("flavour", "case"), every)


def product_units() -> list[Path]:
    """Files that include all sources that do not depend on torch: a layer's as one, as in setup.py.

    Their includes find a flavour's patched files first.
    """
    units = []
    for layer in ("base", "schedule", "transport", "cpu", "cuda", "core", "hosts"):
        files = sorted((CSRC / layer).glob("*.cpp"))
        # Each instruction set has flags of its own.
        alone = [file for file in files if file.stem.startswith("element_loops_")]
        together = [file for file in files if file not in alone]
        text = "".join(f'#include "{file.relative_to(CSRC)}"\n' for file in together)
        unit = BUILD / f"unit-{layer}-{digest(text)}.cpp"
        write_file(unit, text)
        units += [unit, *alone]
    return units


def write_file(path: Path, text: str) -> None:
    """Writes the file atomically, as make_file()."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@functools.cache
def _compiler() -> str:
    version = subprocess.run([*CXX, "--version"], capture_output=True, text=True, check=True)
    return version.stdout


def _reachable(source: Path, include_dirs: list[Path]) -> Iterator[Path]:
    """The source and every project file that it includes, directly or not, in a fixed order."""
    seen = set()
    stack = [source]
    while stack:
        path = stack.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in _QUOTED_INCLUDE.findall(path.read_text()):
            found = (directory / name for directory in (path.parent, *include_dirs))
            stack.extend(path for path in found if path.exists())


def make_file(result: Path, command: list[str]) -> None:
    """Creates the file atomically, so that concurrent processes never see half of it."""
    partial = result.with_suffix(f".{os.getpid()}.partial")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
    partial.replace(result)


@contextlib.contextmanager
def _alone_with(result: Path) -> Iterator[None]:
    """A lock on the file across test processes: the second waits until the first has made it."""
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def _standard_headers() -> str:
    """Includes all headers of the standard library that any source includes."""
    files = (path for directory in (CSRC, CASES) for path in directory.rglob("*.[ch]*"))
    names = {name for file in files for name in _STANDARD_INCLUDE.findall(file.read_text())}
    return "".join(f"#include <{name}>\n" for name in sorted(names))


def _precompiled_headers(flags: list[str]) -> Path:
    """The header to include first; compilers take what is precompiled beside it."""
    text = _standard_headers()
    header = BUILD / f"standard-{digest(_compiler(), *flags, text)}.h"
    precompiled = header.with_suffix(".h.gch")
    with _alone_with(header):
        if not precompiled.exists():
            header.write_text(text)
            make_file(precompiled, [*CXX, *flags, "-x", "c++-header", str(header)])
    for path in (header, precompiled):
        path.touch()
    return header


def compile_object(
    source: Path, flags: list[str], include_dirs: list[Path], first: Path | None = None
) -> Path:
    """Compiles one source. `first` is a header that is included before it."""
    texts = [path.read_text() for path in _reachable(source, include_dirs)]
    result = BUILD / f"{source.stem}-{digest(_compiler(), *flags, *texts)}.o"
    with _alone_with(result):
        if not result.exists():
            before = ["-include", str(first)] if first else []
            includes = [flag for directory in include_dirs for flag in ("-I", str(directory))]
            make_file(result, [*CXX, *flags, *before, *includes, "-c", str(source)])
    return result


def _patched_directory(flavour: Flavour) -> Path:
    """A directory with the patched files, which replace the product's."""
    files = flavour.patched_files()
    directory = BUILD / f"patched-{digest(*files, *files.values())}"
    for file, text in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    return directory


def build(flavour: Flavour) -> Path:
    """Returns the program, after compiling what has changed. Threads may call this at once."""
    with _BUILDING:
        program = _build_once(flavour)
    if isinstance(program, AssertionError):
        raise program
    return program


@functools.cache
def _build_once(flavour: Flavour) -> Path | AssertionError:
    """The program, or the build error; cached, so a failing build is not retried by every test."""
    try:
        return _build(flavour)
    except AssertionError as error:
        return error


def _build(flavour: Flavour) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    patched = _patched_directory(flavour)
    include_dirs = [patched, CSRC, CASES]
    flags = [*CXX_FLAGS, *flavour.flags]
    sources = product_units() + [CASES / f"{name}.cpp" for name in flavour.sources]
    # Sources with the most includes take longest, so they start first.
    sources.sort(key=lambda source: -len(list(_reachable(source, include_dirs))))
    headers = _precompiled_headers(flags)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(
            pool.map(lambda source: compile_object(source, flags, include_dirs, headers), sources)
        )
    names = [path.name for path in objects]
    program = BUILD / f"{flavour.name}-{digest(*flavour.flags, *names)}"
    if not program.exists():  # linking is quick, so it takes no lock
        make_file(program, [*CXX, *flavour.flags, *map(str, objects), "-lpthread"])
    for path in (program, *objects):
        path.touch()
    _remove_stale()
    return program


def _remove_stale() -> None:
    for path in BUILD.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            if path.is_file() and time.time() - path.stat().st_mtime > STALE_AFTER_S:
                path.unlink()


def run(
    flavour: Flavour,
    *arguments: str,
    timeout_s: float = CASE_TIMEOUT_S,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:
    """Returns the program's exit code and output; kills any processes that it leaves behind.

    The exit code is TIMEOUT_CODE if the program had to be stopped.
    """
    program = build(flavour)
    inherited = {name: value for name, value in os.environ.items() if "SAN_OPTIONS" not in name}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [str(program), *arguments],
            env={**inherited, **flavour.environment, **environment, "TMPDIR": directory},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = TIMEOUT_CODE
        finally:
            _kill_session(process)
        output.seek(0)
        return code, output.read()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_listed(flavour: Flavour) -> None:
    """Checks that the program has exactly the cases that pytest knows or leaves out, each once."""
    code, output = run(flavour)
    assert code == 0, output
    names = output.split()
    assert sorted(names) == sorted([*cases_of(flavour), *flavour.without])
    assert len(names) == len(set(names))


def check_case(flavour: Flavour, case: str) -> None:
    """Checks that the case passes without a sanitizer report."""
    code, output = run(flavour, case)
    # A forked child may report an error that does not show in its parent's exit code.
    assert code == 0 and "Sanitizer" not in output and "runtime error" not in output, (
        f"exit code {code}\n{output}"
    )


def case_names(source: str) -> list[str]:
    """The cases of one source, read from its table, so no compiler is needed."""
    _, _, table = (CASES / f"{source}.cpp").read_text().partition("const CaseTable kCases{")
    names = re.findall(r'^\s*\{"([\w-]+)",', table, re.MULTILINE)
    assert names, f"{source}.cpp has no table of cases"
    return names
