"""Run the notebooks in this folder and keep their outputs, small ones only.

python examples/notebooks/execute.py [NAME.ipynb ...]
"""

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
MAX_OUTPUT = 120_000
"""Characters of one output; larger ones are left out."""


def execute(path: Path) -> Any:
    """The notebook after a run from top to bottom; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    return notebook


def trim(notebook: Any) -> None:
    """Leave out what differs from run to run, messages on stderr, and large outputs."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in shown:
                output.get("data", {}).pop("image/jpeg", None)  # beside the same as PNG
            cell.outputs = [output for output in shown if len(str(output)) <= MAX_OUTPUT]
    notebook.metadata["language_info"] = {"name": "python"}


def main() -> None:
    """Run all of them, or those that are named, and write them."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        trim(notebook)
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
