"""A written file against PyTorch, image by image."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dtem.export.program import Runner
from dtem.types import DtemError

TOLERANCE = 1e-3
"""An image agrees where no logit differs by more than this share of the largest one (or this, if that is larger)."""
ENOUGH = 0.9
"""Share of images that must agree: where two edges are nearly tied, rounding may choose another token to merge."""


@dataclass(frozen=True)
class Agreement:
    """How near a file comes to the model that it was made from."""

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
    """Run both on every batch; one that is split as 1 + the rest shows that the batch is free."""
    differences: list[Tensor] = []
    scales: list[Tensor] = []
    same = 0
    for images in batches:
        expected = model(images).float()
        parts = (images[:1], images[1:]) if len(images) > 1 else (images,)
        found = torch.cat([file(part).float() for part in parts])
        differences.append((found - expected).abs().flatten(1).amax(dim=1))
        scales.append(expected.abs().flatten(1).amax(dim=1).clamp(min=1.0))
        same += int((found.argmax(dim=1) == expected.argmax(dim=1)).sum())
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


def demand(found: Agreement, what: str) -> None:
    """Refuse a file that computes something else."""
    if not found.agreeing >= ENOUGH * found.images:  # NaN is refused too
        raise DtemError(
            f"the {what} file computes something else than the model: only {found.agreeing} of {found.images} images "
            f"agree, the largest difference is {found.largest:.3g}. It was not kept"
        )
