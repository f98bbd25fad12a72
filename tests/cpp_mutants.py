"""Faults that the cases of tests/cpp/ must find under ThreadSanitizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from cpp_program import CSRC, TIMEOUT_CODE, TSAN_REPORT_CODE, Patch

LAYOUT = "transport/layout.h"
LINKS = "transport/links.h"
TWO_LEVEL = "cpu/two_level.h"
SLOTS = ("mixed_calls-ws3", "longest_messages-ws2")
FULL_LINKS = ("p2p_full-short", "p2p_full-long", "p2p_full-both")
MESSAGES = (*FULL_LINKS, "p2p_both_first", "p2p_mixed-ws4")
MESSAGES_OF_HOSTS = ("hosts_messages",)
WINDOW_SUMS = ("window_sums-float32",)
MALFORMED = ("remote_window_malformed",)
TWO_LEVELS = ("two_level_mixed-2x2",)
CASE_FAILED = 1


class Mutant(NamedTuple):
    name: str
    # `IS_MUTANT` in a replacement is true in the process that runs this mutant.
    patches: tuple[Patch, ...]
    cases: tuple[str, ...]
    # Usually the sanitizer reports first; otherwise a case finds wrong numbers or a mismatch.
    codes: tuple[int, ...] = (CASE_FAILED, TSAN_REPORT_CODE)


def mutant(
    name: str, cases: tuple[str, ...], file: str, pattern: str, replacement: str, *codes: int
) -> Mutant:
    """A fault in one place."""
    patches = (Patch(file, pattern, replacement),)
    return Mutant(name, patches, cases, *([codes] if codes else []))


def relaxed(name: str, access: str, order: str) -> Mutant:
    """Two accesses, because compilers take an order that is not constant for the strongest."""
    either = rf"IS_MUTANT ? \1std::memory_order_relaxed) : \1std::memory_order_{order})"
    patch = Patch("base/flag.h", rf"({access})std::memory_order_{order}\)", either)
    return Mutant(name, (patch,), SLOTS[:1], (TSAN_REPORT_CODE,))


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


# Replacements of what a process leaves out, or does not test, where it runs the mutant.
LEFT_OUT = r"if (!IS_MUTANT) \g<0>"
UNTESTED = r"!IS_MUTANT && \g<0>"
COMMUNICATOR = "core/communicator.cpp"
WINDOW = "core/window.cpp"
REGIONS = "core/joined_regions.cpp"
INBOX = "hosts/inbox.cpp"
SUM = "hosts/hierarchical_sum.cpp"
MUTANTS = (
    relaxed(
        "load-relaxed", r"SharedWord<uint64_t>\(const_cast<uint64_t&>\(value\)\)\.load\(", "acquire"
    ),
    relaxed("publish-relaxed", r"SharedWord<uint64_t>\(value\)\.store\(new_value, ", "seq_cst"),
    mutant("one-slot", SLOTS, "cpu/exchange.h", r"% num_slots_", "% (IS_MUTANT ? 1 : num_slots_)"),
    Mutant(
        "two_level-one-slot",
        (
            Patch(TWO_LEVEL, r"slot\(rank, number\)", "slot(rank, IS_MUTANT ? 0 : number)"),
            Patch(TWO_LEVEL, r"own_slot\(number\)", "own_slot(IS_MUTANT ? 0 : number)"),
        ),
        TWO_LEVELS,
    ),
    told_early("contributions", r"contribute\(range_of", "publish_filled(number)"),
    told_early("partial", r"sum_in_node\(round", "publish_drained(end_of(Stage::kPartial))"),
    told_early("sum", r"sum_over_nodes\(round", "publish_drained(end_of(Stage::kSum))"),
    told_early("spread", r"if \(node_receives", "publish_drained(end_of(Stage::kSpread))"),
    mutant(
        "one-mailbox",
        SLOTS,
        LAYOUT,
        r"epoch % 2 \* mailbox",
        "(IS_MUTANT ? 0 : epoch % 2) * mailbox",
    ),
    mutant("no-wait-for-posts", SLOTS, COMMUNICATOR, r"peer_post\.load\(\) < epoch_", UNTESTED),
    # A few posts: a rank that reads on and on keeps what it reads, until memory is full.
    mutant(
        "link-read-too-early",
        MESSAGES,
        LINKS,
        r"(link\.read\.number) \+ 1\}",
        r"IS_MUTANT && \1 < 9 ? 0 : \g<0>",
    ),
    mutant(
        "too-few-posts",
        FULL_LINKS,
        LINKS,
        r"geometry_\.num_posts\(\)",
        r"(\g<0> / (IS_MUTANT ? 8 : 1))",
    ),
    mutant(
        "cell-kept-and-given-back",
        MESSAGES,
        "transport/free_cells.h",
        r"return true;",
        "return !IS_MUTANT;",
    ),
    # In the line after the one that fills the cell, not at the end. Then it rests, so that the peer
    # acts on the call before the next one, which would come in time for both.
    mutant(
        "cell-published-too-early",
        MESSAGES,
        "core/message_queues.cpp",
        r"(bool is_end = [^\n]*\n)([\s\S]*?)( *)(links_\.publish\(send\.peer_, [^\n]*)\n",
        r"\1\3if (IS_MUTANT) { \4 rota::test::rest(); }\n\2\3if (!IS_MUTANT) \4\n",
    ),
    mutant(
        "no-wait-launched",
        ("launches_agree-ws4", "launches_too_far_ahead"),
        COMMUNICATOR,
        r"waiter_\.wait\(posts_of\(peer\)\.launched,[^;]*;",
        LEFT_OUT,
    ),
    mutant(
        "transfers-in-any-step",
        ("transfers_in_one_queue",),
        "schedule/direct.h",
        r"\.step = index_of",
        ".step = IS_MUTANT ? 0 : index_of",
        CASE_FAILED,
    ),
    unlocked(
        "unlocked-answers",
        "transport/listener.cpp",
        "const auto found",
        ("rendezvous-ws5", "rendezvous_groups-ws3"),
    ),
    *(
        mutant(
            f"no-step-before-{part}",
            ("joined_regions_order", "joined_regions_anew"),
            REGIONS,
            rf"take_step\(\);(\s+regions_\.{part})",
            LEFT_OUT,
            CASE_FAILED,
        )
        for part in ("mapped", "own")
    ),
    mutant(
        "kernels-end-told-too-early",
        ("joined_regions_failure",),
        "core/device_monitor.cpp",
        r"!kernels_\.have_ended\(\)",
        UNTESTED,
        CASE_FAILED,
    ),
    unlocked("inbox-delivers-unlocked", INBOX, "const auto place", MESSAGES_OF_HOSTS),
    unlocked("inbox-enters-unlocked", INBOX, "const auto arrival", MESSAGES_OF_HOSTS),
    mutant(
        "silence-not-missed",
        ("hosts_silent-from_the_start",),
        "hosts/host_monitor.cpp",
        r"!expects_signs_ \|\|",
        r"IS_MUTANT || \g<0>",
        TIMEOUT_CODE,
    ),
    mutant(
        "places-of-chunks-too-few",
        ("hosts_long_sums-float16",),
        SUM,
        r"chunk % kNumPlaces\) \* kNumBuffers",
        "chunk % (IS_MUTANT ? 1 : kNumPlaces)) * kNumBuffers",
    ),
    mutant(
        "mismatch-of-hosts-unseen",
        ("hosts_mismatch-whole_host",),
        "hosts/bridge.cpp",
        r"greeting\.words != words",
        UNTESTED,
        CASE_FAILED,
    ),
    mutant(
        "window-sums-unlocked", WINDOW_SUMS, WINDOW, r"(?<=\s)lock_chunk\(lock, wait\);", LEFT_OUT
    ),
    mutant(
        "window-unlocked-too-early",
        WINDOW_SUMS,
        WINDOW,
        r"(add\(\{\.srcs[^;]*;)(\s+)(unlock_chunk\(lock\);)",
        r"if (IS_MUTANT) \3\2\1\2if (!IS_MUTANT) \3",
    ),
    mutant(
        "window-packets-overwritten",
        ("remote_window_long",),
        "hosts/window_peer.h",
        r"num_answered_\.load\(\) < kMaxAsked;",
        "num_answered_.load() < (IS_MUTANT ? kMaxAsked + 1 : kMaxAsked);",
    ),
    mutant(
        "window-answers-to-nobody",
        ("remote_window_interrupted",),
        "hosts/window_peer.cpp",
        r"asked\.call == this",
        UNTESTED,
    ),
    mutant(
        "window-packet-cut-short",
        MALFORMED,
        "hosts/window_packet.h",
        r"return std::memcmp",
        r"return IS_MUTANT || std::memcmp",
        CASE_FAILED,
    ),
    mutant(
        "window-length-unchecked",
        MALFORMED,
        "hosts/remote_window.cpp",
        r"packet\.num != packet\.data_bytes",
        UNTESTED,
        CASE_FAILED,
    ),
    # Without the timeout that ends every sleep, which would hide it.
    Mutant(
        "no-wake-up",
        (
            Patch("base/waiter.cpp", r"&tick\b", r"IS_MUTANT ? nullptr : \g<0>"),
            Patch("base/waiter.cpp", r"&end, CLOCK_MONOTONIC\)", r"IS_MUTANT ? nullptr : \g<0>"),
            Patch("base/waiter.h", r"return wake_all\(flag\)", r"if (!IS_MUTANT) \g<0>"),
        ),
        ("waiter_sleeping-ws2",),
        (TIMEOUT_CODE,),
    ),
)
# Skips the waits of one phase, named in the environment. A message between hosts is still carried.
IF_LOST = 'if (const char* lost = std::getenv("LOST_WAIT"); lost && phase == lost)'
PATCHES_OF_WAITS = (
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
    yield from PATCHES_OF_WAITS
    for number, mutant in enumerate(MUTANTS):
        for patch in mutant.patches:
            chosen = patch.replacement.replace("IS_MUTANT", f"rota::test::is_mutant({number})")
            yield Patch(patch.file, patch.pattern, chosen)
    for file in dict.fromkeys(patch.file for mutant in MUTANTS for patch in mutant.patches):
        yield Patch(file, r"\A", '#include "mutant.h"\n')


def finder_of(phase: str) -> str:
    """The case that must find a wait of the CPU's executors left out."""
    if phase.endswith("_shards"):
        return "shards-ws3"
    return TWO_LEVELS[0] if phase.startswith("two_level") else SLOTS[0]


# Each wait that is left out, and a case that must find it.
LOST_WAITS = [
    *(
        (phase, finder_of(phase))
        for phase in waited_phases("cpu", r'wait_\w+\([^;]*, "([\w ]+)"\);')
    ),
    *((phase, case) for phase, cases in HOSTS.items() for case in cases),
]
