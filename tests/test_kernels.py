"""The CUDA kernels' bodies, run on the CPU: ranks, blocks and lanes are threads (tests/cpp/).

Each case is a test of its own in every flavour that can run it:

  tsan   ThreadSanitizer, while threads yield at random and one rank at a time is late
  asan   AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers

No report is suppressed. The mutants at the end (kernel_mutants.py) show that the cases detect
faults; the end of the log lists which check caught each mutant.
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
    cases_of,
    check_case,
    check_listed,
    each_case,
    run,
)
from kernel_mutants import LAYOUT, Mutant, MutatedFile, make_mutants, sites_of

pytestmark = pytest.mark.no_extension

COMMON = ("main", "reference", "numbers", "calls", "ranks", "kernel_calls")
LAUNCHES = (
    "kernel_launch",
    "kernel_launch_direct",
    "kernel_launch_ring",
    "kernel_launch_groups",
)
THREAD_CASES = (
    "kernel_cases",
    "kernel_bits_cases",
    "kernel_bucket_cases",
    "kernel_sequences_cases",
    "kernel_failures_cases",
)
ALL = (*COMMON, *LAUNCHES, *THREAD_CASES)

FLAVOURS = (
    Flavour("kernels-tsan", ALL, flags=TSAN_FLAGS, environment=TSAN),
    Flavour("kernels-asan", (*ALL, "kernel_layout_cases"), flags=ASAN_FLAGS, environment=ASAN),
)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_kernel_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    check_listed(flavour)


@each_case(FLAVOURS)
def test_kernel(flavour: Flavour, case: str) -> None:
    check_case(flavour, case)


# ---- mutants -------------------------------------------------------------------------------------

# The cases that must catch a file's mutants; for other files, any case may.
CASES_OF_FILE = {
    f"cuda/{name}.h": (f"kernel_mutants-{name}",)
    for name in (
        "one_shot",
        "two_shot",
        "two_shot_in_place",
        "ring",
        "ordered_ring",
        "hierarchical",
        "low_latency",
        "point_to_point",
    )
} | {
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
)
# Time limit of a case with a mutant; each takes 3 s at most on two cores.
MUTANT_TIMEOUT_S = 30.0


def mutated_program(changes: tuple[MutatedFile, ...]) -> Flavour:
    return Flavour(
        "kernels-mutants",
        (
            *COMMON,
            *LAUNCHES,
            "kernel_mutants_cases",
            "kernel_failures_cases",
            "kernel_bucket_cases",
        ),
        flags=TSAN_FLAGS,
        patches=changes,
        environment=TSAN,
    )


def what_caught(program: Flavour, mutant: Mutant) -> str | None:
    """The check that failed and its case; None if no case failed."""
    for case in CASES_OF_FILE.get(mutant.file, cases_of(program)):
        environment = {"ROTA_MUTANT": str(mutant.number)}
        code, output = run(program, case, timeout_s=MUTANT_TIMEOUT_S, environment=environment)
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
    mutants, changes = make_mutants()
    program = mutated_program(changes)
    cases = cases_of(program)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(lambda case: run(program, case), cases))
        for case, (code, output) in zip(cases, results, strict=True):
            assert code == 0, f"{case} fails without a fault: exit code {code}\n{output}"
        caught = list(pool.map(lambda mutant: what_caught(program, mutant), mutants))
    lines = [
        f"{mutant.where:<28}  {mutant.code[:64]:<64}  {mutant.fault:<18}  {check or 'NOT CAUGHT'}"
        for mutant, check in zip(mutants, caught, strict=True)
    ]
    print_at_end(f"{len(mutants)} mutants of the CUDA kernels and what caught them", lines)
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
