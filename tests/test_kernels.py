"""The CUDA kernels' bodies, run on the CPU: ranks, blocks and lanes are threads (tests/cpp/).

Each case is a test of its own in every flavour that can run it:

  tsan   ThreadSanitizer, while threads yield at random and one rank at a time is late
  asan   AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers

No report is suppressed. The mutants at the end (kernel_mutants.py) show that the cases detect
faults; the end of the log lists which check caught each mutant. They are compiled into tsan's
program, since a second one takes minutes to compile: where none is chosen, its accesses are the
product's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpp_program import (
    ASAN,
    ASAN_FLAGS,
    TIMEOUT_CODE,
    TSAN,
    TSAN_FLAGS,
    TSAN_REPORT_CODE,
    Flavour,
    case_names,
    check_case,
    check_listed,
    each_case,
    run,
)
from kernel_mutants import LAYOUT, Mutant, make_mutants, sites_of

pytestmark = pytest.mark.no_extension

COMMON = ("main", "reference", "numbers", "calls", "ranks", "kernel_calls")
LAUNCHES = (
    "kernel_launch",
    "kernel_launch_direct",
    "kernel_launch_partials",
)
THREAD_CASES = (
    "kernel_cases",
    "kernel_bits_cases",
    "kernel_bucket_cases",
    "kernel_sequences_cases",
    "kernel_failures_cases",
)
ALL = (*COMMON, *LAUNCHES, *THREAD_CASES)

MUTANTS, MUTATED_FILES = make_mutants()

TSAN_PROGRAM = Flavour(
    "kernels-tsan",
    (*ALL, "kernel_mutants_cases"),
    flags=TSAN_FLAGS,
    patches=MUTATED_FILES,
    environment=TSAN,
)
FLAVOURS = (
    TSAN_PROGRAM,
    Flavour("kernels-asan", (*ALL, "kernel_layout_cases"), flags=ASAN_FLAGS, environment=ASAN),
)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_kernel_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    check_listed(flavour)


@each_case(FLAVOURS)
def test_kernel(flavour: Flavour, case: str) -> None:
    check_case(flavour, case)


# ---- mutants -------------------------------------------------------------------------------------

# The cases that must catch a file's mutants; for other files, any of CASES_OF_MUTANTS may.
CASES_OF_FILE = {
    f"cuda/{name}.h": (f"kernel_mutants-{name}",)
    for name in (
        "one_shot",
        "two_shot",
        "two_shot_in_place",
        "ring",
        "ordered_ring",
        "hierarchical",
        "point_to_point",
    )
} | {
    "cuda/low_latency.h": ("kernel_mutants-low_latency", "kernel_timeout", "kernel_retired"),
    "cuda/elements.h": ("kernel_mutants-tree",),
    "cuda/shards.h": ("kernel_mutants-reduce_scatter", "kernel_mutants-all_gather"),
    "cuda/wait.h": (
        "kernel_timeout",
        "kernel_abort",
        "kernel_another_launch",
        "kernel_stall_and_departure",
    ),
    "cuda/pack.h": ("kernel_bucket-once",),
    "cuda/unpack.h": ("kernel_bucket-once",),
    "base/fixed_tree.h": ("kernel_bucket-once",),
    LAYOUT: ("kernel_mutants-ring", "kernel_mutants-low_latency"),
}
CASES_OF_MUTANTS = (
    *case_names("kernel_mutants_cases"),
    *case_names("kernel_failures_cases"),
    *case_names("kernel_bucket_cases"),
)
# Parts of the messages of failing cases.
CHECKS = (
    "wrong number",
    "did not give up",
    "no failure",
    "no word",
    "timeout awaiting",
    "another launch",
    "sum of squares",
    "at rest",
    "spoiled",
    "wrote to a peer",
)
# Time limit of a case with a mutant; each takes 3 s at most on two cores.
MUTANT_TIMEOUT_S = 30.0


def what_caught(mutant: Mutant) -> str | None:
    """The check that failed and its case; None if no case failed."""
    for case in CASES_OF_FILE.get(mutant.file, CASES_OF_MUTANTS):
        environment = {"ROTA_MUTANT": str(mutant.number)}
        code, output = run(TSAN_PROGRAM, case, timeout_s=MUTANT_TIMEOUT_S, environment=environment)
        if code == 0:
            continue
        if code == TSAN_REPORT_CODE:
            assert "ThreadSanitizer: data race" in output, output
            return f"data race in {case}"
        if code == TIMEOUT_CODE:
            return f"no end of {case}"
        assert code == 1, f"exit code {code} of {case}\n{output}"
        for check in CHECKS:
            if check in output:
                return f"{check} in {case}"
        raise AssertionError(f"{case} failed in a way that no mutant should\n{output}")
    return None


def test_every_kernel_mutant_is_caught(
    print_at_end: Callable[[str, list[str]], None],
) -> None:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        caught = list(pool.map(what_caught, MUTANTS))
    lines = [
        f"{mutant.where:<28}  {mutant.code[:64]:<64}  {mutant.fault:<18}  {check or 'NOT CAUGHT'}"
        for mutant, check in zip(MUTANTS, caught, strict=True)
    ]
    print_at_end(f"{len(MUTANTS)} mutants of the CUDA kernels and what caught them", lines)
    survivors = [line for line, check in zip(lines, caught, strict=True) if check is None]
    assert not survivors, "\n".join(survivors)


@pytest.mark.parametrize(
    ("statement", "faults"),
    [
        ("block.sync()", ["left out"]),
        ("if (is_last) words.put_to_rest()", ["left out"]),
        ("if (block.all(x)) links.publish(world, 0)", ["no barrier", "left out"]),
        (
            "links.wait(ToSend{world, 0}, ToRead{schedule::only(1), 1})",
            ["no wait", "no ToSend", "no ToRead"],
        ),
        ("SystemWord<int>(flag).load(MemoryOrder::acquire)", ["acquire -> relaxed"]),
        (
            "SystemWord<int>(flag).fetch_add(1, MemoryOrder::acq_rel)",
            ["acq_rel -> relaxed", "acq_rel -> acquire", "acq_rel -> release"],
        ),
    ],
)
def test_kernel_mutants_of_new_code_are_found(statement: str, faults: list[str]) -> None:
    sites = sites_of("cuda/new.h", f"void f() {{\n  {statement};\n}}\n")
    assert [site.fault for site in sites] == faults


@pytest.mark.parametrize(
    "statement",
    ["__syncthreads()", "std::atomic_thread_fence(order)", "block->sync()", "x.exchange(1)"],
)
def test_kernel_code_that_orders_without_mutant_is_refused(statement: str) -> None:
    with pytest.raises(AssertionError, match=r"no mutant of cuda/new\.h:2"):
        sites_of("cuda/new.h", f"void f() {{\n  {statement};\n}}\n")
