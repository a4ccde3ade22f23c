"""The trainings of `benchmarks.frozen`: what a method learns beside a frozen host, without labels.

All have the same photographs in the same order and the same number of updates, by `dtem train --preset adapter`: the
divergence from the unmerged model is the loss, learning rates are the preset's and are not searched. Norms are trained
on top of what the method has learned itself. Training is at the smallest budget, and serves all of them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import dtem
from benchmarks import common
from benchmarks.reproduce import image_splits
from dtem.errors import DtemError
from dtem.evaluation.variants import file_name
from dtem.measure import record


class Training(NamedTuple):
    """What one adapter learns."""

    method: str
    learned: str
    """In words, of all that the adapter holds."""
    learn: str
    """In this training: ``embeddings`` (the method's own parts) or ``norms``."""
    start: str | None = None
    """The training that it goes on from; for norms alone the untrained method."""
    per_budget: bool = False
    """Trained once for each budget, which decides what is learned."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never mutated


UNTRAINED = ("tome", "mctf", "pitome", "ppt", "evit", "etps", "bat", "evo_vit", "token_pooling")
"""Methods without trained parts. ATS is left out: a change of the norms grows with r, which says little of the
number of tokens that it drops in an image."""
OWN_PARTS = {
    "dtem trained alike": Training("dtem", "embeddings", "embeddings"),
    "dynamicvit": Training("dynamicvit", "predictors", "embeddings"),
    "dtps": Training("dtps", "predictors", "embeddings"),
    "diffrate": Training("diffrate", "rates", "embeddings", per_budget=True, settings={"lr": 1e-2}),
}
"""PatchMerger is left out: its queries start from nothing, and a few thousand photographs do not teach them."""
TRAININGS = {f"{name} + norms": Training(name, "norms", "norms") for name in UNTRAINED} | OWN_PARTS
TRAININGS |= {
    f"{name} + norms": own._replace(learned=f"{own.learned} and norms", learn="norms", start=name, settings={})
    for name, own in OWN_PARTS.items()
}


class Trainer(NamedTuple):
    """Trains adapters into a folder, each once: a stopped training resumes."""

    model: str
    weights: Path | None
    images: Path
    """Photographs to learn from."""
    budget: float
    """The smallest, in GFLOPs."""
    updates: int
    work: Path

    def adapter(self, name: str, budget: float) -> Path:
        """The file of one of `TRAININGS`; it is trained first, if need be."""
        training = TRAININGS[name]
        budget = budget if training.per_budget else self.budget
        folder = self.work / file_name(name, f"{budget:.4f}G")
        if not (folder / "record.json").exists():  # what a run writes last
            start = {"adapter": str(self.adapter(training.start, budget))} if training.start else {}
            learned_r = training.per_budget and training.start
            settings = {"method": training.method, "learn": [training.learn], "updates": self.updates, **start}
            settings |= {"r": "learned" if learned_r else f"{budget:.4f}G", "dtype": "bfloat16", **training.settings}
            print(f"training {name}", file=sys.stderr, flush=True)
            dtem.train(self.host(), self.images, preset="adapter", out=folder, **settings)
        return folder / "adapter.safetensors"

    def host(self) -> nn.Module:
        return dtem.create_model(self.model, weights=self.weights).eval()


def make_trainer(
    model: str, weights: Path | None, folders: Sequence[Path], evaluated: Path, budget: float, updates: int, work: Path
) -> Trainer:
    """The trainer on the photographs of `folders` (class folders). None of them may be in `evaluated`."""
    files = [file for folder in folders for file in sorted(folder.glob("*/*")) if file.is_file()]
    if not files:
        raise DtemError(f"--train {folders[0]} holds no images in class folders")
    shared = {file.name for file in files} & {file.name for file in evaluated.rglob("*") if file.is_file()}
    if shared:
        raise DtemError(f"{len(shared)} images are in --train and in --data, such as {min(shared)}: give others")
    work.mkdir(parents=True, exist_ok=True)
    images = image_splits.link_parts({"all": files}, work / "photographs") / "all"
    settings = {"model": model, "photographs": record.data_hash(images), "updates": updates, "budget": round(budget, 4)}
    common.check_settings(work / "adapters", settings)
    return Trainer(model, weights, images, budget, updates, work / "adapters")
