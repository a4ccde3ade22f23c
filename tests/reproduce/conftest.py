"""A tiny study on the model that comes along, and a few digits."""

from pathlib import Path
from typing import Any

import pytest

from dtem.reproduce.bench import Bench
from dtem.reproduce.specs import Study, parse
from dtem.tasks.classification import digits

SPEC: dict[str, Any] = {
    "title": "Tiny",
    "finding": "Warm is better than cold.",
    "axis": "temperature",
    "baselines": ["unmerged", "tome"],
    "cells": {"dtem": None},
    "rates": [8, 16],
    "settings": {"batch": 4, "updates": 2, "workers": 0},
    "full": {"preset": "deit_small", "sweep": {"temperature": [0.1, 0.3]}},
    "small": {
        "preset": "few",
        "sweep": {"temperature": [0.1, 0.3]},
        "seeds": [0, 1],
        "claims": [
            {"text": "warm is better", "better": "temperature = 0.3", "than": "temperature = 0.1"},
            {"text": "it is much like ToMe", "alike": ["temperature = 0.1", "tome"], "at": ["16"]},
        ],
    },
    "paper": {
        "setting": "DeiT-S",
        "columns": ["row", "rate", "top1", "gflops"],
        "values": [["temperature = 0.1", 16, 79.5, 2.35], ["temperature = 0.7", 16, 70.0, 2.35]],
    },
}


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train, extra and val with a few digits each."""
    place = tmp_path_factory.mktemp("digits")
    train, held_out = digits.load()
    for split, source, count in (("train", train, 12), ("extra", train, 4), ("val", held_out, 12)):
        step = source.length // count - (1 if split == "extra" else 0)
        for index in range(0, step * count, step):
            record = source.read(index)
            folder = place / split / str(record.label)
            folder.mkdir(parents=True, exist_ok=True)
            record.image.save(folder / f"{Path(record.name).name}.png")
    return place


def study(**changes: Any) -> Study:
    return parse("tiny", {**SPEC, **changes})


@pytest.fixture
def bench(photographs: Path, tmp_path: Path) -> Bench:
    return bench_of(study(), photographs, tmp_path / "work")


def bench_of(spec: Study, data: Path, work: Path, **changes: Any) -> Bench:
    return Bench(spec, "small", work, lambda *_: digits.host(), str(data), {"name": "mnist_vit"}, {}, changes)
