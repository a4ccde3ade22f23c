"""Top-1 and top-5 accuracy of variants on the same labelled images, compared image by image."""

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from torch import nn

from dtem import integrations
from dtem.data import sources
from dtem.data.labels import num_classes
from dtem.data.loader import Loader
from dtem.data.preprocessing import transform_of
from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation import knn as nearest
from dtem.evaluation.evaluation_report import (
    THROUGHPUT_NOTE,
    EvaluationReport,
    differences,
    left_out_notes,
    shared_fields,
)
from dtem.evaluation.variants import REFERENCE, Setup, Variant, variants_of, with_measured_cost
from dtem.measure.statistics import Difference
from dtem.progress import progress_bar
from dtem.tables import Column, Report, Table, giga, table
from dtem.tasks.classification import evaluator
from dtem.tasks.classification.outcomes import Outcomes, Paired, paired
from dtem.tasks.running import Forward, eval_mode, images_per_second, sample

BATCH_SIZE = 64
BUDGET_IMAGES = 128
"""Images on which a budget is solved for a method whose cost differs from image to image."""


def mean_gflops(row: "ClassificationRow") -> str:
    """GFLOPs (MACs); where every image has its own, their mean with quartiles."""
    return giga(row.macs) + ("" if row.macs_quartiles is None else " ({}–{})".format(*map(giga, row.macs_quartiles)))


def _top1_points(pair: Paired) -> str:
    return pair.top1.text()


@dataclass(frozen=True)
class ClassificationRow:
    """One variant: its accuracy and its cost."""

    method: Annotated[str, Column("method")]
    r: Annotated[str, Column("r")]
    top1: Annotated[float, Column("top-1 %", "{:.2f}")]
    """Top-1 accuracy in percent."""
    top5: Annotated[float, Column("top-5 %", "{:.2f}")]
    cross_entropy: Annotated[float, Column("cross-entropy", "{:.4f}")]
    macs: Annotated[int, Column("GFLOPs (MACs)", mean_gflops, of_row=True)]
    paper: Annotated[int, Column("GFLOPs (paper)", giga)]
    """Operations as the paper counts them."""
    macs_quartiles: tuple[int, int] | None
    """Where every image has its own cost."""
    images_per_second: Annotated[float, Column("im/s", "{:.0f}")]
    tokens: Annotated[float, Column("tokens left")]
    """Tokens after the last block."""
    against_unmerged: Annotated[Paired | None, Column("points against unmerged (95 %)", _top1_points)]


@dataclass(frozen=True, repr=False)
class ClassificationReport(EvaluationReport):
    """Accuracy of every variant, and their paired comparisons."""

    rows: list[ClassificationRow]
    outcomes: dict[str, Outcomes] = field(metadata={"json": False})
    against_tome: dict[tuple[str, str], Paired]
    """Every other method against ToMe at the same r, by method and r."""
    image: tuple[int, ...]
    """Channels, height and width of the input."""
    batch_size: int
    left_out: int
    """Images that some adapter was trained on."""
    listed: dict[str, int]
    """Number of files that each adapter lists as its training images."""
    unreadable: dict[str, str]
    """Reason by image that could not be decoded."""

    task: ClassVar[str] = "classification"
    plotted: ClassVar[tuple[str, str]] = ("top1", "top-1 accuracy (%)")

    def to_dict(self) -> dict[str, Any]:
        document = super().to_dict()
        del document["listed"]
        return {
            **document,
            "image": list(self.image),
            "left_out": {"images": self.left_out, "listed": self.listed},
            f"against_{REFERENCE}": [
                {"method": method, "r": r, **asdict(pair)} for (method, r), pair in self.against_tome.items()
            ],
        }

    def against_unmerged(self, row: ClassificationRow) -> Difference | None:
        return None if row.against_unmerged is None else row.against_unmerged.top1

    def parts(self) -> list[Table | str]:
        left_out = left_out_notes(self.left_out, list(self.listed), len(self.unreadable))
        caption = "\n".join([f"{self.images} images", *left_out, THROUGHPUT_NOTE])
        parts: list[Table | str] = [table(self.title, self.rows, caption)]
        if self.against_tome:
            pairs = {f"{method}, r={r}": pair for (method, r), pair in self.against_tome.items()}
            parts.append(_paired_table(f"Against {REFERENCE} at the same r", pairs))
        return parts


class Evaluation(NamedTuple):
    """A report, and the variants and models that it is about."""

    report: ClassificationReport
    variants: list[Variant]
    models: list[nn.Module]


def evaluate_classifiers(
    setup: Setup, knn: str | Source | None = None, num_neighbours: int = nearest.NUM_NEIGHBOURS
) -> Evaluation:
    """Run the unmerged model and every patched one on every image."""
    model, settings = setup.model, setup.settings
    batch_size = settings.batch_size or BATCH_SIZE
    source = sources.open_source(setup.source) if isinstance(setup.source, str) else setup.source
    if not source.labelled:
        raise DtemError(
            f"{source.spec} has no labels, so there is no accuracy to measure: sort the images into one folder per "
            "class, in the order of the model's classes"
        )
    if knn is None and num_classes(model) == 0:
        raise DtemError(
            f"{setup.name} has no classifier, so there is no accuracy to measure: give knn, labelled images "
            "among which its features find their neighbours"
        )
    source, left_out = setup.select(source)
    transform = transform_of(model)

    def loader(images: Source, num_classes: int | None = None) -> Loader:
        return Loader(images, transform, batch_size, workers=settings.workers, num_classes=num_classes)

    batches = None
    if any(entry.handle.method.variable_length for entry in setup.patched):
        few = itertools.islice(loader(sample(source, BUDGET_IMAGES)).epoch(0), -(-BUDGET_IMAGES // batch_size))
        batches = [batch.images.to(settings.device) for batch in few]
    with eval_mode(*setup.models):
        variants = variants_of(model, setup.patched, batches=batches)
        forwards: dict[str, Forward] = {variant.name: variant.forward for variant in variants}
        if knn is not None:
            bank = loader(sources.open_source(knn) if isinstance(knn, str) else knn)
            forwards = nearest.as_classifiers(forwards, bank, num_neighbours, settings.device, settings.progress)
        images = loader(source, num_classes(model) or None)
        total = min((count for count in (settings.limit, source.length) if count is not None), default=None)
        with progress_bar(total, show=settings.progress) as advance:
            outcomes = evaluator.run_variants(
                forwards, images, settings.device, dtype=settings.autocast, progress=advance, limit=settings.limit
            )
    variants = [with_measured_cost(variant) for variant in variants]
    pairs = differences(variants, outcomes, paired)
    report = ClassificationReport(
        **shared_fields(setup, source.spec, outcomes),
        rows=[_row(variant, outcomes[variant.name], pairs[variant.name]["against_unmerged"]) for variant in variants],
        against_tome={
            (variant.label, variant.r): pair
            for variant in variants
            if (pair := pairs[variant.name]["against_tome"]) is not None
        },
        image=integrations.find(model).describe(model).image,
        batch_size=batch_size,
        left_out=left_out,
        listed={label: len(names) for label, names in setup.trained_on.items() if names},
        unreadable=dict(images.skipped),
    )
    if settings.out is not None:
        for name, each in outcomes.items():
            each.save(settings.out / f"{name}.safetensors")
    return Evaluation(report, variants, setup.models)


def _row(variant: Variant, own: Outcomes, against_unmerged: Paired | None) -> ClassificationRow:
    return ClassificationRow(
        method=variant.label,
        r=variant.r,
        top1=own.top1,
        top5=own.top5,
        cross_entropy=own.mean_loss,
        macs=variant.macs,
        paper=variant.paper,
        macs_quartiles=variant.macs_quartiles,
        images_per_second=images_per_second(variant.forward.turns),
        tokens=variant.tokens,
        against_unmerged=against_unmerged,
    )


@dataclass(frozen=True, repr=False)
class OutcomeComparison(Report):
    """What `compare_outcomes` returns: b against a."""

    a: str
    b: str
    top1_alone: dict[str, float]
    """Top-1 accuracy of each, over its own images."""
    paired: Paired

    def to_dict(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b, "top1_alone": self.top1_alone, **asdict(self.paired)}

    def parts(self) -> list[Table | str]:
        return [_paired_table(f"{self.b} against {self.a}", {self.b: self.paired})]


def compare_outcomes(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> OutcomeComparison:
    """Compare two files of outcomes that `dtem.evaluate(..., out=...)` wrote, image by image.

    Args:
        a: the file to compare with.
        b: the file that is compared: differences are b minus a.

    Examples:
        >>> from dtem.evaluation.classification import compare_outcomes
        >>> print(compare_outcomes("results/tome-r16.safetensors", "results/dtem-r16.safetensors"))
    """
    first, second = Outcomes.load(Path(a)), Outcomes.load(Path(b))
    top1 = {"a": first.top1, "b": second.top1}
    return OutcomeComparison(Path(a).stem, Path(b).stem, top1, paired(first, second))


def _paired_table(title: str, pairs: Mapping[str, Paired]) -> Table:
    columns = ("", "top-1 points (95 %)", "right alone", "wrong alone", "McNemar p", "cross-entropy (95 %)")
    counts = sorted({pair.n for pair in pairs.values()})
    rows = [
        (name, pair.top1.text(), str(pair.only_b), str(pair.only_a), f"{pair.p:.2g}", pair.loss.text(4))
        for name, pair in pairs.items()
    ]
    return Table(f"{title}, {' or '.join(map(str, counts))} images", columns, rows)
