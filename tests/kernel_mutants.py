"""Finds all synchronisation in the CUDA kernels' bodies and makes mutants of each: an order
weakened, a barrier, a flag or a wait left out, a count off by one. So too of what decides the order
of a tree's sums.

All mutants are compiled into one program, and ROTA_MUTANT selects one by its number (mutant
schemata: Untch, Offutt & Harrold 1993): building each alone would take longer than all tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cpp_program import CSRC

# Headers for the GPU only: its block primitives, and the alias of its atomics.
NO_BODIES = {"device_block.h", "system_word.h"}
# Code that bodies share with the CPU, and the layout of their sync words.
FIXED_TREE = "base/fixed_tree.h"
LAYOUT = "transport/device_layout.h"

# Whatever looks like synchronisation in a body must be part of a mutant, so that new code cannot
# be missed.
WATCHED = re.compile(
    r"MemoryOrder::|memory_order|\batomic|__sync|__threadfence|__nanosleep|\bvolatile\b"
    r"|(?:\.|->)(?:sync|all|wait|publish|release|put_to_rest|count_\w+|fetch_\w+|exchange|compare_exchange\w*)\("
    r"|\bTo(?:Send|Read)\{|\bwait_until\(|\bpeers\.are_all_local\("
)
# Except what cannot be weakened.
NOT_MUTATED = re.compile(r"MemoryOrder::relaxed|bool wait_until\(")


@dataclass(frozen=True)
class Edit:
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Site:
    """A place in a header, and what inserts its fault under a condition, for which `?` stands."""

    begin: int
    end: int
    fault: str
    before: str
    after: str | None = ""  # None: `before` stands instead of the code

    def edits(self, condition: str) -> list[Edit]:
        before = self.before.replace("?", condition, 1)
        if self.after is None:
            return [Edit(self.begin, self.end, before)]
        return [Edit(self.begin, self.begin, before), Edit(self.end, self.end, self.after)]


@dataclass(frozen=True)
class Mutant:
    number: int
    where: str  # file:line
    code: str  # text of that line
    fault: str

    @property
    def file(self) -> str:
        return self.where.split(":")[0]

    @property
    def condition(self) -> str:
        """C++ expression; see tests/cpp/mutant.h."""
        return f"rota::test::is_mutant({self.number})"


def without_comments(text: str) -> str:
    """Replaces comments by blanks, so that offsets stay the same."""
    return re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)


def _end_of_call(text: str, begin: int) -> int:
    """The offset after the parenthesis that closes the first one after `begin`."""
    depth = 0
    for i in range(text.index("(", begin), len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise AssertionError("a parenthesis is not closed")


def _orders(text: str) -> Iterator[Site]:
    weaker = {"acquire": ["relaxed"], "release": ["relaxed"]}
    weaker["acq_rel"] = ["relaxed", "acquire", "release"]
    for match in re.finditer(r"(?:System|Gpu)Word<\w+>", text):
        after_object = _end_of_call(text, match.end())
        end = _end_of_call(text, after_object)
        access = text[match.start() : end]
        for order in re.findall(r"MemoryOrder::(\w+)", access):
            for other in weaker.get(order, []):
                weakened = access.replace(f"MemoryOrder::{order}", f"MemoryOrder::{other}")
                fault = f"{order} -> {other}"
                yield Site(match.start(), end, fault, f"(? ? {weakened} : ", ")")


def _statements(text: str) -> Iterator[Site]:
    """Statements that other threads, ranks or launches depend on: barriers, flags and their
    payload, counts, error words, and resets to the value at rest."""
    done = r"\b\w+\.(?:sync|publish|release|put_to_rest|count_\w+)\("
    stored = (
        r"SystemWord<uint64_t>\(\*word\)|\barrived\.payload = |\bset\.(?:sent|received) = "
        r"|(?<!void )\bspoil_results\("
    )
    for match in re.finditer(rf"{done}|{stored}", text):
        end = text.index(";", match.end()) + 1
        yield Site(match.start(), end, "left out", "if (!?) ")


def _waits(text: str) -> Iterator[Site]:
    for match in re.finditer(r"\b\w+\.wait\(|(?<!bool )\bwait_until\(", text):
        yield Site(match.start(), _end_of_call(text, match.start()), "no wait", "(? || ", ")")
    for match in re.finditer(r"\bTo(Send|Read)\{((?:[^,(){}]|\([^()]*\))+),", text):
        nobody = "? ? LinkSet{} : "
        yield Site(match.start(2), match.end(2), f"no To{match[1]}", nobody)
    for match in re.finditer(r"\b\w+\.all\(", text):
        end = _end_of_call(text, match.start())
        value = text[match.end() : end - 1]
        yield Site(match.start(), end, "no barrier", f"(? ? {value} : ", ")")


class Rule(NamedTuple):
    pattern: str
    fault: str
    before: str
    after: str | None = ")"  # None: `before` stands instead of the code
    files: tuple[str, ...] = ()  # all, if none are named


_ENDS_OF_WAITS = r"waited_ns > peers\.\w+_ns|SystemWord<uint32_t>\(abort\)\.load\([^()]*\) != 0"
LINKS = ("cuda/links.h", "cuda/low_latency.h")
ELEMENTS = ("cuda/elements.h",)
RULES = (
    # Conditions that waits test.
    Rule(r"(?<!bool )\bis_of_this_round\([^()]*\)", "is true", "(? || "),
    Rule(r"packets\.is_retired\(\)", "is false", "(!? && "),
    Rule(_ENDS_OF_WAITS, "is false", "(!? && "),
    Rule(r"fingerprint == own_fingerprint|peers\.are_all_local\(\)", "is true", "(? || "),
    # What they wait for.
    Rule(
        r"(?<=\bmessage \+ )1\b|(?<=packet_rounds \+ )1\b", "off by one", "(? ? 0 : 1)", None, LINKS
    ),
    # The stack of a tree's pending sums.
    Rule(
        r"args_\.tree\.after\(source\)",
        "ascending",
        "(? ? uint32_t{source > 0} : args_.tree.after(source))",
        None,
        ELEMENTS,
    ),
    Rule(r"(?<=num_additions > )1\b", "one fewer", "(? ? 2u : 1u)", None, ELEMENTS),
    Rule(r"assign\(pending\.of.*?;", "left out", "if (!?) ", "", ELEMENTS),
    # Buffers.
    Rule(r"(?<=parity % )2\b", "one buffer", "(? ? 1 : 2)", None, (LAYOUT,)),
)


def _by_rules(file: str, text: str) -> Iterator[Site]:
    for rule in RULES:
        if not rule.files or file in rule.files:
            for match in re.finditer(rule.pattern, text):
                yield Site(*match.span(), rule.fault, rule.before, rule.after)


def _sites(file: str, text: str) -> Iterator[Site]:
    yield from _orders(text)
    yield from _statements(text)
    yield from _waits(text)
    yield from _by_rules(file, text)


def _slot_uses(text: str) -> list[tuple[int, int]]:
    uses = re.finditer(r"(?<!int )(?<!transport::)\bkNumLinkSlots\b", text)
    return [(use.start(), use.end()) for use in uses]


def _is_covered(watched: re.Match[str], text: str, sites: list[Site]) -> bool:
    line_begin = text.rfind("\n", 0, watched.start()) + 1
    if any(
        line_begin + match.start() <= watched.start() < line_begin + match.end()
        for match in NOT_MUTATED.finditer(text[line_begin : text.index("\n", watched.start())])
    ):
        return True
    spans = [(site.begin, site.end) for site in sites]
    if watched[0].startswith("To"):  # the wait around it is another mutant
        return any(begin == watched.end() for begin, _ in spans)
    # The site starts at the object of a member call.
    start = watched.start() - len(re.search(r"\w*$", text[: watched.start()])[0])
    is_of_order = re.search("MemoryOrder|fetch_|exchange", watched[0])
    if is_of_order:
        return any(begin <= start < end for begin, end in spans)
    return any(begin == start for begin, _ in spans)


def bodies() -> list[Path]:
    files = [path for path in sorted((CSRC / "cuda").glob("*.h")) if path.name not in NO_BODIES]
    return [*files, CSRC / FIXED_TREE, CSRC / LAYOUT]


@dataclass(frozen=True)
class MutatedFile:
    """A header with all its mutants, each under its condition: a patch for cpp_program."""

    file: str
    text: str

    def apply(self, _: str) -> str:
        return self.text


def sites_of(file: str, text: str) -> list[Site]:
    """All sites of a header, in source order.

    Raises:
        AssertionError: the header has synchronisation that no mutant covers.
    """
    text = without_comments(text)
    sites = sorted(_sites(file, text), key=lambda site: site.begin)
    for watched in WATCHED.finditer(text):
        line = text.count("\n", 0, watched.start()) + 1
        assert _is_covered(watched, text, sites), f"no mutant of {file}:{line}: {watched[0]}"
    return sites


def make_mutants() -> tuple[list[Mutant], tuple[MutatedFile, ...]]:
    """All mutants, and the headers that contain them. Raises like sites_of()."""
    one_slot = Mutant(0, LAYOUT, "kNumLinkSlots = 2", "one slot")
    mutants = [one_slot]
    files = []
    for path in bodies():
        file = path.relative_to(CSRC).as_posix()
        text = path.read_text()
        edits = [
            Edit(begin, end, f"({one_slot.condition} ? uint64_t{{1}} : kNumLinkSlots)")
            for begin, end in _slot_uses(without_comments(text))
        ]
        for site in sites_of(file, text):
            line = text.count("\n", 0, site.begin) + 1
            code = text.splitlines()[line - 1].strip()
            mutants.append(Mutant(len(mutants), f"{file}:{line}", code, site.fault))
            edits += site.edits(mutants[-1].condition)
        if edits:
            files.append(MutatedFile(file, _edited(text, edits)))
    return mutants, tuple(files)


def _edited(text: str, edits: list[Edit]) -> str:
    # Last edit first, so that the offsets of the others stay valid.
    for edit in sorted(edits, key=lambda edit: (edit.begin, edit.end), reverse=True):
        text = text[: edit.begin] + edit.text + text[edit.end :]
    return text.replace("#pragma once\n", '#pragma once\n\n#include "mutant.h"\n', 1)
