"""The check of the machine code finds what it is for: on recorded dumps, changed in one place.

The dumps are what cuobjdump 13.2 prints for nvcc 13.0's code of a small kernel, shortened.
"""

from __future__ import annotations

import pytest

from machine_code import (
    EXPECTATIONS,
    CheckError,
    Dump,
    base_name,
    complaints,
    kinds_of,
    parse_machine_code,
    parse_resource_usage,
    parse_table,
    rows_of,
    table_lines,
)

pytestmark = pytest.mark.no_extension

FLOAT = "_ZN4rota4cuda11copy_kernelIfLi1EEEvPK6float4PS2_PmS6_m"
DOUBLE = "_ZN4rota4cuda11copy_kernelIdLi2EEEvPK6float4PS2_PmS6_m"

RESOURCES = f"""
Fatbin elf code:
================
arch = sm_80
code version = [1,8]
host = linux
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function {DOUBLE}:
  REG:20 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:392 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {FLOAT}:
  REG:16 STACK:0 SHARED:48 LOCAL:0 CONSTANT[0]:392 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {DOUBLE}:
  REG:18 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {FLOAT}:
  REG:13 STACK:0 SHARED:48 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin ptx code:
================
arch = sm_90
code version = [9,0]
compressed
ptxasOptions =  --fmad false
"""

SM80 = """
		Function : {name}
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*00a0*/           @P2 BRA 0x160 ;                                /* 0x000000d000002947 */
        /*00b0*/               LD.E.64.STRONG.SYS R6, [R4.64] ;           /* 0x0000000404067980 */
                                                                          /* 0x000fe2000c1f5b00 */
        /*00d0*/               CCTL.IVALL ;                               /* 0x00000000ff00798f */
        /*0200*/               LDG.E.128 R4, [R4.64] ;                    /* 0x0000000404047981 */
        /*0340*/          @!P0 STG.E.128 [R12.64], R4 ;                   /* 0x000000040c007986 */
        /*03d0*/               MEMBAR.ALL.SYS ;                           /* 0x0000000000007992 */
        /*03f0*/               ST.E.64.STRONG.SYS [R2.64], R4 ;           /* 0x0000000402007985 */
        /*0400*/               EXIT ;                                     /* 0x000000000000794d */
		..........
"""
SM90 = """
		Function : {name}
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*0060*/               LD.E.64.STRONG.SYS R6, desc[UR4][R4.64] ;  /* 0x0000000404067980 */
        /*0240*/               LDG.E.128 R4, desc[UR4][R4.64] ;           /* 0x0000000404047981 */
        /*0370*/               STG.E.128 desc[UR4][R8.64], R4 ;           /* 0x0000000408007986 */
        /*03f0*/               MEMBAR.ALL.SYS ;                           /* 0x0000000000007992 */
        /*0420*/               ST.E.64.STRONG.SYS desc[UR4][R2.64], R4 ;  /* 0x0000000402007985 */
		..........
"""
SECTION = (
    "\nFatbin elf code:\n================\narch = {arch}\n\n\tcode for {arch}\n\t.target\t{arch}\n"
)
MACHINE_CODE = (
    SECTION.format(arch="sm_80")
    + SM80.format(name=DOUBLE)
    + SM80.format(name=FLOAT)
    + SECTION.format(arch="sm_90")
    + SM90.format(name=DOUBLE)
    + SM90.format(name=FLOAT)
    + "\nFatbin ptx code:\n================\narch = sm_90\n"
)
EXPECTED = """
archs = ["sm_80", "sm_90"]
ptx = "compute_90"
[kernels]
copy_kernel = { max_registers = 20, system = "release" }
"""


def dump_of(resources: str = RESOURCES, machine_code: str = MACHINE_CODE) -> Dump:
    dump = Dump()
    parse_resource_usage(resources.splitlines(), dump)
    parse_machine_code(machine_code.splitlines(), dump)
    return dump


def changed(text: str, right: str, wrong: str, *, last: bool = False) -> str:
    """The text with one place changed, the first or the last of its kind."""
    before, found, after = text.rpartition(right) if last else text.partition(right)
    assert found
    return before + wrong + after


def test_rows_are_the_worst_of_all_instances() -> None:
    machine_code = changed(MACHINE_CODE, "LDG.E.128", "LDG.E.64")
    first, second = rows_of(dump_of(machine_code=machine_code))
    assert (first.kernel, first.arch, first.num_instances) == ("copy_kernel", "sm_80", 2)
    assert (first.registers, first.stack_bytes, first.shared_bytes) == (20, 0, 48)
    assert (first.wide_loads, first.wide_stores) == (0, 1)
    assert (first.system_loads, first.system_stores, first.system_fences) == (1, 1, 1)
    assert (second.arch, second.registers, second.wide_loads) == ("sm_90", 18, 1)


def test_as_expected_has_no_complaint() -> None:
    assert complaints(dump_of(), parse_table(EXPECTED)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "last", "expected"),
    [
        (
            "LDG.E.128 ",
            "LDG.E.64 ",
            False,
            "copy_kernel on sm_80: 16-byte global loads: expected at least 1 in every instance, "
            "got 0",
        ),
        ("STG.E.128 ", "STG.E ", True, "copy_kernel on sm_90: 16-byte global stores"),
        ("LDG.E.128 ", "LDS.128 ", True, "copy_kernel on sm_90: 16-byte global loads"),
        (
            "LD.E.64.STRONG.SYS",
            "LD.E.64.STRONG.GPU",
            False,
            "copy_kernel on sm_80: strong loads at system scope",
        ),
        ("LD.E.64.STRONG.SYS", "LD.E.64", True, "copy_kernel on sm_90: strong loads"),
        (
            "ST.E.64.STRONG.SYS",
            "ST.E.64.STRONG.GPU",
            False,
            "copy_kernel on sm_80: strong stores at system scope",
        ),
        (
            "MEMBAR.ALL.SYS",
            "MEMBAR.ALL.GPU",
            True,
            "copy_kernel on sm_90: fences at system scope",
        ),
        (
            "EXIT ;",
            "STL [R1+0x4], R5 ;",
            False,
            "copy_kernel on sm_80: loads and stores of spilled registers: expected 0, got 1",
        ),
        ("CCTL.IVALL ;", "LDL.LU.64 R4, [R1] ;", False, "spilled registers: expected 0, got 1"),
        (FLOAT, FLOAT.replace("11copy_kernel", "12other_kernel"), False, "differ"),
    ],
)
def test_wrong_machine_code_is_found(right: str, wrong: str, last: bool, expected: str) -> None:
    dump = dump_of(machine_code=changed(MACHINE_CODE, right, wrong, last=last))
    try:
        (complaint,) = complaints(dump, parse_table(EXPECTED))
    except CheckError as error:
        complaint = str(error)
    assert expected in complaint


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("REG:20", "REG:21", "copy_kernel on sm_80: registers: expected at most 20, got 21"),
        ("STACK:0", "STACK:8", "copy_kernel on sm_80: bytes of stack: expected 0, got 8"),
        ("LOCAL:0", "LOCAL:64", "copy_kernel on sm_80: bytes of stack: expected 0, got 64"),
        ("ptx code", "elf code", "PTX: expected compute_90, got []"),
        ("code:\n================\narch = sm_90\ncode version = [9,0]", "", "PTX"),
    ],
)
def test_wrong_resources_are_found(right: str, wrong: str, expected: str) -> None:
    (complaint,) = complaints(dump_of(changed(RESOURCES, right, wrong)), parse_table(EXPECTED))
    assert expected in complaint


def test_kernel_without_expectation_is_found() -> None:
    table = parse_table(EXPECTED.replace("copy_kernel", "other_kernel"))
    unknown_80, unknown_90, missing_80, missing_90 = complaints(dump_of(), table)
    assert unknown_80.startswith("copy_kernel on sm_80: is in the code, not in")
    assert unknown_90.startswith("copy_kernel on sm_90: is in the code, not in")
    assert missing_80.startswith("other_kernel on sm_80: ") and "not in the code" in missing_80
    assert missing_90.startswith("other_kernel on sm_90: ")


def test_missing_architecture_is_found() -> None:
    table = parse_table(EXPECTED.replace('"sm_90"', '"sm_90", "sm_100"'))
    archs, kernel = complaints(dump_of(), table)
    assert "'sm_100'" in archs
    assert kernel.startswith("copy_kernel on sm_100: ") and "not in the code" in kernel


def test_relaxed_kernel_needs_no_fence() -> None:
    dump = dump_of(machine_code=MACHINE_CODE.replace("MEMBAR.ALL.SYS", "NOP"))
    assert complaints(dump, parse_table(EXPECTED.replace("release", "relaxed"))) == []


def test_kernel_of_one_rank_needs_nothing_of_the_system() -> None:
    table = parse_table(EXPECTED.replace("release", "none"))
    dump = dump_of(machine_code=MACHINE_CODE.replace(".STRONG.SYS", "").replace("MEMBAR", "NOP"))
    assert complaints(dump, table) == []


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("LDG.E.128.CONSTANT", {"wide_loads"}),
        ("LDG.E.ENL2.256", {"wide_loads"}),
        ("LD.E.128.STRONG.SYS", {"wide_loads", "system_loads"}),
        ("STG.E.128.STRONG.SYS", {"wide_stores", "system_stores"}),
        ("ATOMG.E.ADD.64.STRONG.SYS", {"system_loads", "system_stores"}),
        ("RED.E.ADD.STRONG.SYS", {"system_stores"}),
        ("RED.E.ADD.STRONG.GPU", set()),
        ("LDCU.128", set()),
        ("LDS.128", set()),
        ("MEMBAR.SC.SYS", {"system_fences"}),
        ("MEMBAR.SC.GPU", set()),
        ("STL.128", {"spills"}),
        ("BRA", set()),
    ],
)
def test_kinds_of_opcode(opcode: str, expected: set[str]) -> None:
    assert set(kinds_of(opcode)) == expected


@pytest.mark.parametrize(
    ("mangled", "expected"),
    [
        (FLOAT, "copy_kernel"),
        ("_Z10ask_kernelPmS_", "ask_kernel"),
        (
            "_ZN4rota4cuda38_GLOBAL__N__86c64b46_6_two_cu_edb7a81d8k_kernelILi200EEEvPfm",
            "k_kernel",
        ),
        ("ask_kernel", "ask_kernel"),
    ],
)
def test_base_name_of_mangled(mangled: str, expected: str) -> None:
    assert base_name(mangled) == expected


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("release", "acquire"), ("max_registers", "registers"), ("max_registers = 20, ", "")],
)
def test_unusable_table_is_refused(right: str, wrong: str) -> None:
    with pytest.raises((CheckError, TypeError)):
        parse_table(changed(EXPECTED, right, wrong))


def test_table_of_this_repository_is_usable() -> None:
    assert parse_table(EXPECTATIONS.read_text()).archs == ("sm_80", "sm_90", "sm_100")


def test_table_for_people_shows_every_row() -> None:
    header, *lines = table_lines(rows_of(dump_of()))
    assert "registers" in header and len(lines) == 2
    assert lines[0].split() == [
        "copy_kernel",
        "sm_80",
        "2",
        "20",
        "0",
        "48",
        "0",
        "1/1",
        "1/1",
        "1",
    ]
