"""Losses of classification: cross-entropy, self-distillation, and probes for the Fisher loss."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def task_loss(
    logits: Float[Tensor, "b k"], target: Int[Tensor, " b"] | Float[Tensor, "b k"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Cross-entropy with labels, or with class probabilities (MixUp, which smooths them itself).

    An unlabelled image (-1) adds nothing.
    """
    if target.is_floating_point():
        return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    return F.cross_entropy(logits, target, label_smoothing=smoothing, ignore_index=-1)


def feature_loss(features: Float[Tensor, "b c"], teacher: Float[Tensor, "b c"]) -> Float[Tensor, ""]:
    """1 − cosine similarity with the features of the unmerged model."""
    return 1 - F.cosine_similarity(features, teacher, dim=-1).mean()


def fisher_probes(output: Float[Tensor, "b k"], count: int, probabilities: bool = True) -> Float[Tensor, " count"]:
    """Random projections of the output, each summed over the images, for the Fisher loss (`ops.fisher_loss`).

    Half the expected square of the change of a probe is, to second order, KL(before ‖ after) of the `probabilities`; of
    features, 1 − cosine.
    """
    draws = torch.randn(count, *output.shape, device=output.device)
    if not probabilities:
        return (F.normalize(output, dim=-1) * draws).sum(dim=(1, 2))
    p = output.detach().softmax(dim=-1)
    draws = draws * p.sqrt()
    return (output * (draws - p * draws.sum(dim=-1, keepdim=True))).sum(dim=(1, 2))


def distill_loss(
    logits: Float[Tensor, "b k"], teacher: Float[Tensor, "b k"], temperature: float = 1.0
) -> Float[Tensor, ""]:
    """KL(teacher ‖ student) · T², both at temperature T."""
    student = (logits / temperature).log_softmax(dim=-1)
    return F.kl_div(student, (teacher / temperature).log_softmax(dim=-1), log_target=True, reduction="batchmean") * (
        temperature**2
    )
