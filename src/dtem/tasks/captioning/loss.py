"""Losses of captioning: next-token cross-entropy, its distillation, and probes for the Fisher loss."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.tasks.classification import loss as classification_loss


def token_losses(
    logits: Float[Tensor, "b n v"], ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]
) -> tuple[Float[Tensor, "b s"], Float[Tensor, "b s"]]:
    """Cross-entropy of every token but the first, and 1 where there is a token (0 for padding): s = t − 1.

    The logits of the text are the last t, whatever the number of image tokens before them.
    """
    text_logits = logits[:, -ids.shape[1] :][:, :-1].float()
    present = mask[:, 1:].to(text_logits.dtype)
    return F.cross_entropy(text_logits.transpose(1, 2), ids[:, 1:], reduction="none") * present, present


def task_loss(logits: Float[Tensor, "b n v"], ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean cross-entropy over all tokens of the batch, as GIT's own loss."""
    losses, present = token_losses(logits, ids, mask)
    return losses.sum() / present.sum().clamp(min=1)


def distill_loss(
    logits: Float[Tensor, "b n v"],
    teacher: Float[Tensor, "b m v"],
    mask: Int[Tensor, "b t"],
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """KL(teacher ‖ student) · T² of the next token, the mean over tokens."""
    count = mask.shape[1]
    student, target = ((part[:, -count:][:, :-1].float() / temperature).log_softmax(-1) for part in (logits, teacher))
    divergence = F.kl_div(student, target, log_target=True, reduction="none").sum(-1)
    present = mask[:, 1:].to(divergence.dtype)
    return temperature**2 * (divergence * present).sum() / present.sum().clamp(min=1)


def fisher_probes(
    logits: Float[Tensor, "b n v"], mask: Int[Tensor, "b t"], count: int, images: int
) -> Float[Tensor, " count"]:
    """Probes for the Fisher loss: the divergence of the next token, the mean over all tokens of an image."""
    tokens = logits[:, -mask.shape[1] :][:, :-1].float()[mask[:, 1:].bool()]
    return classification_loss.fisher_probes(tokens, count) * (images / max(len(tokens), 1)) ** 0.5
