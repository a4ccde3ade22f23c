"""Code on the site, in the README and in docstrings is run, or at least checked by what would run it.

* Python blocks of a page run one after the other, as a reader would run them. Models have random weights; `images`,
  `loader`, cat.jpg and digit.png are there. A block after ``<!-- parsed only: REASON -->`` is compiled.
* Commands of dtem go through the real parser; those that take a second (`flops`, or with digits_vit) are run. Other
  programs must be known here, with the files, targets and extras that they name.
* Examples (``>>>``) in the docstrings of public functions run in the same surroundings, each docstring on its own.
"""

import contextlib
import doctest
import functools
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxtyping
import pytest
import timm
import torch
import yaml

import dtem
from adapters.local_hub import local_hub
from dtem.app import examples
from dtem.cli import VERBS, main, parser
from dtem.integrations import INTEGRATIONS, ORIGINS, Integration
from dtem.methods import DENSE_METHODS, METHODS, Method

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(
    r"(?:<!-- parsed only: (?P<reason>[^\n]+?) -->\n+)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
SHELLS = ("bash", "sh", "console", "shell")
KINDS = {"", "python", "yaml", "text", "json", "toml", *SHELLS}


def test_the_table_of_models_has_a_row_for_every_family() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    supported = text.partition("## What is supported")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in supported.splitlines() if row.startswith("| `")]
    assert all(len(row) == 4 and all(row) for row in rows), "family, models, photographs, weights"
    families = [row[0].strip("`") for row in rows]
    built_in = {name for name in INTEGRATIONS if name in ORIGINS}
    assert sorted(families) == sorted(built_in), "one row of docs/models.md for each family, and no other"
    for family, models, *_ in rows:
        if limited := INTEGRATIONS[family.strip("`")].methods:
            assert all(f"`{method}`" in models for method in limited), family


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What code in the docs finds: images, random weights, a Hub in a folder. What it registers is gone afterwards."""
    local_hub(tmp_path / "hub", monkeypatch)
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **options))
    monkeypatch.chdir(tmp_path)
    examples.drawings()[0].save("cat.jpg")
    examples.drawings()[0].save("digit.png")
    registries = (METHODS, DENSE_METHODS, INTEGRATIONS)
    before = [dict(registry._classes) for registry in registries]
    images = torch.rand(1, 3, 224, 224)
    yield {"images": images, "loader": [(images, torch.zeros(1, dtype=torch.long))]}
    for registry, classes in zip(registries, before, strict=True):
        registry._classes = classes


class Block(NamedTuple):
    kind: str
    code: str
    line: int
    reason: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["kind"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["reason"])
        for match in FENCE.finditer(text)
    ]


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Line and words of every command; lines that end in a backslash go on."""
    listed = []
    for block in blocks(page):
        if block.kind in SHELLS:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    listed.append((block.line, words))
    return listed


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


WITH_PYTHON = [page for page in PAGES if any(block.kind == "python" for block in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if commands(page)]


def test_there_is_something_to_check() -> None:
    assert {"README.md", "docs/index.md", "docs/train.md", "docs/extending.md"} <= set(names(WITH_PYTHON))
    assert {"README.md", "docs/index.md", "docs/tasks.md", "docs/research/methods.md"} <= set(names(WITH_COMMANDS))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_say_what_they_are(page: Path) -> None:
    assert {block.kind for block in blocks(page)} <= KINDS
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
def test_python_runs(page: Path, surroundings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("read_from_a_page")
    module.__dict__.update(surroundings)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.kind == "python":
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if block.reason is None:
                exec(code, module.__dict__)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=names(WITH_COMMANDS))
@pytest.mark.usefixtures("surroundings")
def test_commands_are_right(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in commands(page):
        problem = wrong(words)
        assert problem is None, f"{page.name}:{line}: {shlex.join(words)}: {problem} {capsys.readouterr().err}"
        if words[0] == "dtem" and quick(*words[1:]):
            assert main(words[1:]) == 0, f"{page.name}:{line}: {capsys.readouterr().err}"


def quick(verb: str, *arguments: str) -> bool:
    """Whether it takes a second and needs no network (hf:NAME does)."""
    return (verb == "flops" and not any(":" in word for word in arguments)) or (
        verb == "show" and "digits_vit" in arguments
    )


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command; None: nothing that can be seen without running it."""
    while "=" in words[0]:  # FOO=1 command
        words = words[1:]
    program, *rest = words
    if program == "dtem":
        return misread(rest)
    if program in ("accelerate", "torchrun"):
        if "benchmarks.reproduce" in rest:
            return missing(["-m", *rest[rest.index("benchmarks.reproduce") :]])
        return misread(rest[rest.index("dtem.cli") + 1 :])
    if program == "python":
        return missing(rest)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return None if set(rest) <= set(targets) else f"there are only the targets {targets}"
    if program == "pip":
        return not_installable(rest)
    return f"{program} is not known to this test"


def misread(argv: list[str]) -> str | None:
    """Whether dtem's own parser takes it; with … in it, only the verb can be checked."""
    if "…" in argv:
        return None if argv[0] in VERBS else f"there is no verb {argv[0]}"
    try:
        parser().parse_args(argv)
    except SystemExit:
        return "dtem's parser refuses it:"
    return None


def missing(rest: list[str]) -> str | None:
    """Whether a script of the checkout is there, by path or as a module, and has the options."""
    if rest[0] == "-m":
        rest = rest[1:]
        module = ROOT / rest[0].replace(".", "/")
        script = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
    else:
        script = ROOT / rest[0]
    if not script.is_file():
        return f"there is no file {rest[0]}"
    known = script.read_text() + (ROOT / "benchmarks" / "common.py").read_text()
    unknown = [word for word in rest[1:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in known]
    return f"it has no {unknown}" if unknown else None


def not_installable(rest: list[str]) -> str | None:
    """The package is on no index: it is installed from the checkout, with extras that exist."""
    target = rest[-1]
    if rest[0] != "install" or not target.startswith("."):
        return 'only a checkout can be installed: pip install ".[EXTRA]"'
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {extra for part in re.findall(r"\[(.*)\]", target) for extra in part.split(",")}
    return None if wanted <= set(extras) else f"there are only the extras {sorted(extras)}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_no_page_speaks_of_a_package_index(page: Path) -> None:
    assert not re.search(r"pip install ['\"]?dtem", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_files_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|yaml))`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / "src" / "dtem" / path).exists(), path


def test_every_page_is_on_the_site() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/-]+\.md", str(settings["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", GUIDE, ids=names(GUIDE))
def test_guide_pages_fit_two_screens_before_their_details(page: Path) -> None:
    if page.name in ("api.md", "extending.md"):  # a reference; a worked example
        pytest.skip("no details to set apart")
    first = page.read_text(encoding="utf-8").partition("\n## Details\n")[0]
    assert len(first.splitlines()) <= 110


def test_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 70


def test_api_page_is_in_step_with_the_package() -> None:
    command = [sys.executable, "docs/make_api.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


PUBLIC = [name for name in dtem.__all__ if name not in ("DtemError", "__version__")]


def documented(name: str) -> list[tuple[str, str]]:
    """Name and docstring of a public function, or of a class and its public members."""
    value = getattr(dtem, name)
    listed = [(name, inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        members = [member for member in vars(value) if not member.startswith("_")]
        docs = ((f"{name}.{member}", inspect.getdoc(inspect.getattr_static(value, member))) for member in members)
        listed += [(member, doc) for member, doc in docs if doc and ">>>" in doc]
    return listed


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name: str) -> None:
    text = documented(name)[0][1]
    assert "Examples:\n" in text, f"the docstring of dtem.{name} has no section Examples"
    assert ">>>" in text.partition("Examples:\n")[2]


@pytest.mark.parametrize("public", PUBLIC)
def test_examples_in_docstrings_run(public: str, surroundings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As doctest does it, except that output which the example does not show may be anything. All of it is small."""
    docstrings = documented(public)
    create, narrow = timm.create_model, {"embed_dim": 32, "depth": 4, "num_heads": 2}
    if public in ("compare", "model_overview"):
        narrow = {}
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, **narrow, **options))
    shorter = {
        "compare": {"methods": "tome", "timed_batch_size": ()},
        "demo": {"updates": 1, "batch_size": 2, "limit": 2, "r": (16,)},
        "train": {"updates": 2, "batch_size": 2, "workers": 0},
    }
    for verb, settings in shorter.items():
        monkeypatch.setattr(dtem, verb, functools.partial(getattr(dtem, verb), **settings))
    if public == "export":  # tracing puts symbols in the place of numbers, which are no int
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for name, text in docstrings:
        space = {**surroundings, **prepared(text)}
        for example in doctest.DocTestParser().get_examples(text):
            if example.options.get(doctest.SKIP):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(example.source, f"<docstring of dtem.{name}>", "single"), space)
            same = doctest.OutputChecker().check_output(example.want, output.getvalue(), doctest.NORMALIZE_WHITESPACE)
            assert same or not example.want, f"{name}: {example.source} shows {output.getvalue()}"


def prepared(text: str) -> dict[str, Any]:
    """Names and files that an example uses without saying where they come from, all of them small."""
    torch.manual_seed(0)
    model = tiny()
    for kind in ("photos", "imagenet/train/0", "imagenet/train/1", "imagenet/val/0", "imagenet/val/1"):
        Path(kind).mkdir(parents=True, exist_ok=True)
        for index, drawing in enumerate(examples.drawings()[:2]):
            drawing.resize((64, 64)).save(f"{kind}/{index}.png")
    Path("results").mkdir(exist_ok=True)
    shutil.copy(ROOT / "benchmarks" / "results" / "rivals.json", "results/record.json")
    handle = dtem.patch(model, r=16)
    for path in ("my.safetensors", "a.safetensors", "b.safetensors"):
        handle.save_pretrained(path, trained_r=16)
    if not re.search(r"(?<!= )\bhandle\b", text) or "handle = " in text:  # the example patches the model itself
        handle.unpatch()
    labels, criterion = torch.zeros(2, dtype=torch.long), torch.nn.functional.cross_entropy
    names = {"dtem": dtem, "torch": torch, "timm": timm, "Method": Method, "Integration": Integration, "MyViT": tiny}
    return {**names, "model": model, "handle": handle, "images": torch.rand(2, 3, 64, 64), "labels": labels} | {
        "criterion": criterion
    }


def tiny() -> torch.nn.Module:
    """A timm ViT of 64 patches that takes milliseconds."""
    vit = timm.models.vision_transformer.VisionTransformer
    return vit(img_size=64, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=10).eval()


@pytest.mark.parametrize(
    "command",
    [
        "dtem show",
        "dtem flops --model deit_small_patch16_224 --rate 8",
        "dtem flops deit_small_patch16_224",
        "dtem merge",
        "dtem nothing …",
        "make nothing",
        "pip install dtem",
        "pip install 'dtem[demo]'",
        "pip install '.[nothing]'",
        "python benchmarks/nothing.py",
        "python benchmarks/speed.py --nothing 3",
        "python -m benchmarks.reproduce --nothing",
        "torchrun --nproc-per-node 8 -m -- dtem.cli train --nothing",
        "sudo reboot",
    ],
)
def test_what_is_wrong_is_seen(command: str) -> None:
    assert wrong(shlex.split(command)) is not None
