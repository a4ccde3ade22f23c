"""Losses of segmentation: those of classification, pixel by pixel."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.tasks.classification import loss as classification_loss
from dtem.tasks.segmentation.classes import IGNORE


def task_loss(
    logits: Float[Tensor, "b k h w"], target: Int[Tensor, "b h w"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Mean cross-entropy over labelled pixels; 0 where there are none."""
    total = F.cross_entropy(logits, target, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    return total / (target != IGNORE).sum().clamp(min=1)


def distill_loss(
    logits: Float[Tensor, "b k h w"], teacher: Float[Tensor, "b k h w"], temperature: float = 1.0
) -> Float[Tensor, ""]:
    """KL(teacher ‖ student) · T², the mean over pixels."""
    return classification_loss.distill_loss(_pixels(logits), _pixels(teacher), temperature)


def fisher_probes(logits: Float[Tensor, "b k h w"], count: int) -> Float[Tensor, " count"]:
    """Probes for the Fisher loss: the divergence of a pixel, the mean over an image."""
    pixels = _pixels(logits)
    return classification_loss.fisher_probes(pixels, count) * (len(logits) / len(pixels)) ** 0.5


def _pixels(logits: Float[Tensor, "b k h w"]) -> Float[Tensor, "p k"]:
    return logits.movedim(1, -1).flatten(0, 2)
