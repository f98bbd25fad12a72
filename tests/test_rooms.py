"""Imports of the package go one way: from a room to those below it, and never in a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_extension

PYTHON = Path(__file__).parent.parent / "python"

# From the bottom to the top: the extension with its errors, tensors, how ranks meet and hold what
# others read, what sits on the extension, the way of gradients, guests, and the door.
ROOMS = [
    {"_C", "_torch", "errors"},
    {"options", "sharding", "timeouts"},
    {"rendezvous", "shared"},
    {"backend", "coalescing", "communicator", "engine", "ops", "window", "window_setup"},
    {"amp", "gradients", "optim"},
    {"checkpoint", "elastic", "fsdp", "gpu", "local_sgd", "parameter_server", "shards", "weights"},
    {"", "__main__", "doctor", "rota_autoload"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def room_of(module: str) -> str:
    """The part of the package; "" is the package itself."""
    return module.removeprefix("rota.").split(".")[0] if module != "rota" else ""


def imports_of(source: str, modules: Iterable[str]) -> set[str]:
    """The modules of the package that a file imports, in functions, too, but not for types only."""
    tree, found = ast.parse(source), set()
    for_types = {
        imported
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for imported in node.body
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(modules) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def package() -> dict[str, set[str]]:
    """What each module imports."""
    sources = {"rota._C": ""}
    for path in PYTHON.rglob("*.py"):
        parts = path.relative_to(PYTHON).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return {module: imports_of(source, sources) for module, source in sources.items()}


def complaints(imports: Mapping[str, set[str]]) -> list[str]:
    found = []
    for module, imported in imports.items():
        for other in imported:
            room, below = room_of(module), room_of(other)
            if room != below and LEVEL[below] > LEVEL[room]:
                found.append(f"{module} imports {other}: {room} must not know {below}")
    rooms: dict[str, set[str]] = {}
    for module, imported in imports.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, imported - {module}))
    for graph in (imports, {room: below - {room} for room, below in rooms.items()}):
        # Not the door, which imports itself by way of torch.
        inside = {n: others for n, others in graph.items() if room_of(n) not in ROOMS[-1]}
        try:
            graphlib.TopologicalSorter(inside).prepare()
        except graphlib.CycleError as error:
            found.append("a circle: " + " -> ".join(error.args[1]))
    return found


def test_imports_of_package_point_down() -> None:
    assert complaints(package()) == []


@pytest.mark.parametrize(
    ("module", "imported", "expected"),
    [
        ("rota.backend", "rota.elastic.membership", "backend must not know elastic"),
        ("rota.rendezvous.joint", "rota.communicator", "rendezvous must not know communicator"),
        ("rota.gradients.hooks", "rota.shards", "gradients must not know shards"),
        ("rota.window_setup", "rota.window", "a circle"),
        ("rota.gradients.ddp", "rota.gradients.hooks", "a circle"),
    ],
)
def test_wrong_import_is_found(module: str, imported: str, expected: str) -> None:
    imports = package()
    imports["rota.gradients.hooks"].add("rota.gradients.ddp")
    imports[module].add(imported)
    assert any(expected in complaint for complaint in complaints(imports))


def test_imports_in_functions_are_seen() -> None:
    modules = ["rota", "rota.errors", "rota.window", "rota.timeouts"]
    source = "def f():\n    from rota import window\nif TYPE_CHECKING:\n    import rota.timeouts"
    assert imports_of(source, modules) == {"rota.window"}
    assert imports_of("from rota.errors import Mismatch", modules) == {"rota.errors"}
