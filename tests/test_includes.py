"""Rules for the text of csrc/: includes, switches over enums, and locks beside Python's.

Includes go from a layer to the same or a lower one, and torch stops in tensor/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_extension

CSRC = Path(__file__).parent.parent / "csrc"
SUFFIXES = {".h", ".cpp", ".inl", ".cu", ".cuh"}

# Each layer, and the layers that it may include. bindings.cpp is a layer by itself.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "schedule": {"base"},
    "transport": {"base", "schedule"},
    "cpu": {"base", "schedule", "transport"},
    "cuda": {"base", "schedule", "transport"},
    "core": {"base", "schedule", "transport", "cpu", "cuda"},
    "hosts": {"base", "schedule", "transport", "cpu", "core"},
    "tensor": {"base", "schedule", "transport", "cpu", "cuda", "core", "hosts"},
    "c10d": {"base", "schedule", "transport", "cpu", "cuda", "core", "hosts", "tensor"},
    "bindings": {"base", "schedule", "transport", "cpu", "cuda", "core", "hosts", "tensor", "c10d"},
}
# Layers that may use CUDA: kernels and their launches, and the memory that GPUs map.
CUDA_LAYERS = {"cuda", "transport"}
# Layers that may use torch, and with it pybind11 and Python.
TORCH_LAYERS = {"tensor", "c10d", "bindings"}

TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^(Python|ATen/.*|torch/.*)\.h$")
CUDA = re.compile(r"^(cuda|cooperative_groups|cub/|thrust/|nccl|nvml|device_launch_parameters)")
# Defined in builds with kernels.
KERNELS = "ROTA_WITH_CUDA"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path: str) -> str:
    return path.split("/")[0] if "/" in path else "bindings"


def complaints(path: str, text: str, project_files: Iterable[str]) -> list[str]:
    """The forbidden includes of one file.

    Args:
        path: below csrc/, with slashes.
        project_files: all such paths.
    """
    layer = layer_of(path)
    if layer not in ALLOWED:
        return [f"{path} is in no known layer"]
    found = []
    if path.endswith(".h") and not re.search(r"^#pragma once$", text, re.MULTILINE):
        found.append(f"{path} lacks #pragma once")
    known = set(project_files)
    for bracket, name in INCLUDE.findall(text):
        is_project = bracket == '"'
        if is_project and name not in known:
            found.append(f'{path} includes "{name}", which is not a file of csrc/')
        elif is_project and layer_of(name) not in ALLOWED[layer] | {layer}:
            found.append(f"{path} includes {name}: {layer} must not know {layer_of(name)}")
        elif not is_project and name in known:
            found.append(f"{path} includes {name} in angle brackets")
        elif not is_project and TORCH.match(name) and layer not in TORCH_LAYERS:
            found.append(f"{path} includes {name}: torch stops in tensor/")
        elif not is_project and CUDA.match(name) and layer not in CUDA_LAYERS:
            found.append(f"{path} includes {name}: CUDA stays in cuda/ and transport/")
    return found


def project_files() -> list[str]:
    files = (path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)
    return sorted(path.relative_to(CSRC).as_posix() for path in files)


@pytest.mark.parametrize("path", project_files())
def test_includes_of_file_point_down(path: str) -> None:
    assert complaints(path, (CSRC / path).read_text(), project_files()) == []


EXAMPLE_FILES = [
    "base/flag.h",
    "transport/t.h",
    "core/c.h",
    "tensor/work.h",
    "bindings.cpp",
]


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("schedule/a.h", '#pragma once\n#include "transport/t.h"\n', "must not know transport"),
        ("cpu/a.cpp", '  #  include "core/c.h"\n', "cpu must not know core"),
        ("hosts/a.cpp", '#include "tensor/work.h"\n', "hosts must not know tensor"),
        ("c10d/a.cpp", '#include "bindings.cpp"\n', "c10d must not know bindings"),
        ("core/a.cpp", "#include <torch/csrc/utils/pybind.h>\n", "torch stops in tensor/"),
        ("core/a.cpp", "#include <ATen/ATen.h>\n", "torch stops in tensor/"),
        ("cpu/a.cpp", "#include <c10/util/Half.h>\n", "torch stops in tensor/"),
        ("base/a.cpp", "#include <pybind11/pybind11.h>\n", "torch stops in tensor/"),
        ("base/a.cpp", "#include <Python.h>\n", "torch stops in tensor/"),
        ("core/a.cpp", "#include <cuda_runtime.h>\n", "CUDA stays in cuda/"),
        ("c10d/a.cpp", "#include <cuda/atomic>\n", "CUDA stays in cuda/"),
        ("base/a.h", "// no guard\n", "lacks #pragma once"),
        ("base/a.cpp", '#include "base/nowhere.h"\n', "not a file of csrc/"),
        ("base/a.cpp", "#include <base/flag.h>\n", "in angle brackets"),
        ("attic/a.cpp", "", "no known layer"),
    ],
)
def test_includes_wrong_example_is_found(path: str, text: str, expected: str) -> None:
    (complaint,) = complaints(path, text, [path, *EXAMPLE_FILES])
    assert expected in complaint


def test_includes_right_example_is_not_found() -> None:
    text = '#pragma once\n#include <cstdint>\n#include "base/flag.h"\n#include "core/b.h"\n'
    assert complaints("core/a.h", text, ["core/b.h", *EXAMPLE_FILES]) == []


def test_only_stubs_know_whether_the_build_has_kernels() -> None:
    """So all other files below tensor/ are the same machine code in every build."""
    files = (path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)
    knowing = {path.relative_to(CSRC).as_posix() for path in files if KERNELS in path.read_text()}
    assert knowing == {"cuda/without_cuda.cpp", "tensor/without_cuda.cpp"}


# Switches that cannot be exhaustive: over torch's dtypes, which grow, and over remainders.
OPEN_SWITCH = re.compile(r"switch \([^{]* % \d+\)|default:  // torch's enum")


def switches_with_default(text: str) -> list[str]:
    """The `default:` lines of switches over enums, which would hide a new enumerator."""
    found = []
    for match in re.finditer(r"^ *default:.*$", text, re.MULTILINE):
        switch = text.rindex("switch (", 0, match.start())
        if not OPEN_SWITCH.search(text[switch : match.end()]):
            found.append(match.group().strip())
    return found


def test_switches_over_enums_have_no_default() -> None:
    assert switches_with_default("switch (kind) {\n  case kA:\n  default:\n  }") == ["default:"]
    assert switches_with_default("switch (place % 37) {\n  case 5:\n  default:\n  }") == []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in SUFFIXES:
            assert switches_with_default(path.read_text()) == [], path


# What locks without tensor/gil.h, and why no thread that has Python's lock waits there.
LOCK = re.compile(r"std::(lock_guard|unique_lock|scoped_lock|shared_lock)\b|\bmutex\w*\.lock\(")
OWN_LOCKS = {
    "tensor/gil.h",  # the one that gives Python's lock up
    "tensor/work.cpp",  # the mutex of torch's Work, under which nobody asks for Python's lock
    "tensor/thread_state.cpp",  # in threads without Python's lock
}


def test_layers_beside_python_lock_through_one_type() -> None:
    assert LOCK.search("const std::lock_guard lock(mutex_);") and LOCK.search("mutex_.lock();")
    locking = {
        path
        for path in project_files()
        if layer_of(path) in TORCH_LAYERS and LOCK.search((CSRC / path).read_text())
    }
    assert locking == OWN_LOCKS
