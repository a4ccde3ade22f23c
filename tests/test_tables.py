"""Tables in the docs say what the records say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_tables_are_in_step_with_the_records():
    command = [sys.executable, "benchmarks/tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/training.md"])
def test_pages_have_tables_to_check(page):
    assert "<!-- table: " in (ROOT / page).read_text()


def test_the_changelog_begins_with_this_version():
    import dtem

    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == dtem.__version__
