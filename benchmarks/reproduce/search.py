"""Search of the learning rate: each of `GRID` is trained on seven eighths of the training images, for fewer updates.

The other eighth judges, by cross-entropy. A cell's learning rate ``searched`` stands for the best one found.
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reproduce.cells import Cell
from dtem.errors import DtemError
from dtem.tables import Table

if TYPE_CHECKING:
    from benchmarks.reproduce.study_setup import StudySetup

GRID = (1e-6, 5e-6, 1e-5, 1e-4, 1e-3)
"""The paper's learning rates, for its method and for each baseline."""
SHARE = 4
"""The search trains for one in so many of the cell's updates."""
SEARCHED = "searched"
"""A cell's learning rate that stands for the winner of the search."""
NOT_YET = "its learning rate is not searched yet; run the same command with --search first"


def is_searched(cell: Cell) -> bool:
    """Whether the cell takes its learning rate from a search."""
    return SEARCHED in cell.settings.values()


def is_missing(setup: "StudySetup", cell: Cell) -> bool:
    """Whether the cell waits for a search."""
    return is_searched(cell) and not search_file(setup, cell).is_file()


def key_of(cell: Cell) -> str:
    """The setting that is searched: the one that says so, else the learning rate of what learns."""
    named = [name for name, value in cell.settings.items() if value == SEARCHED]
    if len(named) > 1 or set(named) - {"lr", "host_lr"}:
        raise DtemError(
            f"{cell.name}: only lr or host_lr can be {SEARCHED}, one of them; here it is {', '.join(named)}"
        )
    return named[0] if named else "host_lr" if cell.settings.get("mode") == "finetune" else "lr"


def at(cell: Cell, lr: float) -> Cell:
    """The cell with a learning rate of its own."""
    return dataclasses.replace(cell, settings={**cell.settings, key_of(cell): lr})


def resolve(setup: "StudySetup", cell: Cell) -> Cell:
    """The cell with the learning rate that the search has found, where it takes one."""
    if not is_searched(cell):
        return cell
    path = search_file(setup, cell)
    if not path.is_file():
        raise DtemError(f"{cell.row}: {NOT_YET}")
    return at(cell, json.loads(path.read_text(encoding="utf-8"))["best"])


def search_file(setup: "StudySetup", cell: Cell) -> Path:
    """The file of the search's result: seed 0 decides for all seeds."""
    identity = setup.identity(at(dataclasses.replace(cell, seed=0, trained=True), GRID[0]))
    text = json.dumps([identity, key_of(cell), GRID, SHARE], sort_keys=True)
    return setup.work / "search" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def search(setup: "StudySetup", cells: Sequence[Cell]) -> tuple[list[dict[str, Any]], Table]:
    """Search the learning rate of each row of trained cells; results as JSON and as a table. What is there is kept."""
    if setup.study.task != "classification":
        raise DtemError(f"--search is for classification; {setup.study.name} is about {setup.study.task}")
    rows = {cell.row: dataclasses.replace(cell, seed=0) for cell in reversed(cells) if cell.trained}
    document = []
    for row, cell in reversed(rows.items()):
        path = search_file(setup, cell)
        tried = {lr: _held_out_loss(setup, cell, lr, path.with_suffix("")) for lr in GRID}
        finished = {lr: loss for lr, loss in tried.items() if loss is not None}
        if not finished:
            raise DtemError(f"{row}: the training diverges at every learning rate of the search")
        best = min(finished, key=lambda lr: finished[lr])
        found = {
            "row": row,
            "setting": key_of(cell),
            "best": best,
            "cross_entropy": {f"{k:g}": v for k, v in tried.items()},
        }
        _write(path, found)
        document.append(found)
    lines = []
    for found in document:
        losses = ("diverges" if loss is None else f"{loss:.4f}" for loss in found["cross_entropy"].values())
        lines.append((found["row"], found["setting"], f"{found['best']:g}", *losses))
    columns = ("row", "setting", "best", *(f"{lr:g}" for lr in GRID))
    return document, Table("Learning rates", columns, lines, "cross-entropy on the eighth that is held out, over rates")


def _held_out_loss(setup: "StudySetup", cell: Cell, lr: float, folder: Path) -> float | None:
    """Cross-entropy on the held-out images after one training, the mean over the cell's rates; None: it diverges."""
    from benchmarks import common
    from benchmarks.reproduce import image_splits
    from dtem.tasks.classification import evaluator
    from dtem.training.train import train

    result = folder / f"{lr:g}.json"
    if not result.is_file():
        print(f"search: {cell.row}, learning rate {lr:g}", file=sys.stderr, flush=True)
        chosen = at(cell, lr)
        files = sorted(file for file in Path(setup.training_images(cell)).glob("*/*") if file.is_file())
        images = image_splits.link_parts(image_splits.hold_out(files), folder / "images")
        config = setup.config(chosen)
        config = dataclasses.replace(
            config,
            data=str(images / "search"),
            out=str(folder / f"{lr:g}"),
            updates=math.ceil(config.updates / SHARE),
            epochs=config.epochs if config.updates else config.epochs / SHARE,
        )
        loss: float | None = None
        try:
            handle = train(setup.host(chosen), config.data, config=config).handle
        except DtemError as error:
            if "lower the learning rate" not in str(error):
                raise
        else:
            outcomes = evaluator.sweep(
                handle, common.open_images(handle.model, images / "held"), list(cell.rates.values())
            )
            loss = sum(each.mean_loss for each in outcomes.values()) / len(outcomes)
        _write(result, {"cross_entropy": loss})
    value: float | None = json.loads(result.read_text(encoding="utf-8"))["cross_entropy"]
    return value


def _write(path: Path, content: dict[str, Any]) -> None:
    from dtem.files import write_file

    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=2, allow_nan=False))
