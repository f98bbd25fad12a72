"""The check of the machine code (machine_code.py) finds one-place changes in a recorded dump.

The dump is cuobjdump 13.2's output for a small kernel compiled by nvcc 13.0, shortened.
"""

from __future__ import annotations

import pytest

import machine_code
from machine_code import RELAXED, RELEASE, WIDE, complaints, kernel_of, kinds_of

pytestmark = pytest.mark.no_extension

FLOAT = "_ZN4rota4cuda11copy_kernelIfLi1EEEvPK6float4PS2_PmS6_m"
DOUBLE = "_ZN4rota4cuda11copy_kernelIdLi2EEEvPK6float4PS2_PmS6_m"

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
SASS = (
    SECTION.format(arch="sm_80")
    + SM80.format(name=DOUBLE)
    + SM80.format(name=FLOAT)
    + SECTION.format(arch="sm_90")
    + SM90.format(name=DOUBLE)
    + SM90.format(name=FLOAT)
    + "\nFatbin ptx code:\n================\narch = sm_90\n"
)


@pytest.fixture(autouse=True)
def expectations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "ARCHS", ("sm_80", "sm_90"))
    monkeypatch.setattr(machine_code, "PTX", "PTX of sm_90")
    monkeypatch.setattr(machine_code, "KERNELS", {"copy_kernel": RELEASE})


def complaints_about(sass: str) -> list[str]:
    return complaints(sass.splitlines())


def test_as_expected_has_no_complaint() -> None:
    assert complaints_about(SASS) == []


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("LDG.E.128 ", "LDG.E.64 ", f"{DOUBLE} on sm_80: has no 16-byte loads"),
        ("STG.E.128 ", "STG.E ", f"{DOUBLE} on sm_80: has no 16-byte stores"),
        ("LD.E.64.STRONG.SYS", "LD.E.64", f"{DOUBLE} on sm_80: has no loads at system scope"),
        ("ST.E.64.STRONG.SYS", "ST.E.64.STRONG.GPU", "has no stores at system scope"),
        ("MEMBAR.ALL.SYS", "MEMBAR.ALL.GPU", "has no fences at system scope"),
        ("arch = sm_90\n\n", "arch = sm_100\n\n", "copy_kernel on sm_90: is missing"),
        (FLOAT, "_Z10ask_kernelPmS_", "_Z10ask_kernelPmS_ on sm_80: is not in KERNELS"),
        ("ptx code", "elf code", "PTX of sm_90: is missing"),
    ],
)
def test_wrong_machine_code_is_found(right: str, wrong: str, expected: str) -> None:
    assert right in SASS
    assert any(expected in line for line in complaints_about(SASS.replace(right, wrong, 1)))


def test_the_last_instance_is_looked_at_too() -> None:
    before, _, after = SASS.rpartition("LDG.E.128")
    assert complaints_about(f"{before}LDG.E.64{after}") == [
        f"{FLOAT} on sm_90: has no 16-byte loads"
    ]


@pytest.mark.parametrize(
    ("required", "unneeded"), [(RELAXED, ("MEMBAR",)), (WIDE, ("MEMBAR", ".STRONG.SYS"))]
)
def test_what_a_kernel_does_not_need_is_not_asked_for(
    required: set[str], unneeded: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "KERNELS", {"copy_kernel": required})
    sass = SASS
    for text in unneeded:
        sass = sass.replace(text, "NOP")
    assert complaints_about(sass) == []


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("LDG.E.128.CONSTANT", {"16-byte loads"}),
        ("LDG.E.ENL2.256", {"16-byte loads"}),
        ("LD.E.128.STRONG.SYS", {"16-byte loads", "loads at system scope"}),
        ("ATOMG.E.ADD.64.STRONG.SYS", {"loads at system scope", "stores at system scope"}),
        ("RED.E.ADD.STRONG.SYS", {"stores at system scope"}),
        ("RED.E.ADD.STRONG.GPU", set()),
        ("LDCU.128", set()),
        ("LDS.128", set()),
        ("MEMBAR.SC.SYS", {"fences at system scope"}),
        ("MEMBAR.SC.GPU", set()),
    ],
)
def test_kinds_of_opcode(opcode: str, expected: set[str]) -> None:
    assert set(kinds_of(opcode)) == expected


def test_kernel_whose_name_ends_like_another_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "KERNELS", {"pack_kernel": WIDE, "unpack_kernel": WIDE})
    assert kernel_of("_ZN4rota4cuda13unpack_kernelILi1EEEvv") == "unpack_kernel"
