"""Mean IoU of variants on the same images with masks, with a bootstrap over images."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation.evaluation_report import THROUGHPUT_NOTE, EvaluationReport, differences, shared_fields
from dtem.evaluation.variants import Setup, Variant, variants_of
from dtem.measure.statistics import Difference
from dtem.progress import progress_bar
from dtem.tables import Column, Table, giga, table
from dtem.tasks.running import eval_mode, images_per_second
from dtem.tasks.segmentation import evaluator
from dtem.tasks.segmentation.inference import Inference
from dtem.tasks.segmentation.mask_datasets import Pairs, open_pairs
from dtem.tasks.segmentation.mask_transforms import eval_transform
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes, paired

MAX_CLASSES_SHOWN = 30
"""With more classes, the IoU by class is in `to_dict()` only."""


@dataclass(frozen=True)
class SegmentationRow:
    """One variant: its mean IoU and its cost."""

    method: Annotated[str, Column("method")]
    r: Annotated[str, Column("r")]
    miou: Annotated[float, Column("mIoU %", "{:.2f}")]
    """Mean IoU in percent."""
    pixel_accuracy: Annotated[float, Column("pixels %", "{:.2f}")]
    class_accuracy: float
    iou: list[float | None]
    """By class; None for a class without pixels."""
    macs: Annotated[int, Column("GFLOPs (MACs)", giga)]
    paper: int
    images_per_second: Annotated[float | None, Column("im/s", "{:.1f}")]
    """None where all outcomes were stored by an earlier run."""
    against_unmerged: Annotated[Difference | None, Column("points against unmerged (95 %)", Difference.text)]
    against_tome: Annotated[Difference | None, Column("points against tome (95 %)", Difference.text)]


@dataclass(frozen=True, repr=False)
class SegmentationReport(EvaluationReport):
    """Mean IoU of every variant, with paired differences in points."""

    rows: list[SegmentationRow]
    outcomes: dict[str, SegmentationOutcomes] = field(metadata={"json": False})
    classes: list[str]
    """Names of the classes."""

    task: ClassVar[str] = "segmentation"
    plotted: ClassVar[tuple[str, str]] = ("miou", "mean IoU (%)")

    def parts(self) -> list[Table | str]:
        caption = f"{self.images} images; intervals by a bootstrap over images\n{THROUGHPUT_NOTE}"
        parts: list[Table | str] = [table(self.title, self.rows, caption)]
        if len(self.classes) <= MAX_CLASSES_SHOWN:
            by_class = [
                (name, *("–" if (iou := row.iou[index]) is None else f"{iou:.1f}" for row in self.rows))
                for index, name in enumerate(self.classes)
            ]
            names = [f"{row.method} {row.r}" for row in self.rows]
            parts.append(Table("IoU % by class", ("class", *names), by_class))
        return parts


def evaluate_segmenters(setup: Setup, inference: Inference) -> SegmentationReport:
    """Run the unmerged Segmenter and every patched one on every image; with `out`, resume."""
    source = _open(setup.source, setup.settings.limit)
    num_classes = int(getattr(setup.model, "num_classes", 0))
    if num_classes != len(source.classes):
        raise DtemError(
            f"num_classes = {num_classes} of the model, and {source.spec} has {len(source.classes)} classes: give data "
            "and a model of the same classes"
        )
    with eval_mode(*setup.models):
        variants = variants_of(setup.model, setup.patched, (3, *_input_size(source, inference)))
        outcomes = _run(setup, source, variants, inference)
    pairs = differences(variants, outcomes, paired)
    rows = [_row(variant, outcomes[variant.name], pairs[variant.name]) for variant in variants]
    fields = shared_fields(setup, source.spec, outcomes)
    return SegmentationReport(**fields, rows=rows, classes=list(source.classes.names))


def _open(data: str | Source, limit: int | None) -> Pairs:
    source = open_pairs(data) if isinstance(data, str) else data
    if not isinstance(source, Pairs):
        raise DtemError(f"{source.spec} has no masks; give images with masks, such as camvid:FOLDER#val")
    if limit is None or limit >= len(source.pairs):
        return source
    drawn = torch.randperm(len(source.pairs), generator=torch.Generator().manual_seed(0))[:limit]
    return Pairs(source.spec, [source.pairs[index] for index in drawn.sort().values.tolist()], source.classes)


def _input_size(source: Pairs, inference: Inference) -> tuple[int, int]:
    """The size that GFLOPs are counted for: the window, or the first image as it is resized."""
    from PIL import Image

    if inference.window is not None:
        return inference.window
    with Image.open(source.pairs[0][0]) as image:
        width, height = image.size
    return inference.resized((height, width))


def _run(setup: Setup, source: Pairs, variants: list[Variant], inference: Inference) -> dict[str, SegmentationOutcomes]:
    """Outcomes of all variants, those that `out` has already among them."""
    settings, forwards = setup.settings, {variant.name: variant.forward for variant in variants}
    store = None
    if settings.out is not None:
        about = f"{setup.name} {_digest(setup)}, {inference}, {settings.dtype}"
        store = evaluator.OutcomeStore(settings.out, about, list(forwards))
    images = evaluator.remaining_images(source, frozenset() if store is None else store.done)
    if images is None:
        assert store is not None
        return store.outcomes
    transform = eval_transform(resolve_data_config(setup.model), source.classes)
    # An unreadable image is an error: the mean IoU of fewer images is not comparable.
    loader = Loader(images, transform, 1, workers=settings.workers, on_decode_error="stop")
    with progress_bar(images.length, show=settings.progress) as advance:
        outcomes = evaluator.run_variants(
            forwards,
            loader,
            len(source.classes),
            inference,
            settings.device,
            dtype=settings.autocast,
            progress=advance,
            save=None if store is None else store.save,
        )
    return outcomes if store is None else store.save(outcomes)


def _digest(setup: Setup) -> str:
    """Of all weights and embeddings: what stored outcomes must have in common with a run that resumes them."""
    total = hashlib.sha256()
    for module in (setup.model, *(entry.handle.method for entry in setup.patched)):
        for name, tensor in module.state_dict().items():
            total.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def _row(variant: Variant, own: SegmentationOutcomes, against: Mapping[str, Difference | None]) -> SegmentationRow:
    return SegmentationRow(
        method=variant.label,
        r=variant.r,
        miou=own.miou,
        pixel_accuracy=own.accuracy,
        class_accuracy=own.class_accuracy,
        iou=[None if math.isnan(value) else value for value in own.iou.tolist()],
        macs=variant.macs,
        paper=variant.paper,
        images_per_second=images_per_second(variant.forward.turns) if variant.forward.turns else None,
        **against,
    )
