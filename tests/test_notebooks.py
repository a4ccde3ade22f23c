"""Every notebook runs from top to bottom (slow), and those in the repository have been run and are small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel", "onnxruntime", "pyarrow", "mlxtend", "transformers"):
        pytest.importorskip(module, reason='needs pip install ".[notebooks]"')
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    command = [sys.executable, str(path.parent / "execute.py"), str(copy)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_has_been_run_and_is_small(path: Path) -> None:
    assert path.stat().st_size < 400_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell["outputs"])
    text = path.read_text()
    for private in (str(ROOT), str(Path.home()) + "/"):
        assert private not in text
