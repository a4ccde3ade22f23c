"""Every block of code on the site and in the README is run, or at least read by what would run it.

* Python blocks of a page run one after the other, as a reader would run them. `timm.create_model` gives random weights;
  `images`, cat.jpg and digit.png are there. A block after ``<!-- parsed only: REASON -->`` is compiled.
* Commands of dtem go through the real parser; those that take a second (`flops`, or with mnist_vit) are run. Other
  programs must be known here, with the files, targets and extras that they name.
"""

import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import yaml

from dtem.adapters import ADAPTERS, ORIGINS
from dtem.app import examples
from dtem.cli import VERBS, main, parser, tasks
from dtem.methods import METHODS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- parsed only: (?P<reason>[^\n]+?) -->\n+)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
SHELLS = ("bash", "sh", "console", "shell")
KINDS = {"", "python", "yaml", "text", "json", "toml", *SHELLS}


@pytest.fixture
def registry() -> Iterator[None]:
    """What a page adds to the methods and models is gone afterwards."""
    before = [(known, dict(known)) for known in (METHODS, ADAPTERS, ORIGINS)]
    yield
    for known, kept in before:
        known.clear()
        known.update(kept)


class Block(NamedTuple):
    kind: str
    code: str
    line: int
    reason: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["kind"], found["code"], text.count("\n", 0, found.start("code")) + 1, found["reason"])
        for found in FENCE.finditer(text)
    ]


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Line and words of every command; lines that end in a backslash go on."""
    found = []
    for block in blocks(page):
        if block.kind in SHELLS:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    found.append((block.line, words))
    return found


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


WITH_PYTHON = [page for page in PAGES if any(block.kind == "python" for block in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if commands(page)]


def test_there_is_something_to_check() -> None:
    assert {"README.md", "index.md", "see.md", "extending.md"} <= set(names(WITH_PYTHON))
    assert {"README.md", "index.md", "training.md", "methods.md", "benchmarks.md"} <= set(names(WITH_COMMANDS))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_say_what_they_are(page: Path) -> None:
    assert {block.kind for block in blocks(page)} <= KINDS
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
@pytest.mark.usefixtures("registry")
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def random_weights(name: str, pretrained: bool = False, **options: Any) -> torch.nn.Module:
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", random_weights)
    monkeypatch.chdir(tmp_path)
    examples.drawings()[0].save("cat.jpg")
    module = types.ModuleType("read_from_a_page")
    module.__dict__["images"] = torch.rand(1, 3, 224, 224)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.kind == "python":
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if block.reason is None:
                exec(code, module.__dict__)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=names(WITH_COMMANDS))
def test_commands_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    examples.drawings()[0].save("digit.png")
    for line, words in commands(page):
        problem = wrong(words)
        assert problem is None, f"{page.name}:{line}: {shlex.join(words)}: {problem} {capsys.readouterr().err}"
        if words[0] == "dtem" and quick(*words[1:]):
            assert main(words[1:]) == 0, f"{page.name}:{line}: {capsys.readouterr().err}"


def quick(verb: str, *given: str) -> bool:
    """Whether it takes a second and needs no network (hf:NAME does)."""
    return (verb == "flops" and ":" not in given[0]) or (verb == "show" and "mnist_vit" in given)


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command; None: nothing that can be seen without running it."""
    while "=" in words[0]:  # FOO=1 command
        words = words[1:]
    program, *rest = words
    if program == "dtem":
        return misread(rest)
    if program in ("accelerate", "torchrun"):
        return misread(rest[rest.index("dtem.cli") + 1 :])
    if program == "python":
        return missing(rest)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return None if set(rest) <= set(targets) else f"there are only the targets {targets}"
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {extra for word in rest for part in re.findall(r"\[(.*)\]", word) for extra in part.split(",")}
        return None if asked <= set(extras) else f"there are only the extras {sorted(extras)}"
    return f"{program} is not known to this test"


def misread(argv: list[str]) -> str | None:
    """Whether dtem's own parser takes it; with … in it, only the verb can be checked."""
    if "…" in argv:
        return None if argv[0] in VERBS else f"there is no verb {argv[0]}"
    try:
        parser(tasks.asked(argv)).parse_args(argv)
    except SystemExit:
        return "dtem's parser refuses it:"
    return None


def missing(rest: list[str]) -> str | None:
    script = ROOT / rest[0]
    if not script.is_file():
        return f"there is no file {rest[0]}"
    known = script.read_text() + (ROOT / "benchmarks" / "common.py").read_text()
    unknown = [word for word in rest[1:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in known]
    return f"it has no {unknown}" if unknown else None


def test_every_page_is_on_the_site() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w-]+\.md", str(settings["nav"]))
    assert sorted(listed) == sorted(page.name for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize(
    "command",
    [
        "dtem show",
        "dtem flops deit_small_patch16_224 --rate 8",
        "dtem merge",
        "dtem nothing …",
        "make nothing",
        "pip install 'dtem[nothing]'",
        "python benchmarks/nothing.py",
        "python benchmarks/speed.py --nothing 3",
        "torchrun --nproc-per-node 8 -m -- dtem.cli train --nothing",
        "sudo reboot",
    ],
)
def test_what_is_wrong_is_seen(command: str) -> None:
    assert wrong(shlex.split(command)) is not None
