"""A tiny study: digits_vit on a few digits."""

from pathlib import Path
from typing import Any

from benchmarks.reproduce.specs import Study, parse
from benchmarks.reproduce.study_setup import StudySetup

SPEC: dict[str, Any] = {
    "title": "Tiny",
    "finding": "Warm is better than cold.",
    "axis": "temperature",
    "baselines": ["unmerged", "tome"],
    "cells": {"dtem": None},
    "rates": [8, 16],
    "settings": {"batch_size": 4, "updates": 2, "workers": 0},
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


def study(**changes: Any) -> Study:
    return parse("tiny", {**SPEC, **changes})


def setup_of(spec: Study, data: Path, work: Path) -> StudySetup:
    return StudySetup(spec, "small", work, str(data), {"name": "digits_vit"}, {}, {"drop_path": 0.0})
