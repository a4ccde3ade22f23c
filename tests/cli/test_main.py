"""The command itself: what it loads, what it prints where, and how it fails."""

import argparse
import ast
import concurrent.futures
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

import dtem
from dtem import cli
from dtem.cli import printing
from dtem.cli.parser import VerbParser, image_size
from dtem.errors import DtemError

SOURCE = Path(dtem.__file__).resolve().parent.parent
HEAVY = {"torch", "timm", "numpy", "rich", "safetensors", "huggingface_hub"}


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200, **options
    )


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([verb, "--help"] for verb in cli.VERBS)], ids=" ".join)
def test_help_and_version_load_nothing_heavy(argv: list[str]) -> None:
    code = f"""
import sys
from dtem.cli import main
try:
    main({argv!r})
except SystemExit as stop:
    loaded = {{name.split(".")[0] for name in sys.modules}}
    print(stop.code, sorted(loaded & {HEAVY!r}), file=sys.stderr)
"""
    done = python(code)
    assert done.stderr == "0 []\n"
    assert ("examples:" in done.stdout) == (argv != ["--version"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"dtem {dtem.__version__}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_has_the_parts_of_one(verb: str) -> None:
    module = importlib.import_module(cli.VERBS[verb])
    assert module.__doc__
    assert module.HELP
    assert module.EXAMPLES.startswith("examples:\n")
    assert f"dtem {verb}" in module.EXAMPLES
    assert callable(module.add_arguments)
    assert callable(module.run)


@pytest.mark.parametrize("path", sorted((SOURCE / "dtem" / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_no_file_of_the_command_line_imports_a_verb(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert not imported & set(cli.VERBS.values())


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "required: VERB"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["flops", "test_vit"], "unrecognized arguments: test_vit"),
        (["flops", "--global-pool", "sum"], "invalid choice: 'sum'"),
        (["flops", "--meth", "tome"], "unrecognized arguments: --meth tome"),
        (["average", "a"], "required: --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_argparse_refuses_ends_with_2(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert error in printed.err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_fits_a_screen(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, flag])
        assert stop.value.code == 0
        texts[flag] = capsys.readouterr().out
    assert len(texts["--help"].splitlines()) <= 50
    assert "examples:" in texts["--help"]
    common, every = (set(re.findall(r"^ +(--[\w-]+)", text, re.MULTILINE)) for text in texts.values())
    assert common <= every
    assert ("--help-all\n" in texts["--help"]) == (common < every)
    assert "--help-all\n" not in texts["--help-all"]


def test_one_vocabulary() -> None:
    """A flag means the same in every verb: it takes an argument or not, and any choices it lists are the same."""
    meanings: dict[str, set[object]] = {}
    for verb in cli.VERBS:
        for action in verb_parser(verb)._actions:
            for flag in action.option_strings:
                found = meanings.setdefault(flag, set())
                found.add(action.nargs == 0)
                if action.choices is not None:
                    found.add(tuple(action.choices))
    mixed = {flag: found for flag, found in meanings.items() if {True, False} <= found or len(found) > 2}
    assert not mixed
    gone = {
        "--task",
        "--ratio",
        "--pool",
        "--classes",
        "--batch",
        "--pretrained",
        "--random",
        "--once",
        "--bad",
        "--norm",
    }
    assert not gone & meanings.keys()


def verb_parser(verb: str) -> VerbParser:
    subparsers = next(action for action in cli.parser([verb])._actions if isinstance(action.choices, dict))
    return subparsers.choices[verb]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb whose `run` the test sets."""
    module = types.ModuleType("fake_verb", "A verb.")
    module.HELP, module.EXAMPLES = "fake", ""
    module.add_arguments = lambda parser: None
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(cli.VERBS, "fake", "fake_verb")
    return module


def test_stdout_is_for_the_result_alone(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args) -> int:
        print("chatter")
        printing.print_parts(args, {"a": [1, None, "µ"]}, "a table")
        return 0

    verb.run = run
    assert cli.main(["fake", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": [1, None, "µ"]}
    assert printed.err == "chatter\n"
    assert cli.main(["fake"]) == 0
    assert capsys.readouterr().out == "a table\n"


def raising(error: BaseException):
    def run(args) -> int:
        raise error

    return run


def test_a_mistake_is_one_line_and_2(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.run = raising(DtemError("r = -1 is no r"))
    assert cli.main(["fake", "--json"]) == 2
    assert capsys.readouterr() == ("", "error: r = -1 is no r\n")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("add global_pool = 'avg'", "add --global-pool avg"),
        ("add num_classes = 9.", "add --num-classes 9."),
        ("threads = 0 must be 1 or more", "--threads 0 must be 1 or more"),
        ("shortcut=True is not available", "--shortcut is not available"),
        ("r = '' is not a schedule", "--r '' is not a schedule"),
        ("weights = FILE, or pretrained = False", "--weights FILE, or --random-weights"),
        ("leave encoder_weights out", "leave --encoder-weights out"),
        ("global_pool: it has its own", "--global-pool: it has its own"),
        ("unknown_name = 3, some_name", "unknown_name = 3, some_name"),
        ("in num_classes.yaml and x/img_size/y", "in num_classes.yaml and x/img_size/y"),
        ("call img_size(3)", "call img_size(3)"),
        ("r = [1, 2] holds", "r = [1, 2] holds"),
    ],
)
def test_python_arguments_are_shown_as_flags(message: str, shown: str) -> None:
    flags = verb_parser("bench")._option_string_actions
    assert cli.as_flags(message, flags) == shown


def test_flags_are_those_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flops", "--model", "seg_t_mask_16", "--global-pool", "avg"]) == 2
    assert capsys.readouterr().err.startswith("error: --global-pool avg is for classifiers")


def test_a_bug_is_not_hidden(verb: types.ModuleType) -> None:
    verb.run = raising(ValueError("not the user's fault"))
    with pytest.raises(ValueError, match="not the user's fault"):
        cli.main(["fake"])


def test_told_to_end_it_cleans_up(verb: types.ModuleType, tmp_path: Path) -> None:
    def run(args: argparse.Namespace) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            assert list(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    verb.run = run
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fake"])
    assert ended.value.code == 143
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_runs_outside_the_main_thread(verb: types.ModuleType) -> None:
    verb.run = lambda args: 7
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(cli.main, ["fake"]).result() == 7


def test_interrupt_ends_with_130(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.run = raising(KeyboardInterrupt())
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_closed_pipe_is_no_news() -> None:
    code = """
import sys, types
from dtem import cli
from dtem.cli.printing import print_parts
verb = types.ModuleType("fake_verb", "A verb.")
verb.HELP, verb.EXAMPLES, verb.add_arguments = "fake", "", lambda parser: None
def run(args):
    for _ in range(100):
        print_parts(args, ["x" * 10_000])
    return 0
verb.run = run
sys.modules["fake_verb"] = verb
cli.VERBS["fake"] = "fake_verb"
sys.exit(cli.main(["fake", "--json"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=200
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(("text", "size"), [("384", (384, 384)), ("224x320", (224, 320)), ("64X32", (64, 32))])
def test_image_sizes(text: str, size: tuple[int, int]) -> None:
    assert image_size("--img-size", text) == size
    assert image_size("--img-size", None) is None


@pytest.mark.parametrize("text", ["", "x", "0", "12x0", "1x2x3", "-4", "big"])
def test_what_is_no_image_size(text: str) -> None:
    with pytest.raises(DtemError, match=f"--img-size {text} is not a size; write 384"):
        image_size("--img-size", text)
