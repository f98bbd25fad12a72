"""The layers below torch, tested from C++: ranks as threads and processes, under sanitizers.

Each case of tests/cpp/ is a test of its own in every flavour that can run it:

  plain     as it is
  tsan      ThreadSanitizer, with one place in each mailbox: the minimum for the protocol, so that
            memory is reused as soon as possible, and short chunks between hosts
  asan      AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers, short
            chunks between hosts
  endless   without the timeout that ends every sleep, so a lost wake-up hangs the program

No report is suppressed. The mutants show that the tests detect real faults. They are compiled into
tsan's program, since a second one takes minutes to compile: where none is chosen, its accesses are
the product's.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cpp_flavours import FLAVOURS, TSAN_PROGRAM
from cpp_mutants import (
    CASE_FAILED,
    HOSTS,
    LOST_WAITS,
    MUTANTS,
    PHASES_BETWEEN_HOSTS,
    Mutant,
)
from cpp_program import (
    CASE_TIMEOUT_S,
    CASES,
    CSRC,
    CXX,
    CXX_FLAGS,
    TIMEOUT_CODE,
    TSAN_REPORT_CODE,
    Flavour,
    check_case,
    check_listed,
    each_case,
    run,
)

pytestmark = pytest.mark.no_extension


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    check_listed(flavour)


@each_case(FLAVOURS)
def test_cpp(flavour: Flavour, case: str) -> None:
    check_case(flavour, case)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_cpp_mutant_is_found(mutant: Mutant) -> None:
    # Only a program that hangs needs the limit.
    timeout_s = 3 if mutant.codes == (TIMEOUT_CODE,) else CASE_TIMEOUT_S
    environment = {"ROTA_MUTANT": str(MUTANTS.index(mutant))}
    code, output = run(TSAN_PROGRAM, *mutant.cases, environment=environment, timeout_s=timeout_s)
    assert code in mutant.codes, f"exit code {code}\n{output}"
    assert code != TSAN_REPORT_CODE or "WARNING: ThreadSanitizer: data race" in output


@pytest.mark.parametrize(("phase", "case"), LOST_WAITS)
def test_cpp_without_one_wait_is_found(phase: str, case: str) -> None:
    code, output = run(TSAN_PROGRAM, case, environment={"LOST_WAIT": phase})
    assert code in (CASE_FAILED, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


def test_every_wait_for_hosts_is_left_out_once() -> None:
    assert sorted(HOSTS) == PHASES_BETWEEN_HOSTS


# ---- one program, several instruction sets -------------------------------------------------------


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_element_loops_leave_the_linker_no_function(isa: str, tmp_path: Path) -> None:
    """Otherwise the linker could keep one instruction set's copy for all callers."""
    result = tmp_path / "loops.o"
    flags = [*CXX_FLAGS, "-fno-inline", "-I", str(CSRC), "-o", str(result)]
    subprocess.run([*CXX, *flags, "-c", str(CSRC / f"cpu/element_loops_{isa}.cpp")], check=True)
    nm = ["nm", "--demangle", "--defined-only", "--extern-only", "--format=posix", str(result)]
    lines = subprocess.run(nm, capture_output=True, text=True, check=True).stdout.splitlines()
    # No symbols if the file is empty, as on machines other than x86-64.
    assert [line for line in lines if not line.startswith(f"rota::cpu::{isa}::kTable D")] == []


# ---- host code that is also device code ----------------------------------------------------------

# For each source: one of its assertions, and a change that makes it fail.
DEVICE_SOURCES = {
    "schedule_device": ("ring_num_steps(4) == 6", "ring_num_steps(4) == 7"),
    "float_bits_device": ("(1.0f) == 0x3c00", "(1.0f) == 0x3c01"),
}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def compile_device_source(command: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++20", "-I", str(CSRC)]
    return subprocess.run([*command, *flags, str(source)], capture_output=True, text=True)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", DEVICE_SOURCES)
def test_device_source_compiled_by_nvcc_has_no_warning(
    source: str, arch: str, tmp_path: Path
) -> None:
    flags = [f"-arch={arch}", "-Werror", "all-warnings", "-o", str(tmp_path / "s.o")]
    done = compile_device_source(["nvcc", "-c", *flags], CASES / f"{source}.cu")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("source", DEVICE_SOURCES)
def test_device_source_compiled_by_host_compiler_has_no_warning(source: str) -> None:
    command = [*CXX, "-x", "c++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = compile_device_source(command, CASES / f"{source}.cu")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", ["host", pytest.param("nvcc", marks=needs_nvcc)])
@pytest.mark.parametrize("source", DEVICE_SOURCES)
def test_device_source_wrong_assertion_is_found(source: str, compiler: str, tmp_path: Path) -> None:
    right, wrong = DEVICE_SOURCES[source]
    text = (CASES / f"{source}.cu").read_text()
    assert right in text
    copy = tmp_path / f"{source}.cu"
    copy.write_text(text.replace(right, wrong))
    host = [*CXX, "-x", "c++", "-fsyntax-only"]
    nvcc = ["nvcc", "-c", "-arch=sm_90", "-o", str(tmp_path / "s.o")]
    done = compile_device_source(host if compiler == "host" else nvcc, copy)
    assert done.returncode != 0 and "static assertion failed" in done.stderr
