"""Public names and their signatures, held against a record: a change of either shows in its diff.

tests/public_names.txt says where each name is, and, by the name alone, what it takes; then the
signatures of the extension's stubs, and what the backend overrides of c10d's classes. A name that
moves to another module changes one line.

    ROTA_PUBLIC_NAMES=record python -m pytest tests/test_public_names.py  # writes the record
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rota

pytestmark = pytest.mark.same_in_every_build

RECORD = Path(__file__).with_name("public_names.txt")
STUBS = Path(rota.__file__).parent / "_C"
BACKEND = Path(__file__).parents[1] / "csrc" / "c10d"
MODULES = (
    "rota",
    "rota.amp",
    "rota.checkpoint",
    "rota.elastic",
    "rota.errors",
    "rota.fsdp",
    "rota.gpu",
    "rota.local_sgd",
    "rota.optim",
    "rota.ops",
    "rota.optim",
    "rota.parameter_server",
    "rota.weights",
)


def public_names(module: ModuleType) -> Sequence[str]:
    """A module without __all__ has the functions and classes that are defined in it."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def module_lines() -> Iterator[str]:
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        for name in public_names(module):
            value = getattr(module, name)
            yield f"at {module_name}.{name}"
            if inspect.isclass(value):
                yield from class_lines(name, value)
            elif callable(value):
                yield f"def {name}{signature_of(value)}"


def class_lines(class_name: str, value: type) -> Iterator[str]:
    yield f"class {class_name}"
    for name in dir(value):
        owner = next((base for base in value.__mro__ if name in vars(base)), object)
        is_public = not name.startswith("_") or name in ("__init__", "__new__")
        if not is_public or not owner.__module__.startswith("rota"):
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, property):
            yield f"property {class_name}.{name}{signature_of(member.fget)}"
        elif callable(bound := getattr(value, name)):
            yield f"def {class_name}.{name}{signature_of(bound)}"
        else:
            yield f"attribute {class_name}.{name}"


def signature_of(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except ValueError:  # of the extension, whose stubs have it
        return "(...)"
    return re.sub(r"\brota\.(\w+\.)*", "", text)  # where annotations are no strings


def stub_lines(body: Sequence[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name, bases=bases):
                yield f"stub class {prefix}{name}({', '.join(map(ast.unparse, bases))})"
                yield from stub_lines(node.body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name, args=args, returns=returns):
                decorators = [f"@{ast.unparse(decorator)} " for decorator in node.decorator_list]
                result = "" if returns is None else f" -> {ast.unparse(returns)}"
                yield f"stub {prefix}{name}({ast.unparse(args)}){result} {''.join(decorators)}"
            case ast.Assign() | ast.AnnAssign():
                yield f"stub {prefix}{ast.unparse(node)}"


def override_lines(header: str) -> Iterator[str]:
    code = re.sub(r"//.*|^#.*|\b(public|protected|private):", "", header, flags=re.MULTILINE)
    for declaration in re.findall(r"[^;{}]*\boverride\b", code):
        yield " ".join(["override", *declaration.removesuffix("override").split()])


def test_public_names_and_signatures_are_those_of_the_record() -> None:
    lines = set(module_lines())
    for path in STUBS.glob("*.pyi"):
        prefix = "" if path.stem == "__init__" else f"{path.stem}."
        lines.update(stub_lines(ast.parse(path.read_text()).body, prefix))
    for path in BACKEND.glob("*.h"):
        lines.update(override_lines(path.read_text()))
    found = sorted(line.strip() for line in lines)
    if os.environ.get("ROTA_PUBLIC_NAMES") == "record":
        RECORD.write_text("\n".join(found) + "\n")
    recorded = RECORD.read_text().splitlines()
    assert found == recorded, "\n".join(difflib.unified_diff(recorded, found, lineterm="", n=0))
