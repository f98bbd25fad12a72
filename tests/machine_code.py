"""Reads the machine code of the CUDA kernels and holds it against kernels.toml.

    python tests/machine_code.py [FILE]

FILE is an object or library, by default the extension that `import rota` finds. For each kernel and
architecture it takes the worst of all template instances:

  registers   of one thread
  stack       bytes of one thread: arrays and spilled registers, which live in device memory
  shared      bytes of a block, static
  spills      loads and stores of that stack (LDL, STL); 0 says that ptxas has spilled nothing
  wide        global loads / stores of 16 bytes or more (LDG.E.128)
  system      loads / stores that are strong at system scope (LD.E.64.STRONG.SYS), and the fences
              before a release (MEMBAR.ALL.SYS)

Prints them as a table; exits with 1 and one line for each thing that is not as expected. It needs
cuobjdump and nvdisasm, which the extra `check-cuda` installs, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tomllib

EXPECTATIONS = Path(__file__).with_name("kernels.toml")

# Where a kernel's code is: an architecture ("sm_90") and its mangled name.
Place = tuple[str, str]


class CheckError(Exception):
    """The check itself cannot be made."""


# ---- what is expected ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """One kernel in kernels.toml, which says what the fields mean."""

    max_registers: int
    system: Literal["release", "relaxed", "none"]


@dataclass(frozen=True)
class Table:
    """All of kernels.toml."""

    archs: tuple[str, ...]
    ptx: str
    kernels: dict[str, Expected]


def parse_table(text: str) -> Table:
    content = tomllib.loads(text)
    kernels = {name: Expected(**fields) for name, fields in content["kernels"].items()}
    for name, expected in kernels.items():
        if expected.system not in ("release", "relaxed", "none"):
            raise CheckError(f"{name}: system is {expected.system!r}")
    return Table(tuple(content["archs"]), content["ptx"], kernels)


# ---- what there is -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What one instance takes, as cuobjdump --dump-resource-usage tells."""

    registers: int
    stack_bytes: int
    shared_bytes: int


@dataclass
class Dump:
    """What one file holds."""

    archs: list[str] = field(default_factory=list)
    ptx: list[str] = field(default_factory=list)
    resources: dict[Place, Resources] = field(default_factory=dict)
    instructions: dict[Place, Counter[str]] = field(default_factory=dict)


_SECTION = re.compile(r"Fatbin (elf|ptx) code:")
_ARCH = re.compile(r"arch = sm_(\w+)")
_FUNCTION = re.compile(r"\s*Function\s*:?\s*([\w$.]+?):?\s*$")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
# "        /*00b0*/             @!P0 LD.E.64.STRONG.SYS R6, [R4.64] ;"
_OPCODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


def parse_resource_usage(lines: Iterable[str], dump: Dump) -> None:
    """Adds what `cuobjdump --dump-resource-usage` prints."""
    kind = arch = function = ""
    for line in lines:
        if match := _SECTION.match(line):
            kind = match[1]
        elif match := _ARCH.match(line):
            arch = f"sm_{match[1]}"
            if kind == "ptx":
                dump.ptx.append(f"compute_{match[1]}")
            elif arch not in dump.archs:
                dump.archs.append(arch)
        elif match := _FUNCTION.match(line):
            function = match[1]
        elif function and (values := dict(_RESOURCE.findall(line))):
            dump.resources[arch, function] = Resources(
                registers=int(values["REG"]),
                stack_bytes=int(values["STACK"]) + int(values["LOCAL"]),
                shared_bytes=int(values["SHARED"]),
            )
            function = ""


def kinds_of(opcode: str) -> Iterator[str]:
    """What an instruction counts as."""
    name, *modifiers = opcode.split(".")
    reads = name in ("LD", "LDG", "ATOM", "ATOMG")
    writes = name in ("ST", "STG", "ATOM", "ATOMG", "RED", "REDG")
    if name in ("LDL", "STL"):
        yield "spills"
    if "128" in modifiers or "256" in modifiers:
        if reads:
            yield "wide_loads"
        if writes:
            yield "wide_stores"
    if "STRONG" in modifiers and "SYS" in modifiers:
        if reads:
            yield "system_loads"
        if writes:
            yield "system_stores"
    if name == "MEMBAR" and "SYS" in modifiers:
        yield "system_fences"


def parse_machine_code(lines: Iterable[str], dump: Dump) -> None:
    """Adds what `cuobjdump -sass` prints."""
    arch = ""
    counts: Counter[str] = Counter()
    for line in lines:
        if match := _OPCODE.match(line):
            counts.update(kinds_of(match[1]))
        elif match := _ARCH.match(line):
            arch = f"sm_{match[1]}"
        elif match := _FUNCTION.match(line):
            counts = dump.instructions[arch, match[1]] = Counter()


def _tool(name: str) -> Path:
    """The program of the PyPI package nvidia-cuda-<name>."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        raise CheckError(f"{name} is not installed; use `make check-cuda`") from None
    return next(Path(file.locate()) for file in files if file.name == name)


def read(file: Path) -> Dump:
    """Takes a file apart."""
    cuobjdump = _tool("cuobjdump")
    # cuobjdump runs the nvdisasm that it finds on PATH.
    path = f"{_tool('nvdisasm').parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    dump = Dump()
    for option, parse in (
        ("--dump-resource-usage", parse_resource_usage),
        ("--dump-sass", parse_machine_code),
    ):
        with subprocess.Popen(
            [cuobjdump, option, file], env=os.environ | {"PATH": path}, stdout=-1, text=True
        ) as process:
            assert process.stdout is not None
            parse(process.stdout, dump)
        if process.returncode != 0:
            raise CheckError(f"cuobjdump {option} {file} ended with {process.returncode}")
    return dump


# ---- the comparison ------------------------------------------------------------------------------


def base_name(mangled: str) -> str:
    """Name of a function without namespaces, template and call arguments.

    Itanium C++ ABI: _Z, N if nested, and then each identifier after its length.
    """
    rest = re.sub(r"^_ZN?", "", mangled)
    name = mangled
    while match := re.match(r"\d+", rest):
        end = match.end() + int(match[0])
        name, rest = rest[match.end() : end], rest[end:]
    return name


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture, worst over its instances."""

    kernel: str
    arch: str
    num_instances: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    spills: int
    wide_loads: int
    wide_stores: int
    system_loads: int
    system_stores: int
    system_fences: int


def _row(
    kernel: str, arch: str, instances: list[Resources], counts: list[Mapping[str, int]]
) -> Row:
    fewest = {
        kind: min(count.get(kind, 0) for count in counts)
        for kind in (
            "wide_loads",
            "wide_stores",
            "system_loads",
            "system_stores",
            "system_fences",
        )
    }
    return Row(
        kernel,
        arch,
        num_instances=len(instances),
        registers=max(instance.registers for instance in instances),
        stack_bytes=max(instance.stack_bytes for instance in instances),
        shared_bytes=max(instance.shared_bytes for instance in instances),
        spills=max(count.get("spills", 0) for count in counts),
        **fewest,
    )


def rows_of(dump: Dump) -> list[Row]:
    """One row for each kernel and architecture, kernels in alphabetical order."""
    if dump.resources.keys() != dump.instructions.keys():
        odd = dump.resources.keys() ^ dump.instructions.keys()
        raise CheckError(f"the dumps of resources and of machine code differ: {sorted(odd)}")
    places: dict[tuple[str, str], list[Place]] = {}
    for place in dump.resources:
        places.setdefault((base_name(place[1]), place[0]), []).append(place)
    return [
        _row(
            kernel,
            arch,
            [dump.resources[place] for place in group],
            [dump.instructions[place] for place in group],
        )
        for (kernel, arch), group in sorted(
            places.items(), key=lambda item: (item[0][0], int(re.sub(r"\D", "", item[0][1])))
        )
    ]


def _row_complaints(row: Row, expected: Expected) -> Iterator[str]:
    def complain(what: str, wanted: str, got: int) -> str:
        return f"{row.kernel} on {row.arch}: {what}: expected {wanted}, got {got}"

    def at_least_one(what: str, got: int) -> Iterator[str]:
        if got == 0:
            yield complain(what, "at least 1 in every instance", got)

    if row.registers > expected.max_registers:
        yield complain("registers", f"at most {expected.max_registers}", row.registers)
    if row.spills > 0:
        yield complain("loads and stores of spilled registers", "0", row.spills)
    if row.stack_bytes > 0:
        yield complain("bytes of stack", "0", row.stack_bytes)
    yield from at_least_one("16-byte global loads", row.wide_loads)
    yield from at_least_one("16-byte global stores", row.wide_stores)
    if expected.system != "none":
        yield from at_least_one("strong loads at system scope", row.system_loads)
        yield from at_least_one("strong stores at system scope", row.system_stores)
    if expected.system == "release":
        yield from at_least_one("fences at system scope", row.system_fences)


def complaints(dump: Dump, table: Table) -> list[str]:
    """What is not as expected; says kernel, architecture, expected and got."""
    found = []
    if sorted(dump.archs) != sorted(table.archs):
        found.append(f"machine code: expected {list(table.archs)}, got {dump.archs}")
    if set(dump.ptx) != {table.ptx}:
        found.append(f"PTX: expected {table.ptx}, got {sorted(set(dump.ptx))}")
    rows = rows_of(dump)
    for row in rows:
        expected = table.kernels.get(row.kernel)
        if expected is None:
            found.append(f"{row.kernel} on {row.arch}: is in the code, not in {EXPECTATIONS.name}")
        else:
            found.extend(_row_complaints(row, expected))
    compiled = {(row.kernel, row.arch) for row in rows}
    for kernel in table.kernels:
        found.extend(
            f"{kernel} on {arch}: is in {EXPECTATIONS.name}, not in the code"
            for arch in table.archs
            if (kernel, arch) not in compiled
        )
    return found


def table_lines(rows: list[Row]) -> Iterator[str]:
    """For people."""
    yield (
        f"{'kernel':32} {'arch':7} {'instances':>9} {'registers':>9} {'stack':>6} {'shared':>7} "
        f"{'spills':>6} {'wide':>9} {'system':>7} {'fences':>6}"
    )
    for row in rows:
        wide = f"{row.wide_loads}/{row.wide_stores}"
        system = f"{row.system_loads}/{row.system_stores}"
        yield (
            f"{row.kernel:32} {row.arch:7} {row.num_instances:9} {row.registers:9} "
            f"{row.stack_bytes:6} {row.shared_bytes:7} {row.spills:6} {wide:>9} {system:>7} "
            f"{row.system_fences:6}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the machine code of the CUDA kernels.")
    parser.add_argument("file", nargs="?", type=Path, help="by default, that of `import rota`")
    file = parser.parse_args().file
    if file is None:
        import rota._C

        file = Path(rota._C.__file__)
    try:
        dump = read(file)
        table = parse_table(EXPECTATIONS.read_text())
        found = complaints(dump, table)
        rows = rows_of(dump)
        print(f"machine code of {file}: {', '.join([*dump.archs, *sorted(set(dump.ptx))])}")
        print(*table_lines(rows), sep="\n")
    except CheckError as error:
        print(f"FAIL  {error}")
        return 1
    for complaint in found:
        print(f"FAIL  {complaint}")
    if found:
        return 1
    print(f"{len(table.kernels)} kernels are as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
