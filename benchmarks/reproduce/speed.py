"""Operations and time of a study's model, unmerged and merged, with random weights: nothing is trained or evaluated."""

import copy
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.reproduce.cells import Cell
from benchmarks.reproduce.specs import STUDY_RECORD, UNMERGED
from benchmarks.reproduce.study_setup import StudySetup
from dtem.handle import patch
from dtem.measure import flops, record, throughput

BATCHES = (1, 8)
ROUNDS = {1: 20, 8: 6}


def collect(setup: StudySetup, cells: Sequence[Cell], command: Sequence[str]) -> record.Record:
    """The record of a study that counts and times: a row for each method, batch size and r."""
    torch.manual_seed(0)
    model = setup.model_of(cells[0])
    host = setup.create(**model, pretrained=False).eval()
    methods = [cell for cell in cells if cell.row != UNMERGED]
    handles = {}
    for cell in methods:
        options = setup.config(dataclasses.replace(cell, trained=False)).options
        handles[cell.row] = patch(copy.deepcopy(host), cell.method, **options)
    image = next(iter(handles.values())).host.image
    base = flops.count(host, image)
    rows = []
    for batch in BATCHES:
        images = torch.randn(batch, *image)
        for place, rate in enumerate(methods[0].rates):
            print(f"timing batch {batch}, r = {rate}", file=sys.stderr, flush=True)
            for cell in methods:
                handles[cell.row].r = cell.rates[rate]
            merged = {name: handle.model for name, handle in handles.items()}
            timings = throughput.compare({UNMERGED: host, **merged}, images, ROUNDS[batch])
            if place == 0:
                rows.append(_row(UNMERGED, "", "0", batch, base, timings[UNMERGED]))
            for cell in methods:
                count = flops.count(handles[cell.row].model, image)
                rows.append(_row(cell.row, rate, cell.rates[rate], batch, count, timings[cell.row]))
    about = {"models": [model["name"]], "training_images": None, "images": None, "updates": None, "epochs": None}
    about |= {"batch": None, "seeds": [], "dtype": "float32", "random_weights": True}
    results = {
        "study": setup.study.name,
        "scale": setup.scale,
        "about": about,
        "missing": [],
        "rows": rows,
        "claims": [],
    }
    return record.collect(STUDY_RECORD, results, seed=0, command=command)


def _row(name: str, rate: str, r: str, batch: int, count: flops.Count, timing: throughput.Timing) -> dict[str, Any]:
    metrics = {"macs": count.macs, "paper": count.paper, "milliseconds": 1e3 * timing.seconds}
    return {
        "row": f"{name}, batch {batch}",
        "rate": rate,
        "r": r,
        "trained": False,
        "settings": {},
        "seeds": [],
        "metrics": {**metrics, "speedup": timing.speedup.median},
        "by_seed": {},
        "spread": dataclasses.asdict(timing.speedup),
        "against_reference": None,
    }
