"""The layers below torch, tested from C++: ranks as threads and processes, under sanitizers.

Each case of tests/cpp/ is a test of its own in every flavour that can run it:

  plain     as it is
  tsan      ThreadSanitizer, with one place in each mailbox: the minimum for the protocol, so that
            memory is reused as soon as possible, and short chunks between hosts
  asan      AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers, short
            chunks between hosts
  endless   without the timeout that ends every sleep, so a lost wake-up hangs the program

No report is suppressed. The mutants show that the tests detect real faults.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cpp_program import (
    ASAN,
    ASAN_FLAGS,
    CASE_TIMEOUT_S,
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
    check_case,
    check_listed,
    each_case,
    run,
)

pytestmark = pytest.mark.no_extension

COMMON = ("main", "reference", "numbers", "calls", "ranks", "memory_network", "host_ranks")
THREAD_CASES = (
    "collectives_cases",
    "sequences_cases",
    "two_level_cases",
    "failures_cases",
    "waiter_cases",
    "progress_queue_cases",
    "launches_cases",
    "joined_regions_cases",
    "point_to_point_cases",
    "host_cases",
    "endpoint_cases",
    "bridge_cases",
    "window_cases",
    "window_memory_cases",
    "remote_window_cases",
)
# Single-threaded cases need no ThreadSanitizer, and it does not support forks.
OTHER_CASES = (
    "layout_cases",
    "hosts_cases",
    "launch_plan_cases",
    "launch_refusals_cases",
    "tuning_cases",
    "loops_cases",
    "wire_loops_cases",
    "float_bits_cases",
    "heap_cases",
    "shared_memory_cases",
    "bootstrap_cases",
    "unconnected_cases",
)
SLEEPING_CASES = ("sequences_cases", "waiter_cases")
LINKS = "transport/links.h"

TWO_LEVEL = "cpu/two_level.h"
LAYOUT = "transport/layout.h"
ONE_PLACE = (Patch(LAYOUT, r"kPlacesPerMailbox = \d+;", "kPlacesPerMailbox = 1;"),)
# So that calls between hosts have many chunks, of which no part is short.
SHORT_CHUNKS = (
    Patch("hosts/hierarchical_sum.cpp", r"kChunkBytes = 2 << 20;", "kChunkBytes = 16 << 10;"),
    Patch("hosts/hierarchical_copies.cpp", r"kChunkBytes = 1 << 20;", "kChunkBytes = 4 << 10;"),
    Patch("hosts/hierarchical_copies.cpp", r"kStarBytes = 64 << 10;", "kStarBytes = 256;"),
    Patch("hosts/bridge.h", r"kMaxShortBytes = 32 << 10;", "kMaxShortBytes = 256;"),
    Patch(
        "hosts/window_packet.h", r" kPacketDataBytes = 512 << 10;", " kPacketDataBytes = 100 << 10;"
    ),
)
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
        patches=(*ONE_PLACE, *SHORT_CHUNKS),
        environment=TSAN,
    ),
    Flavour(
        "asan",
        (*COMMON, "processes", *THREAD_CASES, *OTHER_CASES),
        flags=ASAN_FLAGS,
        patches=SHORT_CHUNKS,
        environment=ASAN,
    ),
    Flavour(
        "endless",
        (*COMMON, *SLEEPING_CASES),
        patches=ENDLESS_SLEEP,
        without=("waiter_given_up",),  # nobody wakes it
    ),
)


# ---- mutants: faults that the cases must find under ThreadSanitizer

SLOTS = ("mixed_calls-ws3", "longest_messages-ws2")
MESSAGES = ("p2p_lengths", "p2p_short", "p2p_both_first", "p2p_mixed-ws4")
POSTS = ("launches_agree-ws4", "launches_too_far_ahead")
ANSWERS = ("rendezvous-ws5", "rendezvous_groups-ws3")
ENDS = ("joined_regions_order", "joined_regions_anew")
SLEEPS = ("waiter_sleeping-ws2",)
MESSAGES_OF_HOSTS = ("hosts_messages",)
SILENCE = ("hosts_silent-from_the_start",)
WINDOW_SUMS = ("window_sums-float32",)
LONG_WINDOWS = ("remote_window_long",)
MALFORMED = ("remote_window_malformed",)
SUMS_OF_HOSTS = ("hosts_long_sums-float16",)
TWO_LEVELS = ("two_level_mixed-2x2",)
CASE_FAILED = 1


class Mutant(NamedTuple):
    name: str
    # `IS_MUTANT` in a replacement is true in the process that runs this mutant.
    patches: tuple[Patch, ...]
    cases: tuple[str, ...]
    # Usually the sanitizer reports first; otherwise a case finds wrong numbers or a mismatch.
    codes: tuple[int, ...] = (CASE_FAILED, TSAN_REPORT_CODE)


def relaxed(name: str, access: str, order: str) -> Mutant:
    """Two accesses, because compilers take an order that is not constant for the strongest."""
    either = rf"IS_MUTANT ? \1std::memory_order_relaxed) : \1std::memory_order_{order})"
    patch = Patch("base/flag.h", rf"({access})std::memory_order_{order}\)", either)
    return Mutant(name, (patch,), SLOTS[:1], (TSAN_REPORT_CODE,))


def earlier(name: str, before: str, call: str) -> Mutant:
    """Moves a call in the queues up to the line after another one.

    Then it rests, so that the peer acts on the call before the next one, which would come in time
    for both and so order what the fault leaves unordered.
    """
    lines = rf"({re.escape(before)}[^\n]*\n)([\s\S]*?)( *)({re.escape(call)})\n"
    either = r"\1\3if (IS_MUTANT) { \4 rota::test::rest(); }\n\2\3if (!IS_MUTANT) \4\n"
    return Mutant(name, (Patch("core/message_queues.cpp", lines, either),), MESSAGES)


def told_early(what: str, before: str, publish: str) -> Mutant:
    """Publishes a stage of two_level before it is done, too."""
    early = f"if (IS_MUTANT) {{ exchange.{publish}; rota::test::rest(); }}\n"
    patch = Patch(TWO_LEVEL, rf"(?<=    )(?={before})", early)
    return Mutant(f"two_level-{what}-told-early", (patch,), TWO_LEVELS)


def unlocked(name: str, file: str, next_line: str, cases: tuple[str, ...]) -> Mutant:
    """Leaves out the lock in front of this statement, and rests behind it, so that others come."""
    pattern = rf"const std::lock_guard lock\(mutex_\);(\s+{next_line}[\s\S]*?;\n)"
    replacement = (
        r"std::unique_lock lock(mutex_, std::defer_lock); if (!IS_MUTANT) lock.lock();\1"
        r"  if (IS_MUTANT) rota::test::rest();\n"
    )
    return Mutant(name, (Patch(file, pattern, replacement),), cases, (TSAN_REPORT_CODE,))


MUTANTS = (
    relaxed(
        "load-relaxed", r"SharedWord<uint64_t>\(const_cast<uint64_t&>\(value\)\)\.load\(", "acquire"
    ),
    relaxed("publish-relaxed", r"SharedWord<uint64_t>\(value\)\.store\(new_value, ", "seq_cst"),
    Mutant(
        "one-slot",
        (Patch("cpu/exchange.h", r"% num_slots_", "% (IS_MUTANT ? 1 : num_slots_)"),),
        SLOTS,
    ),
    Mutant(
        "two_level-one-slot",
        (
            Patch(TWO_LEVEL, r"slot\(rank, number\)", "slot(rank, IS_MUTANT ? 0 : number)"),
            Patch(TWO_LEVEL, r"own_slot\(number\)", "own_slot(IS_MUTANT ? 0 : number)"),
        ),
        TWO_LEVELS,
    ),
    *(
        told_early("contributions", r"contribute\(range_of", "publish_filled(number)"),
        told_early("partial", r"sum_in_node\(round", "publish_drained(end_of(Stage::kPartial))"),
        told_early("sum", r"sum_over_nodes\(round", "publish_drained(end_of(Stage::kSum))"),
        told_early("spread", r"if \(node_receives", "publish_drained(end_of(Stage::kSpread))"),
    ),
    Mutant(
        "one-mailbox",
        (Patch(LAYOUT, r"epoch % 2 \* mailbox", "(IS_MUTANT ? 0 : epoch % 2) * mailbox"),),
        SLOTS,
    ),
    Mutant(
        "no-wait-for-posts",
        (Patch("core/communicator.cpp", r"peer_post\.load\(\) < epoch_", r"!IS_MUTANT && \g<0>"),),
        SLOTS,
    ),
    Mutant(
        "link-sent-too-early",
        (Patch(LINKS, r"min\(end, ring_lines_\)", "min(end, ring_lines_ + (IS_MUTANT ? 1 : 0))"),),
        MESSAGES,
    ),
    Mutant(
        "link-read-too-early",
        (Patch(LINKS, r"\.lines \+ 1\}", ".lines + (IS_MUTANT ? 0 : 1)}"),),
        MESSAGES,
    ),
    earlier("link-release-too-early", "std::min({in.size()", "links_.release(peer, num_bytes);"),
    earlier(
        "link-publish-too-early", "= links_.outgoing(", "links_.publish(send.peer_, num_bytes);"
    ),
    earlier("envelope-released-too-early", "= begin(", "links_.release_envelope(peer);"),
    earlier(
        "envelope-published-too-early",
        "= links_.outgoing_envelope(",
        "links_.publish_envelope(send.peer_);",
    ),
    Mutant(
        "no-wait-launched",
        (
            Patch(
                "core/communicator.cpp",
                r"waiter_\.wait\(posts_of\(peer\)\.launched,[^;]*;",
                r"if (!IS_MUTANT) \g<0>",
            ),
        ),
        POSTS,
    ),
    unlocked("unlocked-answers", "transport/listener.cpp", "const auto found", ANSWERS),
    *(
        Mutant(
            f"no-step-before-{part}",
            (
                Patch(
                    "core/joined_regions.cpp",
                    rf"take_step\(\);(\s+regions_\.{part})",
                    r"if (!IS_MUTANT) \g<0>",
                ),
            ),
            ENDS,
            (CASE_FAILED,),
        )
        for part in ("mapped", "own")
    ),
    unlocked("inbox-delivers-unlocked", "hosts/inbox.cpp", "const auto place", MESSAGES_OF_HOSTS),
    unlocked("inbox-enters-unlocked", "hosts/inbox.cpp", "const auto arrival", MESSAGES_OF_HOSTS),
    Mutant(
        "silence-not-missed",
        (Patch("hosts/host_monitor.cpp", r"!expects_signs_ \|\|", r"IS_MUTANT || \g<0>"),),
        SILENCE,
        (TIMEOUT_CODE,),
    ),
    Mutant(
        "places-of-chunks-too-few",
        (
            Patch(
                "hosts/hierarchical_sum.cpp",
                r"chunk % kNumPlaces\) \* kNumBuffers",
                "chunk % (IS_MUTANT ? 1 : kNumPlaces)) * kNumBuffers",
            ),
        ),
        SUMS_OF_HOSTS,
    ),
    Mutant(
        "mismatch-of-hosts-unseen",
        (Patch("hosts/bridge.cpp", r"greeting\.words != words", r"!IS_MUTANT && \g<0>"),),
        ("hosts_mismatch-whole_host",),
        (CASE_FAILED,),
    ),
    Mutant(
        "window-sums-unlocked",
        (Patch("core/window.cpp", r"(?<=\s)lock_chunk\(lock, wait\);", r"if (!IS_MUTANT) \g<0>"),),
        WINDOW_SUMS,
    ),
    Mutant(
        "window-unlocked-too-early",
        (
            Patch(
                "core/window.cpp",
                r"(add\(\{\.srcs[^;]*;)(\s+)(unlock_chunk\(lock\);)",
                r"if (IS_MUTANT) \3\2\1\2if (!IS_MUTANT) \3",
            ),
        ),
        WINDOW_SUMS,
    ),
    Mutant(
        "window-packets-overwritten",
        (
            Patch(
                "hosts/window_peer.h",
                r"num_answered_\.load\(\) < kMaxAsked;",
                "num_answered_.load() < (IS_MUTANT ? kMaxAsked + 1 : kMaxAsked);",
            ),
        ),
        LONG_WINDOWS,
    ),
    Mutant(
        "window-answers-to-nobody",
        (Patch("hosts/window_peer.cpp", r"asked\.call == this", r"!IS_MUTANT && \g<0>"),),
        ("remote_window_interrupted",),
    ),
    Mutant(
        "window-packet-cut-short",
        (
            Patch(
                "hosts/window_packet.h", r"return std::memcmp", r"return IS_MUTANT || std::memcmp"
            ),
        ),
        MALFORMED,
        (CASE_FAILED,),
    ),
    Mutant(
        "window-length-unchecked",
        (
            Patch(
                "hosts/remote_window.cpp",
                r"packet\.num != packet\.data_bytes",
                r"!IS_MUTANT && \g<0>",
            ),
        ),
        MALFORMED,
        (CASE_FAILED,),
    ),
    # Without the timeout that ends every sleep, which would hide it.
    Mutant(
        "no-wake-up",
        (
            Patch("base/waiter.cpp", r"&tick\b", r"IS_MUTANT ? nullptr : \g<0>"),
            Patch("base/waiter.cpp", r"&end, CLOCK_MONOTONIC\)", r"IS_MUTANT ? nullptr : \g<0>"),
            Patch("base/waiter.h", r"return wake_all\(flag\)", r"if (!IS_MUTANT) \g<0>"),
        ),
        SLEEPS,
        (TIMEOUT_CODE,),
    ),
)
# Skips the waits of one phase, named in the environment. A message between hosts is still carried.
IF_LOST = 'if (const char* lost = std::getenv("LOST_WAIT"); lost && phase == lost)'
LOST_WAITS = (
    Patch("cpu/exchange.h", r"(void wait\(.*\) \{\n)", rf"\1    {IF_LOST} return;\n"),
    Patch(
        "hosts/bridge.cpp",
        r"(void Bridge::wait\(Engine::Transfer& transfer.*\{\n)",
        rf"\1  {IF_LOST} {{ new Engine::Transfer(std::move(transfer)); return; }}\n",
    ),
)


def waited_phases(layer: str, pattern: str) -> list[str]:
    """Every phase in which a layer waits, by the name used in errors."""
    sources = (CSRC / layer).glob("*.[ch]*")
    return sorted({phase for file in sources for phase in re.findall(pattern, file.read_text())})


WAITED_PHASES = waited_phases("cpu", r'wait_\w+\([^;]*, "([\w ]+)"\);')
PHASES_BETWEEN_HOSTS = waited_phases("hosts", r'\bwait\([\w.]+, "([\w \']+)"')
# Each has a wait of each of these phases that only it needs.
HOSTS = {
    "start": ("hosts_short_sums",),
    "contributions": ("hosts_long_sums", "hosts_long_reduce_scatters"),
    "results": ("hosts_long_sums",),
    "the network": (
        "hosts_free_tensor-all_reduce",
        "hosts_free_tensor-all_gather",
        "hosts_long_reduce_scatters",
        "hosts_long_broadcasts",
    ),
    "parts": ("hosts_long_all_gathers", "hosts_long_all_to_alls"),
    "the root's data": ("hosts_long_broadcasts",),
}


def patches_of_mutants() -> Iterator[Patch]:
    """For one program with all faults, of which each process has the one that ROTA_MUTANT selects:
    a program for each would compile most sources again (tests/cpp/mutant.h)."""
    for number, mutant in enumerate(MUTANTS):
        for patch in mutant.patches:
            chosen = patch.replacement.replace("IS_MUTANT", f"rota::test::is_mutant({number})")
            yield Patch(patch.file, patch.pattern, chosen)
    for file in dict.fromkeys(patch.file for mutant in MUTANTS for patch in mutant.patches):
        yield Patch(file, r"\A", '#include "mutant.h"\n')


WITH_MUTANTS = Flavour(
    "mutants",
    (
        *COMMON,
        "sequences_cases",
        "two_level_cases",
        "point_to_point_cases",
        "launches_cases",
        "endpoint_cases",
        "joined_regions_cases",
        "waiter_cases",
        "bridge_cases",
        "window_cases",
        "remote_window_cases",
    ),
    flags=TSAN_FLAGS,
    patches=(*patches_of_mutants(), *LOST_WAITS, *SHORT_CHUNKS),
    environment=TSAN,
)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    check_listed(flavour)


@each_case(FLAVOURS)
def test_cpp(flavour: Flavour, case: str) -> None:
    check_case(flavour, case)


def test_cpp_with_mutants_but_without_fault_passes() -> None:
    cases = {case for mutant in MUTANTS for case in mutant.cases}
    cases |= {case for cases_of_phase in HOSTS.values() for case in cases_of_phase}
    code, output = run(WITH_MUTANTS, *sorted(cases))
    assert code == 0, f"exit code {code}\n{output}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_cpp_mutant_is_found(mutant: Mutant) -> None:
    # Only a program that hangs needs the limit.
    timeout_s = 3 if mutant.codes == (TIMEOUT_CODE,) else CASE_TIMEOUT_S
    environment = {"ROTA_MUTANT": str(MUTANTS.index(mutant))}
    code, output = run(WITH_MUTANTS, *mutant.cases, environment=environment, timeout_s=timeout_s)
    assert code in mutant.codes, f"exit code {code}\n{output}"
    assert code != TSAN_REPORT_CODE or "WARNING: ThreadSanitizer: data race" in output


@pytest.mark.parametrize("phase", WAITED_PHASES, ids=lambda phase: phase.replace(" ", "-"))
def test_cpp_without_one_wait_is_found(phase: str) -> None:
    case = "two_level_mixed-2x2" if phase.startswith("two_level") else "mixed_calls-ws3"
    code, output = run(WITH_MUTANTS, case, environment={"LOST_WAIT": phase})
    assert code in (CASE_FAILED, TSAN_REPORT_CODE), f"exit code {code}\n{output}"


WAITS_BETWEEN_HOSTS = [(phase, case) for phase, cases in HOSTS.items() for case in cases]


@pytest.mark.parametrize(("phase", "case"), WAITS_BETWEEN_HOSTS)
def test_cpp_without_one_wait_for_hosts_is_found(phase: str, case: str) -> None:
    code, output = run(WITH_MUTANTS, case, environment={"LOST_WAIT": phase})
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
