"""Every benchmark script imports and prints its help."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"__init__", "common", "frozen_tables", "frozen_training", "plain_tome", "similarity_terms"}
SCRIPTS = [*sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - LIBRARIES), "reproduce.__main__"]
PRINT_HELP = """
import contextlib, importlib, io, sys, traceback
failed = []
for name in sys.argv[1:]:
    sys.argv, out = [name, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            importlib.import_module(f"benchmarks.{name}").main()
    except SystemExit as end:
        if end.code == 0 and "usage:" in out.getvalue():
            continue
    except BaseException:
        traceback.print_exc()
    failed.append(name)
sys.exit(f"without help: {failed}" if failed else 0)
"""


def test_every_script_has_help():
    """One process for all: most of the time is the import of torch and timm."""
    pytest.importorskip("onnxruntime")
    done = subprocess.run([sys.executable, "-c", PRINT_HELP, *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
