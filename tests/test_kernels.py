"""The CUDA kernels' bodies, run on the host: ranks, blocks and lanes are threads (tests/cpp/).

Each case is a test of its own in every flavour that can run it:

  plain  as it is
  tsan   ThreadSanitizer, while threads yield at random and one rank at a time is late
  asan   AddressSanitizer with leak check, UndefinedBehaviorSanitizer, checked containers

No report is suppressed.
"""

from __future__ import annotations

import pytest

from cpp_program import ASAN, ASAN_FLAGS, TSAN, TSAN_FLAGS, Flavour, cases_of, run

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
    "kernel_sequences_cases",
    "kernel_failures_cases",
)
ALL = (*COMMON, *LAUNCHES, *THREAD_CASES)

FLAVOURS = (
    Flavour("kernels-plain", (*ALL, "kernel_layout_cases")),
    Flavour("kernels-tsan", ALL, flags=TSAN_FLAGS, environment=TSAN),
    Flavour("kernels-asan", (*ALL, "kernel_layout_cases"), flags=ASAN_FLAGS, environment=ASAN),
)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_kernel_program_lists_the_cases_that_pytest_lists(flavour: Flavour) -> None:
    code, output = run(flavour)
    assert code == 0, output
    names = output.split()
    assert sorted(names) == sorted(cases_of(flavour))
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("flavour", "case"),
    [
        pytest.param(flavour, case, id=f"{flavour.name}-{case}")
        for flavour in FLAVOURS
        for case in cases_of(flavour)
    ],
)
def test_kernel(flavour: Flavour, case: str) -> None:
    code, output = run(flavour, case)
    assert code == 0 and "Sanitizer" not in output and "runtime error" not in output, (
        f"exit code {code}\n{output}"
    )
