"""Agreement of an exported file with the PyTorch model, image by image."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dtem.errors import DtemError
from dtem.exporters.program import Runner

TOLERANCE = 1e-3
"""An image agrees if no logit differs by more than this times max(1, largest logit)."""
MIN_AGREEING = 0.9
"""Share of images that must agree: where two edges are nearly tied, rounding may choose another token to merge."""


@dataclass(frozen=True)
class Agreement:
    """Differences between the logits of a file and of its model."""

    images: int
    largest: float
    """Largest difference of any logit."""
    typical: float
    """Median over images of the largest difference."""
    agreeing: int
    """Images within `TOLERANCE`."""
    same_class: int
    """Images whose likeliest class is the same."""


@torch.no_grad()
def agreement(model: Runner, file: Runner, batches: Iterable[Tensor]) -> Agreement:
    """Run both on every batch. The file gets it in two parts, 1 + the rest, so that the batch size is checked, too."""
    differences: list[Tensor] = []
    scales: list[Tensor] = []
    same = 0
    for images in batches:
        expected = model(images).float()
        parts = (images[:1], images[1:]) if len(images) > 1 else (images,)
        logits = torch.cat([file(part).float() for part in parts])
        differences.append((logits - expected).abs().flatten(1).amax(dim=1))
        scales.append(expected.abs().flatten(1).amax(dim=1).clamp(min=1.0))
        same += int((logits.argmax(dim=1) == expected.argmax(dim=1)).sum())
    if not differences:
        raise DtemError("there are no images to check the file on")
    difference, scale = torch.cat(differences), torch.cat(scales)
    return Agreement(
        images=len(difference),
        largest=float(difference.max()),
        typical=float(difference.median()),
        agreeing=int((difference <= TOLERANCE * scale).sum()),
        same_class=same,
    )


def require_agreement(agreement: Agreement, format: str) -> None:
    """Refuse a file that computes something else."""
    if not agreement.agreeing >= MIN_AGREEING * agreement.images:  # NaN is refused, too
        raise DtemError(
            f"the {format} file computes something other than the model: only {agreement.agreeing} of "
            f"{agreement.images} images agree, the largest difference is {agreement.largest:.3g}. It was not kept"
        )
