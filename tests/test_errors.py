"""Optional packages: a missing one is named with the one extra that suffices, before any work."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import dtem
from dtem.cli import main
from dtem.errors import DtemError, require

SOURCE = Path(dtem.__file__).parent
USES = [
    (path.name, *(argument.value for argument in node.args if isinstance(argument, ast.Constant)))
    for path in sorted(SOURCE.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "require" and len(node.args) == 2
]


def requirements(extra: str) -> set[str]:
    """Packages of an extra of dtem, those of its extras included."""
    packages = set()
    for line in importlib.metadata.requires("dtem") or ():
        name, extras, condition = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?[^;]*(?:; (.*))?", line).groups()
        if condition is None or f"'{extra}'" in condition.replace('"', "'"):
            packages |= {each for nested in extras.split(",") for each in requirements(nested)} if extras else {name}
    return packages


def test_there_are_uses() -> None:
    assert len(USES) >= 8


@pytest.mark.parametrize(("file", "module", "extra"), [use for use in USES if len(use) == 3])
def test_every_extra_holds_its_package(file: str, module: str, extra: str) -> None:
    package = {"yaml": "pyyaml"}.get(module.partition(".")[0], module.partition(".")[0])
    assert package in requirements(extra), file


def test_no_other_message_says_how_to_install() -> None:
    own = [path.name for path in SOURCE.rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")]
    assert sorted(own) == ["__init__.py", "errors.py"]  # integrations/__init__.py: a newer transformers


def test_the_message() -> None:
    assert require("json", "plot").dumps([]) == "[]"
    with pytest.raises(DtemError) as caught:
        require("no_such_package.part", "plot")
    assert str(caught.value) == (
        "this needs the package no_such_package (No module named 'no_such_package'): "
        'in a checkout of dtem, run pip install ".[plot]"'
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("export --model deit_tiny_patch16_224 --out {}/a.onnx", "onnx", "export"),
        ("export --model deit_tiny_patch16_224 --out {}/a.onnx", "onnxruntime", "export"),
        ("export --model deit_tiny_patch16_224 --out {}/a.xml", "onnxscript", "openvino"),
        ("export --model deit_tiny_patch16_224 --out {}/a.xml", "openvino", "openvino"),
        ("predict {} --out {}/a.parquet", "pyarrow", "predict"),
        ("eval --model deit_tiny_patch16_224 --data {} --plot {}/a.png", "matplotlib", "plot"),
        ("compare --model deit_tiny_patch16_224 --data {} --gflops 1 --plot {}/a.png", "matplotlib", "plot"),
        ("eval --model seg_t_mask_16 --weights {}/a.pth --data {}", "torchmetrics", "segmentation"),
        ("demo --out {}/a.html", "matplotlib", "demo"),
        ("demo --out {}/a.html", "accelerate", "demo"),
        ("demo --out {}/a.html", "mlxtend", "demo"),
        ("demo --model deit_tiny_patch16_224 --data {}", "accelerate", "demo"),
        ("app", "gradio", "app"),
        ("app", "matplotlib", "app"),
        ("train --model deit_tiny_patch16_224 --data {}", "accelerate", "train"),
        ("train --preset few --model deit_tiny_patch16_224 --data {}", "yaml", "train"),
    ],
)
def test_a_missing_package_is_named_before_any_work(
    command: str, package: str, extra: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model is built")

    for builder in ("factory._timm_model", "factory._segmenter", "hub.create"):  # no module imports them by name
        monkeypatch.setattr(f"dtem.models.{builder}", no_model)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command.replace("{}", str(tmp_path)).split()) == 2
    error = capsys.readouterr().err
    assert f"needs the package {package} " in error
    assert f'pip install ".[{extra}]"' in error
