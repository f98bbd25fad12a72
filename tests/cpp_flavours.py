"""The flavours in which the programs of tests/cpp/ are compiled."""

from __future__ import annotations

from cpp_mutants import LAYOUT, patches_of_mutants
from cpp_program import (
    ASAN,
    ASAN_FLAGS,
    CASES,
    TSAN,
    TSAN_FLAGS,
    Flavour,
    Patch,
)

COMMON = ("main", "reference", "numbers", "calls", "ranks", "memory_network", "host_ranks")
# Single-threaded cases need no ThreadSanitizer, and it does not support forks.
OTHER_CASES = (
    "layout_cases",
    "links_cases",
    "hosts_cases",
    "two_level_cases",
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
    "cores_cases",
    "slot_stores_cases",
)
THREAD_CASES = tuple(
    path.stem
    for path in sorted(CASES.glob("*_cases.cpp"))
    if path.stem not in OTHER_CASES and not path.stem.startswith("kernel_")
)
ALL = (*COMMON, "processes", *THREAD_CASES, *OTHER_CASES)
SLEEPING_CASES = ("sequences_cases", "waiter_cases")
ONE_PLACE = (Patch(LAYOUT, r"kPlacesPerMailbox = \d+;", "kPlacesPerMailbox = 1;"),)
# So that calls between hosts have many chunks, of which no part is short.
SHORT_CHUNKS = (
    Patch("hosts/hierarchical_sum.cpp", r"kSumChunkBytes = 2 << 20;", "kSumChunkBytes = 16 << 10;"),
    Patch(
        "hosts/hierarchical_copies.cpp", r"kCopyChunkBytes = 1 << 20;", "kCopyChunkBytes = 4 << 10;"
    ),
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

TSAN_PROGRAM = Flavour(
    "tsan",
    (*COMMON, *THREAD_CASES),
    flags=TSAN_FLAGS,
    patches=(*ONE_PLACE, *SHORT_CHUNKS, *patches_of_mutants()),
    environment=TSAN,
    without=("every_algorithm-ws64",),  # two minutes; 16 ranks take the same ways
)
FLAVOURS = (
    Flavour("plain", ALL),
    TSAN_PROGRAM,
    Flavour(
        "asan",
        ALL,
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
