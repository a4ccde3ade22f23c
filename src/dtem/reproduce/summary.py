"""All cells of a study that are done, as one record: a row per method and rate, over seeds; no image's own data.

Such records are small enough to be committed. Tables, plots and pages are drawn from them, and from nothing else.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtem.measure import record
from dtem.reproduce import answers, images, running
from dtem.reproduce.bench import Bench
from dtem.reproduce.cells import Cell
from dtem.reproduce.specs import Claim

KIND = "reproduce"


class Run(NamedTuple):
    """One cell at one rate."""

    cell: Cell
    rate: str
    """Label."""
    metrics: dict[str, Any]
    outcome: Any


def collect(bench: Bench, cells: Sequence[Cell], command: Sequence[str]) -> record.Record:
    """The record of a study as far as it is done."""
    groups: dict[tuple[str, str], list[Run]] = {}
    missing = []
    for cell in cells:
        results = running.done(bench, cell)
        if results is None:
            missing.append(cell.name)
            continue
        for run in _runs(bench, cell, results):
            groups.setdefault((cell.row, run.rate), []).append(run)
    results = {
        "study": bench.study.name,
        "scale": bench.scale,
        "about": about(bench, cells, groups),
        "missing": missing,
        "rows": [_row(bench, key, groups) for key in groups],
        "claims": [found for claim in bench.study.at(bench.scale).claims for found in _claims(bench, claim, groups)],
    }
    evaluated = bench.splits["eval"]
    hashed = record.data_hash(evaluated) if bench.scale == "small" and os.path.isdir(evaluated) else None
    return record.collect(KIND, results, seed=cells[0].seed, data=hashed, command=command)


def path_of(folder: Path, study: str, scale: str) -> Path:
    """The file of a study's record."""
    return folder / f"{study}-{scale}.json"


def _runs(bench: Bench, cell: Cell, results: dict[str, Any]) -> list[Run]:
    if bench.study.measure == "kendall":
        return _spans(bench, cell, results)
    keys = running.wanted(bench, cell) if bench.study.measure == "pictures" else list(cell.rates.values())
    return [
        Run(cell, label, results["rates"][key], running.answer(bench, cell, key))
        for label, key in zip(cell.rates, keys, strict=True)
    ]


def _spans(bench: Bench, cell: Cell, results: dict[str, Any]) -> list[Run]:
    """Rank correlations of groups of blocks; those take the place of rates."""
    (key,) = running.wanted(bench, cell)
    tau = running.answer(bench, cell, key)
    found = []
    for label, span in cell.rates.items():
        first, last = (int(part) for part in span.split("-"))
        part = tau[:, first - 1 : last]
        found.append(Run(cell, label, {"kendall": part.mean().item(), "images": len(tau)}, part))
    return found


def about(bench: Bench, cells: Sequence[Cell], groups: dict[tuple[str, str], list[Run]]) -> dict[str, Any]:
    """What the numbers were measured on, for the caption of every table."""
    trained = [cell for cell in cells if cell.trained]
    first = (trained or list(cells))[0]
    config, whole = bench.config(first), bench.learned_from(dataclasses.replace(first, fraction=1.0))
    counted = os.path.isdir(whole) and bench.study.task == "classification"
    named = sorted({str(bench.described(cell)["name"]) for cell in cells})
    runs = [run for found in groups.values() for run in found]
    return {
        "models": [record.plain_command(["", name])[1] for name in named],
        "training_images": len(images.listed(whole)) if counted else None,
        "images": runs[0].metrics.get("images") if runs else None,
        "updates": config.updates or None,
        "epochs": None if config.updates else config.epochs,
        "batch": config.batch,
        "seeds": sorted({cell.seed for cell in trained}),
        "dtype": config.dtype,
    }


def _row(bench: Bench, key: tuple[str, str], groups: dict[tuple[str, str], list[Run]]) -> dict[str, Any]:
    runs = groups[key]
    metrics = [name for name, value in runs[0].metrics.items() if isinstance(value, int | float) and name != "images"]
    cell = runs[0].cell
    reference = (f"{cell.model}, {bench.study.reference}" if cell.model else bench.study.reference, key[1])
    compared = reference in groups and reference != key
    return {
        "row": key[0],
        "rate": key[1],
        "r": cell.rates[key[1]],
        "trained": cell.trained,
        "settings": {**cell.settings, "fraction": cell.fraction} if cell.trained else {},
        "seeds": [run.cell.seed for run in runs],
        "metrics": {name: sum(run.metrics[name] for run in runs) / len(runs) for name in metrics},
        "by_seed": {name: [run.metrics[name] for run in runs] for name in metrics if name not in ("macs", "paper")},
        "against_reference": _between(bench, groups[reference], runs) if compared else None,
    }


def _claims(bench: Bench, claim: Claim, groups: dict[tuple[str, str], list[Run]]) -> list[dict[str, Any]]:
    """A claim of the paper against what was measured, at every rate that both rows have."""
    own, other = claim.rows
    found = []
    for row, rate in groups:
        if row != own or (other, rate) not in groups or (claim.at and rate not in claim.at):
            continue
        between = _between(bench, groups[other, rate], groups[own, rate])
        found.append(
            {
                "text": claim.text,
                "rows": [own, other],
                "alike": bool(claim.alike),
                "rate": rate,
                "difference": between,
                "verdict": answers.verdict(between, bench.study.metric, bool(claim.alike)),
            }
        )
    return found


def _between(bench: Bench, reference: Sequence[Run], own: Sequence[Run]) -> dict[str, Any]:
    """Runs of the same seed are compared; what has one run only stands against every seed."""
    if len(reference) == 1 or len(own) == 1:
        seeds = max(len(reference), len(own))
        sides = [list(side) * (seeds if len(side) == 1 else 1) for side in (reference, own)]
    else:
        shared = {run.cell.seed for run in reference} & {run.cell.seed for run in own}
        sides = [[run for run in side if run.cell.seed in shared] for side in (reference, own)]
    return answers.compare(running.kind(bench), bench.study.metric, *([run.outcome for run in side] for side in sides))
