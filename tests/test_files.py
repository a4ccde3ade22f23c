"""Writing and locking of files."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtem import files
from dtem.errors import DtemError

HOLD = """
import sys
from dtem import files
with files.lock(sys.argv[1], "predict run"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_says_who_holds_it_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "preds.parquet"
    with holder(path) as process:
        with pytest.raises(DtemError, match="predict run") as caught, files.lock(path, "predict run"):
            pytest.fail("two have it")
        message = str(caught.value)
        assert str(path) in message
        assert f"process {process.pid}" in message
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", message)
        assert "wait" in message
        assert process.stdin is not None
        process.stdin.close()
    with files.lock(path, "predict run"):
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["preds.parquet.lock", "preds.parquet.lock.json"]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with files.lock(tmp_path / "run", "train run"):
            content = (tmp_path / "run.lock.json").read_text()
        assert f'"pid": {os.getpid()}' in content
    assert list(tmp_path.iterdir()) == []


def test_a_lock_holds_within_a_process_too_and_is_free_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run"

    def interrupted() -> None:
        with files.lock(path, "train run"):
            with pytest.raises(DtemError, match=f"process {os.getpid()}"), files.lock(path, "train run"):
                pytest.fail("two have it")
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()


def test_where_no_lock_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DtemError, match=r"file/run\.lock"), files.lock(tmp_path / "file" / "run", "train run"):
        pytest.fail("no lock")
