"""Which room may know of which: every import points towards the front of `ROOMS`, or stays in its own room."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtem

PACKAGE = Path(dtem.__file__).resolve().parent
ROOMS = [
    "_version",
    "types",
    "files",
    "ops",
    "schedule",
    "embedding",
    "methods",
    "hosts",
    "adapters",
    "measure",
    "handle",
    "storage",
    "averaging",
    "visualise",
    "export",
    "tasks",
    "training",
    "reproduce",
    "app",
    "cli",
]
FACADE_AFTER = "tasks"  # `import dtem` itself offers what is defined up to here
HOST_LIBRARIES = {"timm", "transformers"}
HOST_ROOMS = {"hosts", "adapters"}  # import those freely; everyone imports these rooms' modules lazily
LAZY_ROOMS = {"tasks", "training", "reproduce", "cli"}  # may import those too, but only inside functions
DOTTED = re.compile(r"dtem(\.\w+)+(:\w+)?")

Import = tuple[str, int, bool]
"""Dotted name, line, and whether it runs when the module is imported."""

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


def room_of(path: Path) -> str:
    """types.py -> types, ops/matching.py -> ops; the package's own __init__.py is the facade, outside all rooms."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def room_named(dotted: str) -> str | None:
    """The room of a dotted name of dtem, None for other packages. The bare package is its facade."""
    parts = dotted.split(":")[0].split(".")
    if parts[0] != "dtem":
        return None
    if len(parts) == 1:
        return "__init__"
    if parts[1] == "__version__":
        return "_version"
    home = dtem._PUBLIC.get(parts[1])  # `from dtem import patch` is an import of dtem.handle
    return home.split(".")[1] if home else parts[1]


def imports(tree: ast.Module, path: Path) -> Iterator[Import]:
    """Every import of a module: statements, and dotted paths in strings, which registries import by name."""
    package = ["dtem", *path.relative_to(PACKAGE).parts[:-1]]

    def walk(node: ast.AST, runs: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, runs
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            if base == ["dtem"]:
                for alias in node.names:
                    yield f"dtem.{alias.name}", node.lineno, runs
            else:
                yield ".".join(base), node.lineno, runs
        elif isinstance(node, ast.Constant) and _names_a_room(node.value):
            yield node.value, node.lineno, False
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _type_checking(node)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, runs and not later)

    yield from walk(tree, True)


def _names_a_room(value: object) -> bool:
    """A dotted path into dtem, not a file name such as dtem.safetensors."""
    return isinstance(value, str) and DOTTED.fullmatch(value) is not None and room_named(value) in ROOMS


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def misdirected(source: str, path: Path) -> list[str]:
    """Imports of `path` that point the wrong way."""
    room, wrong = room_of(path), []
    for name, line, _ in imports(ast.parse(source), path):
        target = room_named(name)
        if target is None:
            continue
        if target == "__init__":
            allowed = ROOMS.index(room) > ROOMS.index(FACADE_AFTER)
        else:
            allowed = target in ROOMS and ROOMS.index(target) <= ROOMS.index(room)
        if not allowed:
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {room} imports {name}")
    return wrong


def out_of_place(source: str, path: Path) -> list[str]:
    """Imports of timm, transformers and accelerate where they may not be."""
    room, wrong = room_of(path), []
    for name, line, runs in imports(ast.parse(source), path):
        library = name.split(".")[0]
        host = library in HOST_LIBRARIES and not (room in HOST_ROOMS or (room in LAZY_ROOMS and not runs))
        if host or (library == "accelerate" and room != "training"):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {room} imports {name}")
    return wrong


def unsafe_loads(source: str) -> list[int]:
    """Lines that call torch.load, under whatever name, without weights_only=True."""
    tree = ast.parse(source)
    names, modules = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "load"}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in names or any(called in (f"{m}.load", f"{m}.serialization.load") for m in modules):
            safe = {k.arg: isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords}
            if not safe.get("weights_only", False):
                lines.append(node.lineno)
    return lines


def test_there_is_something_to_check() -> None:
    assert {"types.py", "ops/matching.py", "adapters/timm_vit.py"} <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_file_is_in_a_room(path: Path) -> None:
    assert room_of(path) in [*ROOMS, "__init__"], f"{path.name} is in no known room: {', '.join(ROOMS)}"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) != "__init__"], ids=lambda p: str(p.name))
def test_rooms_import_only_rooms_before_them(path: Path) -> None:
    assert misdirected(path.read_text(), path) == []


def test_the_facade_imports_nothing_but_its_version() -> None:
    path = PACKAGE / "__init__.py"
    running = [name for name, _, runs in imports(ast.parse(path.read_text()), path) if runs]
    assert [name for name in running if room_named(name) not in (None, "_version")] == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_host_libraries_stay_in_their_place(path: Path) -> None:
    assert out_of_place(path.read_text(), path) == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_torch_load_never_unpickles(path: Path) -> None:
    assert unsafe_loads(path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/matching.py", "from dtem.methods import find"),
        ("ops/matching.py", "def f():\n    from dtem import schedule"),
        ("ops/matching.py", "import dtem"),
        ("ops/matching.py", "from dtem import patch"),
        ("types.py", "from dtem.ops.matching import match"),
        ("methods/base.py", "from ..adapters import base"),
        ("methods/base.py", "TABLE = {'a': 'dtem.adapters.timm_vit:TimmVit'}"),
        ("measure/flops.py", "from dtem.nowhere import thing"),
        ("measure/flops.py", "import dtem.handle"),
    ],
)
def test_the_walk_sees_what_is_wrong(file: str, source: str) -> None:
    assert len(misdirected(source, PACKAGE / file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/merging.py", "from dtem.types import DtemError\nfrom dtem.ops.matching import match\nimport torch"),
        ("ops/merging.py", "from . import matching\nfrom .matching import match\nfrom ..types import DtemError"),
        ("cli/main.py", "import dtem\nfrom dtem import patch, __version__"),
        ("storage.py", "from dtem import __version__, handle"),
        ("storage.py", "NAME = 'dtem.safetensors'"),
    ],
)
def test_the_walk_lets_pass_what_is_right(file: str, source: str) -> None:
    assert misdirected(source, PACKAGE / file) == []


def test_the_walk_sees_host_libraries() -> None:
    inside = "def f():\n    import timm.models"
    assert out_of_place(inside, PACKAGE / "cli" / "bench.py") == []
    assert out_of_place(inside, PACKAGE / "tasks" / "classification" / "augment.py") == []
    assert out_of_place(inside, PACKAGE / "training" / "loop.py") == []
    assert out_of_place("import timm", PACKAGE / "adapters" / "timm_vit.py") == []
    assert len(out_of_place("import timm", PACKAGE / "tasks" / "classification" / "augment.py")) == 1
    assert len(out_of_place("import timm", PACKAGE / "cli" / "bench.py")) == 1
    assert len(out_of_place("class A:\n    from transformers import B", PACKAGE / "cli" / "bench.py")) == 1
    assert len(out_of_place(inside, PACKAGE / "measure" / "flops.py")) == 1
    assert out_of_place("import accelerate", PACKAGE / "training" / "loop.py") == []
    assert len(out_of_place("def f():\n    import accelerate", PACKAGE / "cli" / "bench.py")) == 1


def test_the_walk_sees_unsafe_loads() -> None:
    assert unsafe_loads("import torch\ntorch.load('a')") == [2]
    assert unsafe_loads("import torch as t\nt.load('a', weights_only=False)") == [2]
    assert unsafe_loads("from torch import load as get\nget('a', weights_only=flag)") == [2]
    assert unsafe_loads("import torch, json\ntorch.load('a', weights_only=True)\njson.load(f)") == []


def imported_by(statement: str) -> set[str]:
    """Top-level packages in memory after `statement` has run in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(run.stdout.split())


def test_import_dtem_is_light() -> None:
    loaded = imported_by("import dtem")
    assert "dtem" in loaded
    assert not loaded & {"torch", "timm", "transformers", "numpy", "safetensors", "huggingface_hub"}


def test_the_api_imports_no_host_library() -> None:
    loaded = imported_by("import dtem; dtem.patch")
    assert "torch" in loaded
    assert not loaded & HOST_LIBRARIES
