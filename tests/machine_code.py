"""Checks the machine code of the CUDA kernels for faults that ptxas does not warn about.

    python tests/machine_code.py [FILE]

FILE is an object or library, by default the extension that `import rota` finds. It must contain
every kernel of KERNELS for every architecture, and each template instance must have the
instructions listed there. Registers and spills are not checked here: __launch_bounds__ limits
registers (cuda/kernels.h), and ptxas warnings of spills or stack use fail the build (NVCC_STRICT in
the Makefile).

It prints one line per fault, and exits with 1 if there is any. It needs cuobjdump and nvdisasm,
which the extra `check-cuda` installs, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ARCHS = ("sm_80", "sm_90", "sm_100")
# PTX of the newest architecture, for GPUs newer than that.
PTX = "PTX of sm_100"

WIDE = {"16-byte loads", "16-byte stores"}
# Data that is its own flag: relaxed accesses at system scope, which order no other access.
RELAXED = WIDE | {"loads at system scope", "stores at system scope"}
# Flags that order data: a fence precedes the store that publishes.
RELEASE = RELAXED | {"fences at system scope"}
KERNELS = {
    "all_gather_kernel": RELEASE,
    "broadcast_kernel": RELEASE,
    "hierarchical_kernel": RELEASE,
    "low_latency_kernel": RELAXED,
    "one_shot_kernel": RELEASE,
    "ordered_ring_kernel": RELEASE,
    "pack_kernel": WIDE,
    "reduce_scatter_kernel": RELEASE,
    "ring_kernel": RELEASE,
    "transfer_kernel": RELEASE,
    "two_shot_in_place_kernel": RELEASE,
    "two_shot_kernel": RELEASE,
    "unpack_kernel": WIDE,
}

_ARCH = re.compile(r"arch = (sm_\w+)")
_FUNCTION = re.compile(r"\s*Function : (\S+)")
# "        /*00b0*/             @!P0 LD.E.64.STRONG.SYS R6, [R4.64] ;"
_OPCODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


def kinds_of(opcode: str) -> Iterator[str]:
    """The kinds of required instruction that this opcode counts as."""
    name, *modifiers = opcode.split(".")
    ways = []
    if name in ("LD", "LDG", "ATOM", "ATOMG"):
        ways.append("loads")
    if name in ("ST", "STG", "ATOM", "ATOMG", "RED", "REDG"):
        ways.append("stores")
    if {"128", "256"} & set(modifiers):
        yield from (f"16-byte {way}" for way in ways)
    if {"STRONG", "SYS"} <= set(modifiers):
        yield from (f"{way} at system scope" for way in ways)
    if name == "MEMBAR" and "SYS" in modifiers:
        yield "fences at system scope"


def kernel_of(mangled: str) -> str:
    """The name in KERNELS, else the mangled name; the Itanium C++ ABI puts lengths before names."""
    return next((name for name in KERNELS if f"{len(name)}{name}" in mangled), mangled)


def complaints(sass: Iterable[str]) -> list[str]:
    """The faults found in the output of `cuobjdump --dump-sass`."""
    found: dict[tuple[str, str], set[str]] = {}  # instructions of each function
    arch, instructions, is_ptx, has_ptx = "", set[str](), False, False
    for line in sass:
        if match := _OPCODE.match(line):
            instructions.update(kinds_of(match[1]))
        elif match := _FUNCTION.match(line):
            instructions = found[arch, match[1]] = set()
        elif match := _ARCH.match(line):
            arch = match[1]
            has_ptx |= is_ptx and f"PTX of {arch}" == PTX
        elif line.startswith("Fatbin "):
            is_ptx = line.startswith("Fatbin ptx code:")
    compiled = {(kernel_of(function), arch) for arch, function in found}
    expected = {(kernel, arch) for kernel in KERNELS for arch in ARCHS}
    return [
        *([] if has_ptx else [f"{PTX}: is missing"]),
        *(f"{kernel} on {arch}: is missing" for kernel, arch in sorted(expected - compiled)),
        *(f"{kernel} on {arch}: is not in KERNELS" for kernel, arch in sorted(compiled - expected)),
        *(
            f"{function} on {arch}: has no {kind}"
            for (arch, function), kinds in found.items()
            for kind in sorted(KERNELS.get(kernel_of(function), set()) - kinds)
        ),
    ]


def _tool(name: str) -> Path:
    """The program of the PyPI package nvidia-cuda-<name>."""
    files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    return next(Path(file.locate()) for file in files if file.name == name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the machine code of the CUDA kernels.")
    parser.add_argument("file", nargs="?", type=Path, help="by default, that of `import rota`")
    file = parser.parse_args().file
    if file is None:
        import rota._C

        file = Path(rota._C.__file__)
    # cuobjdump runs the nvdisasm that it finds on PATH.
    path = f"{_tool('nvdisasm').parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = [_tool("cuobjdump"), "--dump-sass", file]
    with subprocess.Popen(
        command, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        failures = complaints(process.stdout)
    if process.returncode != 0:
        failures = [f"cuobjdump ended with {process.returncode}"]
    print(*(f"FAIL  {failure}" for failure in failures), sep="\n", end="\n" if failures else "")
    if not failures:
        print(f"{len(KERNELS)} kernels are as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
