"""The wire loops must prefetch in the machine code, not only in the source.

g++ 12 may treat a function that only prefetches as one without effect and drop its calls. That
costs a third of the speed of scaled blocks and changes no result (csrc/cpu/wire_loops.inl).
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from itertools import product

import pytest

import rota._C

pytestmark = pytest.mark.same_in_every_build

# A function's head in objdump's listing, and the parts of a wire loop's name: instruction set,
# loop, number of the dtype, whether blocks are scaled, and the rounding.
HEAD = re.compile(r"^[0-9a-f]+ <(.*)>:$")
LOOP = re.compile(
    r"::(portable|avx2|avx512)::.*?::(encode|encode_at_random|encode_with|decode_sum|sum_block)"
    r"<\(rota::DType\)(\d+), (true|false)(?:, .*?::(ToNearest|AtRandom)<)?"
)
FORMATS = [("0", "false"), ("3", "false"), *product("245", ("false", "true"))]


def loops_that_prefetch() -> set[tuple[str, ...]]:
    """(instruction set, loop, dtype, scaled, rounding) of each."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", rota._C.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = set()
    loop: tuple[str, ...] | None = None
    for line in listing.splitlines():
        if head := HEAD.match(line):
            match = LOOP.search(head[1])
            loop = match.groups(default="") if match else None
        elif loop and "prefetch" in line:
            found.add(loop)
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads machine code of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (Debian: binutils)")
def test_wire_loops_prefetch_in_every_instruction_set() -> None:
    found = loops_that_prefetch()
    encoders = {"encode": "ToNearest", "encode_at_random": "AtRandom"}
    for isa, wire in product(("portable", "avx2", "avx512"), FORMATS):
        # A function that is inlined into its only caller leaves its prefetches there.
        for encode, rounding in encoders.items():
            # float32 is not rounded, so stochastic rounding uses the round-to-nearest loop.
            if wire[0] != "0" or rounding == "ToNearest":
                loops = {(isa, "encode_with", *wire, rounding), (isa, encode, *wire, "")}
                assert loops & found, loops
        decoders = {(isa, loop, *wire, "") for loop in ("decode_sum", "sum_block")}
        assert decoders & found, decoders
