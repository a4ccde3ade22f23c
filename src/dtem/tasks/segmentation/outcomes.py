"""Per-image pixel counts of a segmenter, and the paired comparison of two by mean IoU.

The mean IoU of a dataset comes from the pixels of all its images together, class by class. So three counts are stored
for each image and class, and any set of images has its mean IoU from their sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.errors import DtemError, require
from dtem.measure.statistics import Difference
from dtem.tasks.outcome_files import StoredOutcomes
from dtem.tasks.segmentation.classes import IGNORE

DRAWS = 2000
"""Draws of the bootstrap."""


@dataclass(frozen=True, eq=False)
class SegmentationOutcomes(StoredOutcomes):
    """Pixels of each image by class, in the order of the images."""

    names: list[str]
    intersection: Int[Tensor, "n k"]
    """Pixels of the class that are predicted as such."""
    predicted: Int[Tensor, "n k"]
    """Pixels predicted as the class, where the mask is not ignored."""
    target: Int[Tensor, "n k"]
    """Pixels of the class in the mask."""

    header: ClassVar[str] = "dtem-areas"
    dtypes: ClassVar[dict[str, torch.dtype]] = dict.fromkeys(("intersection", "predicted", "target"), torch.int64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({tuple(tensor.shape) for tensor in self.tensors}) > 1:
            raise DtemError(f"{', '.join(self.dtypes)} must be of one shape, images × classes")
        if len(self) != len(self.target):
            raise DtemError(f"{len(self)} names for {len(self.target)} images")

    @property
    def iou(self) -> Float[Tensor, " k"]:
        """Intersection over union of each class in percent; NaN for a class without pixels."""
        return 100 * _iou(*(tensor.sum(0) for tensor in self.tensors))

    @property
    def miou(self) -> float:
        """Mean IoU over the classes that have pixels, in percent."""
        return self.iou.nanmean().item()

    @property
    def accuracy(self) -> float:
        """Pixel accuracy in percent."""
        return 100 * self.intersection.sum().item() / max(1, int(self.target.sum()))

    @property
    def class_accuracy(self) -> float:
        """Mean pixel accuracy over classes, in percent."""
        target = self.target.sum(0)
        return 100 * (self.intersection.sum(0)[target > 0] / target[target > 0]).mean().item()


def count_pixels(
    predicted: Int[Tensor, "h w"], target: Int[Tensor, "h w"], num_classes: int
) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"], Int[Tensor, " k"]]:
    """Intersection, predicted and target pixels of one image, from torchmetrics' confusion matrix."""
    torchmetrics = require("torchmetrics.functional.classification", "segmentation")
    confusion = torchmetrics.multiclass_confusion_matrix(
        predicted.flatten(), target.flatten(), num_classes, ignore_index=IGNORE, validate_args=False
    ).cpu()
    return confusion.diagonal(), confusion.sum(0), confusion.sum(1)


def paired(
    first: SegmentationOutcomes | Sequence[SegmentationOutcomes],
    second: SegmentationOutcomes | Sequence[SegmentationOutcomes],
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """Mean IoU of the second minus that of the first in points, with its 95 % interval by a bootstrap over images.

    Every draw takes the same images for both. Where a side has several runs (seeds), it is the mean of theirs: the
    interval then covers the choice of images, not of seeds.
    """
    sides = [[side] if isinstance(side, SegmentationOutcomes) else list(side) for side in (first, second)]
    names = sides[0][0].names
    if any(part.names != names for side in sides for part in side):
        raise DtemError("these are not outcomes on the same images; evaluate all of them on the same data")
    drawn = torch.randint(len(names), (draws, len(names)), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(draws, len(names), dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    differences = _weighted_miou(sides[1], weights) - _weighted_miou(sides[0], weights)
    value = sum(part.miou for part in sides[1]) / len(sides[1]) - sum(part.miou for part in sides[0]) / len(sides[0])
    low, high = torch.quantile(differences, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Difference(value, low, high)


def _weighted_miou(side: Sequence[SegmentationOutcomes], weights: Float[Tensor, "w n"]) -> Float[Tensor, " w"]:
    """Mean IoU of a side under each weighting of the images."""
    counts = [[weights @ tensor.double() for tensor in part.tensors] for part in side]
    return torch.stack([100 * _iou(*each).nanmean(dim=-1) for each in counts]).mean(dim=0)


def _iou(intersection: Tensor, predicted: Tensor, target: Tensor) -> Tensor:
    return intersection.double() / (predicted + target - intersection).double()  # 0 / 0 is NaN: no pixels
