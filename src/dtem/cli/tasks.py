"""What differs by task on the command line. To add a task: write its files, add its lines here."""

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

DEFAULT = "classification"
BUILDERS = {
    DEFAULT: "dtem.cli.common:build",
    "segmentation": "dtem.cli.segmentation:build",
    "captioning": "dtem.cli.captioning:build",
}
"""Task to the function that builds its host model from the options: ``build(args, drop_path_rate=…) -> model``."""
VERBS = {
    "eval": {
        DEFAULT: "dtem.cli.evaluate",
        "segmentation": "dtem.cli.evaluate_segmentation",
        "captioning": "dtem.cli.evaluate_captioning",
    },
    "show": {
        DEFAULT: "dtem.cli.show",
        "segmentation": "dtem.cli.show_segmentation",
    },
}
"""Verbs that have one file per task: its options and what it prints are the task's own."""


def builder(task: str) -> Callable[..., Any]:
    """The function that builds the models of a task."""
    from dtem.types import DtemError

    if task not in BUILDERS:
        raise DtemError(f"--task {task}: there are no models for that; choose one of: {', '.join(BUILDERS)}")
    module, name = BUILDERS[task].split(":")
    build: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return build


def asked(argv: Sequence[str]) -> str:
    """The task that a command line names: it decides which options there are."""
    for word, after in itertools.pairwise([*argv, ""]):
        if word == "--task":
            return after
        if word.startswith("--task="):
            return word.removeprefix("--task=")
    return DEFAULT
