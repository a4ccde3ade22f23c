"""What a segmenter said about each image, in pixels by class, and how two of them are compared.

The mean IoU of a data set comes from the pixels of all its images together, class by class. So what is kept of an image
are three counts for each class, and any set of images has its mean IoU from their sums.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import save as to_bytes
from torch import Tensor

from dtem.files import write_file
from dtem.tasks.classification.outcomes import FORMAT, Difference, read_tensors, repeated
from dtem.tasks.segmentation.classes import IGNORE
from dtem.types import DtemError

_KEY = "dtem-areas"
_TENSORS = {"hit": torch.int64, "said": torch.int64, "truth": torch.int64}
DRAWS = 2000
"""Of a bootstrap."""


@dataclass(frozen=True, eq=False)
class Areas:
    """Pixels of each image by class, in the order in which the images came."""

    names: list[str]
    hit: Int[Tensor, "n k"]
    """Of the class, and said to be."""
    said: Int[Tensor, "n k"]
    """Said to be of the class (where the mask has one at all)."""
    truth: Int[Tensor, "n k"]
    """Of the class by the mask."""

    def __post_init__(self) -> None:
        if not self.names:
            raise DtemError("there are no outcomes: not one image was evaluated")
        if len({tuple(part.shape) for part in (self.hit, self.said, self.truth)}) > 1:
            raise DtemError("hit, said and truth must be of one shape, images × classes")
        if len(self.names) != len(self.hit):
            raise DtemError(f"{len(self.names)} names for {len(self.hit)} images")
        if twice := repeated(self.names):
            raise DtemError(f"the image {twice!r} is there twice; outcomes are paired by name, so each needs its own")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def iou(self) -> Float[Tensor, " k"]:
        """Intersection over union of each class, in percent; NaN for one that is nowhere."""
        return 100 * _iou(self.hit.sum(0), self.said.sum(0), self.truth.sum(0))

    @property
    def miou(self) -> float:
        """The mean over the classes that are somewhere, in percent."""
        return self.iou.nanmean().item()

    @property
    def accuracy(self) -> float:
        """Pixels that are right, in percent."""
        return 100 * self.hit.sum().item() / max(1, int(self.truth.sum()))

    @property
    def class_accuracy(self) -> float:
        """The mean over classes of the pixels that are right, in percent."""
        truth = self.truth.sum(0)
        return 100 * (self.hit.sum(0)[truth > 0] / truth[truth > 0]).mean().item()

    def first(self, images: int) -> "Areas":
        """Of the first so many images."""
        return Areas(self.names[:images], self.hit[:images], self.said[:images], self.truth[:images])

    def save(self, path: str | Path, about: str = "") -> None:
        """Write a safetensors file; `about` says what this is an evaluation of."""
        header = json.dumps({"format": FORMAT, "names": self.names})
        tensors = {name: getattr(self, name).to(torch.int64).contiguous() for name in _TENSORS}
        write_file(path, to_bytes(tensors, {_KEY: header, "about": about}))

    @classmethod
    def load(cls, path: str | Path) -> "Areas":
        """Read what `save` wrote; a file that is damaged or something else is refused by name."""
        try:
            names, tensors = read_tensors(Path(path), _KEY, _TENSORS)
            return cls(names, **tensors)
        except DtemError as error:
            raise DtemError(f"{path}: {error}") from error


def count(
    predicted: Int[Tensor, "h w"], truth: Int[Tensor, "h w"], classes: int
) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"], Int[Tensor, " k"]]:
    """hit, said and truth of one image, by the confusion matrix of torchmetrics."""
    try:
        from torchmetrics.functional.classification import multiclass_confusion_matrix
    except ImportError as error:
        raise DtemError('segmentation needs the package torchmetrics: pip install "dtem[segmentation]"') from error
    found = multiclass_confusion_matrix(
        predicted.flatten(), truth.flatten(), classes, ignore_index=IGNORE, validate_args=False
    ).cpu()
    return found.diagonal(), found.sum(0), found.sum(1)


def join(parts: Sequence[Areas]) -> Areas:
    """Outcomes on disjoint images as one."""
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS}
    return Areas([name for part in parts for name in part.names], **tensors)


def paired(
    first: Areas | Sequence[Areas], second: Areas | Sequence[Areas], draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Mean IoU of the second minus that of the first, in points, with its 95 % interval by a bootstrap over images.

    Every draw takes the same images for both. Of several runs (seeds), each side is the mean of theirs: the interval
    then says what other images would have done, not what other seeds would.
    """
    sides = [[side] if isinstance(side, Areas) else list(side) for side in (first, second)]
    names = sides[0][0].names
    if any(part.names != names for side in sides for part in side):
        raise DtemError("these are not outcomes on the same images; evaluate all of them on the same data")
    drawn = torch.randint(len(names), (draws, len(names)), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(draws, len(names), dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    each = _mean_of(sides[1], weights) - _mean_of(sides[0], weights)
    value = sum(part.miou for part in sides[1]) / len(sides[1]) - sum(part.miou for part in sides[0]) / len(sides[0])
    low, high = torch.quantile(each, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Difference(value, low, high)


def _mean_of(side: Sequence[Areas], weights: Float[Tensor, "w n"]) -> Float[Tensor, " w"]:
    """Mean IoU of a side under each weighting of the images."""
    found = []
    for part in side:
        hit, said, truth = (weights @ each.double() for each in (part.hit, part.said, part.truth))
        found.append(100 * _iou(hit, said, truth).nanmean(dim=-1))
    return torch.stack(found).mean(dim=0)


def _iou(hit: Tensor, said: Tensor, truth: Tensor) -> Tensor:
    return hit.double() / (said + truth - hit).double()  # 0 / 0 is NaN: nowhere
