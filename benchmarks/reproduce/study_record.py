"""The finished cells of a study as one record: a row per method and rate, averaged over seeds, no per-image data.

These records are small enough to commit. Tables, plots and pages are drawn from them alone.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reproduce import image_splits, per_image_outcomes, runner, search
from benchmarks.reproduce.cells import Cell
from benchmarks.reproduce.specs import STUDY_RECORD, Claim
from benchmarks.reproduce.study_setup import StudySetup
from dtem.measure import record


class CellResult(NamedTuple):
    """One cell at one rate."""

    cell: Cell
    rate: str
    """Label of the rate."""
    metrics: dict[str, Any]
    outcomes: Any
    """Per image (`per_image_outcomes`)."""


Groups = dict[tuple[str, str], list[CellResult]]
"""Results of all seeds by row and rate."""


def collect(setup: StudySetup, cells: Sequence[Cell], command: Sequence[str]) -> record.Record:
    """The record of a study; unfinished cells are listed as missing."""
    groups: Groups = {}
    missing = []
    for cell in cells:
        results = runner.load_results(setup, cell)
        if results is None:
            missing.append(cell.name)
            continue
        for result in _results_by_rate(setup, cell, results):
            groups.setdefault((cell.row, result.rate), []).append(result)
    claims = setup.study.at(setup.scale).claims
    results = {
        "study": setup.study.name,
        "scale": setup.scale,
        "about": _about(setup, cells, groups),
        "missing": missing,
        "rows": [_row(setup, key, groups) for key in groups],
        "claims": [tested for claim in claims for tested in _test_claim(setup, claim, groups)],
    }
    eval_data = setup.splits["eval"]
    data_hash = record.data_hash(eval_data) if setup.scale == "small" and os.path.isdir(eval_data) else None
    return record.collect(STUDY_RECORD, results, seed=cells[0].seed, data=data_hash, command=command)


def record_path(folder: Path, study: str, scale: str) -> Path:
    """The file of a study's record."""
    return folder / f"{study}-{scale}.json"


def _results_by_rate(setup: StudySetup, cell: Cell, results: dict[str, Any]) -> list[CellResult]:
    if setup.measure == "kendall":
        return _results_by_blocks(setup, cell)
    keys = runner.result_keys(setup, cell) if setup.measure == "pictures" else list(cell.rates.values())
    return [
        CellResult(cell, label, results["rates"][key], runner.load_outcomes(setup, cell, key))
        for label, key in zip(cell.rates, keys, strict=True)
    ]


def _results_by_blocks(setup: StudySetup, cell: Cell) -> list[CellResult]:
    """Rank correlations of ranges of blocks, which take the place of rates."""
    (key,) = runner.result_keys(setup, cell)
    tau = runner.load_outcomes(setup, cell, key)
    results = []
    for label, blocks in cell.rates.items():
        first, last = (int(part) for part in blocks.split("-"))
        part = tau[:, first - 1 : last]
        results.append(CellResult(cell, label, {"kendall": part.mean().item(), "images": len(tau)}, part))
    return results


def _about(setup: StudySetup, cells: Sequence[Cell], groups: Groups) -> dict[str, Any]:
    """What the numbers were measured on, for table captions."""
    trained = [cell for cell in cells if cell.trained]
    first = next((cell for cell in trained if not search.is_missing(setup, cell)), cells[0])
    config, train_data = setup.config(first), setup.training_images(dataclasses.replace(first, fraction=1.0))
    counted = os.path.isdir(train_data) and setup.study.task == "classification"
    models = sorted({str(setup.model_of(cell)["name"]) for cell in cells})
    results = [result for group in groups.values() for result in group]
    return {
        "models": [record.plain_command(["", name])[1] for name in models],
        "training_images": len(image_splits.image_names(train_data)) if counted else None,
        "images": results[0].metrics.get("images") if results else None,
        "updates": config.updates or None,
        "epochs": None if config.updates else config.epochs,
        "batch": config.batch_size,
        "seeds": sorted({cell.seed for cell in trained}),
        "dtype": config.dtype,
    }


def _row(setup: StudySetup, key: tuple[str, str], groups: Groups) -> dict[str, Any]:
    results = groups[key]
    cell, first = results[0].cell, results[0].metrics
    metrics = [name for name, value in first.items() if isinstance(value, int | float) and name != "images"]
    reference = (f"{cell.model}, {setup.study.reference}" if cell.model else setup.study.reference, key[1])
    compared = reference in groups and reference != key
    return {
        "row": key[0],
        "rate": key[1],
        "r": cell.rates[key[1]],
        "trained": cell.trained,
        "settings": {**cell.settings, "fraction": cell.fraction} if cell.trained else {},
        "training": _training(setup, cell) if cell.trained else None,
        "seeds": [result.cell.seed for result in results],
        "metrics": {name: sum(result.metrics[name] for result in results) / len(results) for name in metrics},
        "by_seed": {
            name: [result.metrics[name] for result in results] for name in metrics if name not in ("macs", "paper")
        },
        "against_reference": _compare(setup, groups[reference], results) if compared else None,
    }


def _training(setup: StudySetup, cell: Cell) -> dict[str, Any]:
    """How long, from what and at which learning rate the row was trained."""
    config = setup.config(cell)
    return {
        "updates": config.updates or None,
        "epochs": None if config.updates else config.epochs,
        "batch": config.batch_size,
        "loss": config.loss,
        "lr": config.host_lr if config.mode == "finetune" else config.lr,
    }


def _test_claim(setup: StudySetup, claim: Claim, groups: Groups) -> list[dict[str, Any]]:
    """A claim of the paper against the measurements, at every rate that both rows have."""
    own, other = claim.rows
    tested = []
    for row, rate in groups:
        if row != own or (other, rate) not in groups or (claim.at and rate not in claim.at):
            continue
        differences = _compare(setup, groups[other, rate], groups[own, rate])
        tested.append(
            {
                "text": claim.text,
                "rows": [own, other],
                "alike": bool(claim.alike),
                "rate": rate,
                "difference": differences,
                "verdict": per_image_outcomes.verdict(differences, setup.study.metric, bool(claim.alike)),
            }
        )
    return tested


def _compare(setup: StudySetup, reference: Sequence[CellResult], own: Sequence[CellResult]) -> dict[str, Any]:
    """Paired comparison by seed; a side with a single run is compared with every seed of the other."""
    if len(reference) == 1 or len(own) == 1:
        seeds = max(len(reference), len(own))
        sides = [list(side) * (seeds if len(side) == 1 else 1) for side in (reference, own)]
    else:
        shared = {result.cell.seed for result in reference} & {result.cell.seed for result in own}
        sides = [[result for result in side if result.cell.seed in shared] for side in (reference, own)]
    outcomes = ([result.outcomes for result in side] for side in sides)
    return per_image_outcomes.compare(runner.outcome_kind(setup), setup.study.metric, *outcomes)
