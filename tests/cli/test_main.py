"""The command itself: what it loads, what it prints where, and how it fails."""

import argparse
import ast
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

import dtem
from dtem import cli
from dtem.types import DtemError

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


def test_every_verb_is_listed_by_its_own_name() -> None:
    files = {path.stem for path in (SOURCE / "dtem" / "cli").glob("*.py")}
    for name, path in cli.VERBS.items():
        module = sys.modules.get(path) or __import__(path, fromlist=["NAME"])
        assert name == module.NAME
    verbs = {stem for stem in files if "NAME" in _assigned(SOURCE / "dtem" / "cli" / f"{stem}.py")}
    by_task = [path for files in cli.tasks.VERBS.values() for path in files.values()]
    assert verbs == {path.rpartition(".")[2] for path in [*cli.VERBS.values(), *by_task]}


def _assigned(path: Path) -> set[str]:
    return {
        target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize("argv", [[], ["nothing"], ["flops"], ["flops", "test_vit", "--pool", "sum"]])
def test_what_argparse_refuses_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: dtem" in printed.err


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb whose `run` the test sets."""
    module = types.ModuleType("fake_verb", "A verb.")
    module.NAME, module.HELP, module.EXAMPLES = "fake", "fake", ""
    module.add_arguments = lambda parser: None
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(cli.VERBS, "fake", "fake_verb")
    return module


def test_stdout_is_for_the_result_alone(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args) -> int:
        print("chatter")
        cli.common.show(args, {"a": [1, None, "µ"]}, "a table")
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
verb = types.ModuleType("fake_verb", "A verb.")
verb.NAME, verb.HELP, verb.EXAMPLES, verb.add_arguments = "fake", "fake", "", lambda parser: None
def run(args):
    for _ in range(100):
        cli.common.show(args, ["x" * 10_000])
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
