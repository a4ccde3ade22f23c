"""Per-image outcomes of a classifier, and the paired comparison of two.

Two methods that run on the same images agree on most of them. Comparing them image by image makes the interval of the
difference several times narrower than comparing two accuracies.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.measure.statistics import Difference, mcnemar, mean_difference
from dtem.tasks.outcome_files import StoredOutcomes

TOP = 5
"""Classes stored per image, best first."""


@dataclass(frozen=True, eq=False)
class Outcomes(StoredOutcomes):
    """Predictions and losses of one model, in the order of the images."""

    names: list[str]
    """Names of the images, each once; outcomes are paired by them."""
    labels: Int[Tensor, " n"]
    predicted: Int[Tensor, "n 5"]
    """The five highest-scoring classes, best first; -1 where the model has fewer."""
    loss: Float[Tensor, " n"]
    """Cross-entropy."""

    header: ClassVar[str] = "dtem-outcomes"
    dtypes: ClassVar[dict[str, torch.dtype]] = {
        "labels": torch.int64,
        "predicted": torch.int64,
        "loss": torch.float32,
    }

    def __post_init__(self) -> None:
        n = len(self.names)
        for name, shape in (("labels", (n,)), ("predicted", (n, TOP)), ("loss", (n,))):
            if (actual := tuple(getattr(self, name).shape)) != shape:
                raise DtemError(f"outcomes of {n} images need {name} of shape {shape}, not {actual}")
        super().__post_init__()
        if not self.loss.isfinite().all():
            first = self.names[int((~self.loss.isfinite()).nonzero()[0])]
            raise DtemError(f"the cross-entropy of {first!r} is not finite: the model's output is NaN or infinite")

    @property
    def correct(self) -> Tensor:
        """Whether the top class is the label, image by image."""
        return self.predicted[:, 0] == self.labels

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.correct.double().mean().item()

    @property
    def top5(self) -> float:
        """Top-5 accuracy in percent."""
        return 100 * (self.predicted == self.labels[:, None]).any(1).double().mean().item()

    @property
    def mean_loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss.double().mean().item()


@dataclass(frozen=True)
class Paired:
    """How b differs from a, on the images that are in both."""

    n: int
    top1: Difference
    """Top-1 of b minus that of a, in points."""
    only_a: int
    """Images that only a classifies correctly."""
    only_b: int
    p: float
    """Two-sided p of McNemar's exact test."""
    loss: Difference
    """Mean cross-entropy of b minus that of a: below zero, b is better."""


def paired(a: Outcomes, b: Outcomes) -> Paired:
    """Compare image by image, on the images that are in both.

    The intervals assume that the mean difference is normal, as it is for hundreds of images; with few discordant images
    rely on `p`, which is exact.
    """
    where = {name: index for index, name in enumerate(b.names)}
    both = [(index, where[name]) for index, name in enumerate(a.names) if name in where]
    if len(both) < 2:
        raise DtemError(
            f"{len(both)} of the images are in both outcomes ({a.names[0]!r}, … and {b.names[0]!r}, …); a comparison "
            "needs two or more: evaluate both on the same data"
        )
    ours, theirs = torch.tensor(both).T
    unlike = (a.labels[ours] != b.labels[theirs]).nonzero()
    if len(unlike):
        i, j = both[int(unlike[0])]
        raise DtemError(
            f"the image {a.names[i]!r} has label {int(a.labels[i])} in one and {int(b.labels[j])} in the other: "
            "these are not outcomes on the same data"
        )
    right_a, right_b = a.correct[ours], b.correct[theirs]
    only_a, only_b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    return Paired(
        n=len(both),
        top1=mean_difference(100 * (right_b.double() - right_a.double())),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar(only_a, only_b),
        loss=mean_difference(b.loss[theirs].double() - a.loss[ours].double()),
    )
