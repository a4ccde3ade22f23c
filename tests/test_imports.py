"""Import direction: the layers are checked by import-linter (pyproject.toml), the rules that it cannot express here."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtem
from dtem.cli import VERBS

PACKAGE = Path(dtem.__file__).resolve().parent
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
SOURCES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
HOST_LIBRARIES = {"timm", "transformers"}


def imported(tree: ast.AST, lazily: bool) -> Iterator[str]:
    """Modules that a file imports, at its top level only or, `lazily`, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif lazily or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(node, lazily)


def importers(library: str, lazily: bool, outside: tuple[str, ...]) -> list[str]:
    """Files that import a library, outside some packages."""
    return [
        name
        for name, tree in SOURCES.items()
        if not name.startswith(outside) and any(each.split(".")[0] == library for each in imported(tree, lazily))
    ]


def test_packages_import_only_packages_before_them():
    cli = pytest.importorskip("importlinter.cli", reason="import-linter is in the extra dev")
    assert cli.lint_imports(config_filename=str(PYPROJECT), no_cache=True) == 0


def test_host_libraries_are_imported_at_the_top_of_integrations_and_models_only():
    assert [importers(library, False, ("integrations/", "models/")) for library in HOST_LIBRARIES] == [[], []]


def test_accelerate_is_imported_in_training_only():
    assert importers("accelerate", True, ("training/",)) == []


def test_the_command_line_stays_in_cli():
    takes_namespace = [
        f"{name}: {node.name}"
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(
            each.annotation and "Namespace" in ast.unparse(each.annotation)
            for each in ast.walk(node.args)
            if isinstance(each, ast.arg)
        )
    ]
    unpickles_namespaces = "models/weights.py"  # of official checkpoints, which hold their arguments
    assert importers("argparse", True, ("cli/", unpickles_namespaces)) == []
    assert [each for each in takes_namespace if not each.startswith("cli/")] == []


def test_no_verb_imports_another_verb():
    for verb in VERBS.values():
        tree = SOURCES[f"{verb.removeprefix('dtem.').replace('.', '/')}.py"]
        names = {name for name in imported(tree, lazily=True) if name.startswith("dtem.cli.")}
        assert not {name for name in names if name.startswith((*VERBS.values(),)) and not name.startswith(verb)}, verb


def test_torch_load_never_unpickles():
    """(ruff has no rule for it: bandit's B614.)"""
    loads = [
        (name, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads, "the weights of models are loaded somewhere"
    assert [name for name, keywords in loads if keywords.get("weights_only") != "True"] == []
    under_another_name = {"torch.load", "torch.serialization.load"}
    assert [name for name, tree in SOURCES.items() if under_another_name & set(imported(tree, lazily=True))] == []


def packages_after(statement: str) -> set[str]:
    """Top-level packages in memory after `statement` in a new interpreter."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(run.stdout.split())


def test_import_dtem_is_light():
    packages = packages_after("import dtem")
    assert "dtem" in packages
    assert not packages & {"torch", "timm", "transformers", "numpy", "safetensors", "huggingface_hub"}


def test_the_api_imports_no_host_library():
    packages = packages_after("import dtem; dtem.patch, dtem.from_pretrained, dtem.list_methods()")
    assert "torch" in packages
    assert not packages & HOST_LIBRARIES


def test_type_checkers_see_the_public_names() -> None:
    static = {
        alias.name: node.module
        for node in ast.walk(SOURCES["__init__.py"])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert static == dtem._PUBLIC | {"__version__": "dtem._version"}
