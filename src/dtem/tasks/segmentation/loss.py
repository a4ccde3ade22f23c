"""Losses of segmentation: those of classification, pixel by pixel."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.tasks.classification import loss as plain
from dtem.tasks.segmentation.classes import IGNORE


def task_loss(
    logits: Float[Tensor, "b k h w"], target: Int[Tensor, "b h w"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Cross-entropy over the pixels that have a class (0 where none has: such a crop teaches nothing)."""
    each = F.cross_entropy(logits, target, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    return each / (target != IGNORE).sum().clamp(min=1)


def distill_loss(
    logits: Float[Tensor, "b k h w"], teacher: Float[Tensor, "b k h w"], temperature: float = 1.0
) -> Float[Tensor, ""]:
    """KL(teacher ‖ student) · T², the mean over pixels."""
    return plain.distill_loss(_pixels(logits), _pixels(teacher), temperature)


def readings(logits: Float[Tensor, "b k h w"], count: int) -> Float[Tensor, " count"]:
    """Random numbers read off every pixel, by which `ops.pricing` prices a merge: its cost is the divergence of a
    pixel, in the mean over an image."""
    pixels = _pixels(logits)
    return plain.readings(pixels, count) * (len(logits) / len(pixels)) ** 0.5


def _pixels(logits: Float[Tensor, "b k h w"]) -> Float[Tensor, "p k"]:
    return logits.movedim(1, -1).flatten(0, 2)
