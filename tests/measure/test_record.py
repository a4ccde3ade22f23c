"""Records: what they hold, that they survive, and that nothing else passes for one."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dtem.errors import DtemError
from dtem.measure import record


@pytest.fixture
def made() -> record.Record:
    return record.collect("bench", {"rows": [1, 2.5, None, "µ"]}, seed=7, command=["/opt/bin/dtem", "bench"])


def test_round_trip(made: record.Record, tmp_path: Path) -> None:
    path = record.save(made, tmp_path / "new" / "folder" / "one.json")
    assert record.load_record(path) == made
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


def test_provenance(made: record.Record) -> None:
    assert made.kind == "bench"
    assert made.seed == 7
    assert made.data is None
    assert set(made.versions) == {"dtem", "python", "torch", "timm"}
    assert set(made.machine) == {"cpu", "cores", "threads", "gpu", "os"}
    assert made.machine["cores"] == os.cpu_count()
    assert made.time.endswith("+00:00")


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["/usr/bin/dtem", "flops", "m"], ["dtem", "flops", "m"]),
        (["/site/dtem/cli/__main__.py", "demo"], ["dtem", "demo"]),
        (["dtem", "--out", "/some/where/a.json"], ["dtem", "--out", "a.json"]),
        (["dtem", "--out=/some/where/a.json"], ["dtem", "--out=a.json"]),
        (["dtem", "--out", "results/a.json", "--r", "16/8"], ["dtem", "--out", "results/a.json", "--r", "16/8"]),
    ],
)
def test_the_command_names_no_folders_of_the_machine(typed: list[str], kept: list[str]) -> None:
    assert record.plain_command(typed) == kept


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that looks like dtem's."""
    source = tmp_path / "src" / "dtem" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    try:
        git(tmp_path, "init", "-q")
    except OSError:
        pytest.skip("git is not installed")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first", "--no-verify")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commit_of_a_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    clean = record.collect("x", None)
    assert (clean.commit, clean.dirty) == (head, False)
    (checkout / "src" / "dtem" / "__init__.py").write_text("changed = True")
    changed = record.collect("x", None)
    assert (changed.commit, changed.dirty) == (head, True)


def test_no_commit_elsewhere(checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    (checkout / "src" / "dtem" / "__init__.py").unlink()
    foreign = record.collect("x", None)
    assert (foreign.commit, foreign.dirty) == (None, None)
    monkeypatch.chdir(tmp_path_factory.mktemp("plain"))
    assert record.collect("x", None).commit is None


def test_data_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_text("1")
    (tmp_path / "sub" / "b").write_text("2")
    first = record.data_hash(tmp_path)
    assert record.data_hash(tmp_path) == first
    (tmp_path / "a").write_text("3")
    second = record.data_hash(tmp_path)
    (tmp_path / "a").rename(tmp_path / "c")
    assert len({first, second, record.data_hash(tmp_path), record.data_hash(tmp_path / "c")}) == 4
    with pytest.raises(DtemError, match="nowhere"):
        record.data_hash(tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_file(made: record.Record, tmp_path: Path, monkeypatch) -> None:
    path = record.save(made, tmp_path / "one.json")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "replace", fail)
    with pytest.raises(DtemError, match=r"one\.json cannot be written .No space left"):
        record.save(record.collect("other", None), path)
    monkeypatch.undo()
    assert record.load_record(path) == made
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        record.save(record.collect("x", float("nan")), tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def damaged(content: str) -> str:
    return content[: len(content) // 2]


def foreign(content: str) -> str:
    return json.dumps({"format": "something-else", "results": 1})


def from_the_future(content: str) -> str:
    return content.replace(record.FORMAT, "dtem-record-99")


def without_machine(content: str) -> str:
    return json.dumps({key: value for key, value in json.loads(content).items() if key != "machine"})


def with_more(content: str) -> str:
    return json.dumps({**json.loads(content), "extra": 1})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (damaged, "damaged or not a record"),
        (foreign, "'something-else'"),
        (from_the_future, "'dtem-record-99'"),
        (without_machine, "lacks machine"),
        (with_more, "has unknown extra"),
        (lambda content: "[1, 2]", "format is None"),
        (lambda content: "", "damaged or not a record"),
    ],
)
def test_other_files_are_refused_by_name(made: record.Record, tmp_path: Path, change, says: str) -> None:
    path = record.save(made, tmp_path / "named.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(DtemError, match=says) as error:
        record.load_record(path)
    assert "named.json" in str(error.value)


def test_binary_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("binary.json", "missing.json"):
        with pytest.raises(DtemError, match=name):
            record.load_record(tmp_path / name)
