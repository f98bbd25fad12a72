"""The layers below torch, tested from C++: ranks as threads and processes, under sanitizers.

Each case of tests/cpp/ is a test of its own in every flavour that can run it:

  plain     as it is
  tsan      ThreadSanitizer, with one place in each mailbox: the minimum for the protocol, so that
            memory is reused as soon as possible
  asan      AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers
  endless   without the timeout that ends every sleep, so a lost wake-up hangs the program

No report is suppressed. The mutants at the end show that the tests detect real faults.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cpp_program import (
    ASAN,
    ASAN_FLAGS,
    CASES,
    CSRC,
    CXX,
    CXX_FLAGS,
    TIMEOUT_CODE,
    TSAN,
    TSAN_FLAGS,
    TSAN_REPORT_CODE,
    Flavour,
    Patch,
    cases_of,
    check_case,
    check_listed,
    run,
)

pytestmark = pytest.mark.no_extension

COMMON = ("main", "reference", "numbers", "calls", "ranks")
THREAD_CASES = (
    "collectives_cases",
    "sequences_cases",
    "failures_cases",
    "waiter_cases",
    "progress_queue_cases",
    "launches_cases",
    "joined_regions_cases",
    "point_to_point_cases",
    "host_cases",
    "endpoint_cases",
)
# Single-threaded cases need no ThreadSanitizer, and it does not support forks.
OTHER_CASES = (
    "layout_cases",
    "launch_plan_cases",
    "launch_refusals_cases",
    "tuning_cases",
    "loops_cases",
    "wire_loops_cases",
    "float_bits_cases",
    "heap_cases",
    "shared_memory_cases",
    "bootstrap_cases",
)
SLEEPING_CASES = ("sequences_cases", "waiter_cases")
LINKS = "transport/links.h"

LAYOUT = "transport/layout.h"
ONE_PLACE = (Patch(LAYOUT, r"kPlacesPerMailbox = \d+;", "kPlacesPerMailbox = 1;"),)
ENDLESS_SLEEP = (
    Patch("base/waiter.cpp", r"&tick\b", "nullptr"),
    Patch("base/waiter.cpp", r"&end, CLOCK_MONOTONIC\)", "nullptr, CLOCK_MONOTONIC)"),
)

FLAVOURS = (
    Flavour("plain", (*COMMON, "processes", *THREAD_CASES, *OTHER_CASES)),
    Flavour(
        "tsan",
        (*COMMON, *THREAD_CASES),
        flags=TSAN_FLAGS,
        patches=ONE_PLACE,
        environment=TSAN,
    ),
    Flavour(
        "asan",
        (*COMMON, "processes", *THREAD_CASES, *OTHER_CASES),
        flags=ASAN_FLAGS,
        environment=ASAN,
    ),
    Flavour("endless", (*COMMON, *SLEEPING_CASES), patches=ENDLESS_SLEEP),
)


def mutant(name: str, *patches: Patch, cases: str = "sequences_cases") -> Flavour:
    """The program under ThreadSanitizer, with a fault that must be detected."""
    return Flavour(
        f"mutant-{name}",
        (*COMMON, cases),
        flags=TSAN_FLAGS,
        patches=patches,
        environment=TSAN,
    )


def relaxed(name: str, order: str) -> Flavour:
    return mutant(name, Patch("base/flag.h", order, r"\g<1>std::memory_order_relaxed"))


WEAKENED_ORDERS = (
    relaxed("load-relaxed", r"(const_cast<uint64_t&>\(value\)\)\.load\()std::memory_order_acquire"),
    relaxed("publish-relaxed", r"(store\(new_value, )std::memory_order_\w+"),
)
EARLY_REUSES = (
    mutant("one-slot", Patch(LAYOUT, r"kNumSlots = \d+;", "kNumSlots = 1;")),
    mutant("one-mailbox", Patch(LAYOUT, r"epoch % 2 \* mailbox_bytes\(\)", "0")),
    mutant(
        "no-wait-for-posts",
        Patch("core/communicator.cpp", r"peer_post\.load\(\) < epoch_", "false"),
    ),
)
# Skips the waits of one phase, named in the environment, so one program serves for all phases.
LOST_WAIT = mutant(
    "lost-wait",
    Patch(
        "cpu/exchange.h",
        r"(void wait\(.*\) \{\n)",
        r'\1    if (phase == std::getenv("LOST_WAIT")) return;\n',
    ),
)
# Every phase in which executors wait, by the name used in errors.
WAITED_PHASES = sorted(
    {
        phase
        for source in (CSRC / "cpu").glob("*.cpp")
        for phase in re.findall(r'wait_\w+\([^;]*, "([\w ]+)"\);', source.read_text())
    }
)


def earlier(before: str, call: str) -> Patch:
    """Moves a call in the engine up to the line after another one."""
    lines = rf"({re.escape(before)}[^\n]*\n)([\s\S]*?)( *{re.escape(call)}\n)"
    return Patch("core/point_to_point.cpp", lines, r"\1\3\2")


EARLY_MESSAGES = (
    mutant(
        "link-slot-too-early",
        Patch(LINKS, r"sent_\[peer\] \+ 1 - kNum", "sent_[peer] - kNum"),
        cases="point_to_point_cases",
    ),
    mutant(
        "link-read-too-early",
        Patch(LINKS, r"received_\[peer\] \+ 1\}", "received_[peer]}"),
        cases="point_to_point_cases",
    ),
    mutant(
        "link-release-too-early",
        earlier("min(num_there", "links_.release(peer);"),
        cases="point_to_point_cases",
    ),
    mutant(
        "link-publish-too-early",
        earlier("min(num_free", "links_.publish(peer);"),
        cases="point_to_point_cases",
    ),
)
EARLY_POSTS = mutant(
    "no-wait-launched",
    Patch("core/communicator.cpp", r"waiter_\.wait\(posts_of\(peer\)\.launched,[^;]*;", ""),
    cases="launches_cases",
)
UNLOCKED_ANSWERS = mutant(
    "unlocked-answers",
    Patch(
        "transport/endpoint.cpp",
        r"const std::lock_guard lock\(mutex_\);(\s+const auto found)",
        r"\1",
    ),
    cases="endpoint_cases",
)
EARLY_ENDS = tuple(
    mutant(
        f"no-step-before-{part}",
        Patch("core/joined_regions.cpp", rf"take_step\(\);(\s+regions_\.{part})", r"\1"),
        cases="joined_regions_cases",
    )
    for part in ("mapped", "own")
)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    check_listed(flavour)


@pytest.mark.parametrize(
    ("flavour", "case"),
    [
        pytest.param(flavour, case, id=f"{flavour.name}-{case}")
        for flavour in FLAVOURS
        for case in cases_of(flavour)
    ],
)
def test_cpp(flavour: Flavour, case: str) -> None:
    check_case(flavour, case)


@pytest.mark.parametrize("flavour", WEAKENED_ORDERS, ids=lambda flavour: flavour.name)
def test_cpp_with_weakened_order_is_reported(flavour: Flavour) -> None:
    code, output = run(flavour, "mixed_calls-ws3")
    assert code == TSAN_REPORT_CODE, f"exit code {code}\n{output}"
    assert "WARNING: ThreadSanitizer: data race" in output


@pytest.mark.parametrize("flavour", EARLY_REUSES, ids=lambda flavour: flavour.name)
def test_cpp_with_early_reuse_is_found(flavour: Flavour) -> None:
    code, output = run(flavour, "mixed_calls-ws3", "longest_messages-ws2")
    # Usually the sanitizer reports first; otherwise a case finds wrong numbers or a mismatch.
    assert code in (1, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


@pytest.mark.parametrize("flavour", EARLY_MESSAGES, ids=lambda flavour: flavour.name)
def test_cpp_with_early_message_is_found(flavour: Flavour) -> None:
    code, output = run(flavour, "p2p_lengths", "p2p_both_first", "p2p_mixed-ws4")
    assert code in (1, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


@pytest.mark.parametrize("phase", WAITED_PHASES, ids=lambda phase: phase.replace(" ", "-"))
def test_cpp_without_one_wait_is_found(phase: str) -> None:
    code, output = run(LOST_WAIT, "mixed_calls-ws3", environment={"LOST_WAIT": phase})
    assert code in (1, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


def test_cpp_with_posts_written_anew_too_early_is_found() -> None:
    code, output = run(EARLY_POSTS, "launches_agree-ws4", "launches_too_far_ahead")
    assert code in (1, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


def test_cpp_with_unlocked_answers_is_reported() -> None:
    code, output = run(UNLOCKED_ANSWERS, "rendezvous-ws5", "rendezvous_groups-ws3")
    assert code == TSAN_REPORT_CODE, f"exit code {code}\n{output}"


@pytest.mark.parametrize("flavour", EARLY_ENDS, ids=lambda flavour: flavour.name)
def test_cpp_with_regions_let_go_too_early_is_found(flavour: Flavour) -> None:
    code, output = run(flavour, "joined_regions_order", "joined_regions_anew")
    assert code == 1, f"exit code {code}\n{output}"


def test_cpp_without_wake_up_stops() -> None:
    patches = (*ENDLESS_SLEEP, Patch("base/waiter.h", r"return wake_all\(flag\)", "return"))
    flavour = Flavour("mutant-no-wake-up", (*COMMON, *SLEEPING_CASES), patches=patches)
    code, _ = run(flavour, "waiter_sleeping-ws2", timeout_s=3)
    assert code == TIMEOUT_CODE


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
