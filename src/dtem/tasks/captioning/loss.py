"""The language-modelling loss: how likely each word of a caption is, given the image and the words before it."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.tasks.classification import loss as one_answer


def word_losses(
    logits: Float[Tensor, "b n v"], ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]
) -> tuple[Float[Tensor, "b s"], Float[Tensor, "b s"]]:
    """Cross-entropy of every word but the first, and 1 where there is a word (padding has none): s = t − 1.

    Of `logits`, those of the text are the last t; how many image tokens stand before them makes no difference.
    """
    said = logits[:, -ids.shape[1] :][:, :-1].float()
    follows = mask[:, 1:].to(said.dtype)
    return F.cross_entropy(said.transpose(1, 2), ids[:, 1:], reduction="none") * follows, follows


def task_loss(logits: Float[Tensor, "b n v"], ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean cross-entropy over all words of the batch, as GIT's own loss."""
    losses, follows = word_losses(logits, ids, mask)
    return losses.sum() / follows.sum().clamp(min=1)


def distill_loss(
    logits: Float[Tensor, "b n v"],
    taught: Float[Tensor, "b m v"],
    mask: Int[Tensor, "b t"],
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """KL of what the unmerged model says of every next word to what this one says: mean over words."""
    count = mask.shape[1]
    own, given = ((part[:, -count:][:, :-1].float() / temperature).log_softmax(-1) for part in (logits, taught))
    each = F.kl_div(own, given, log_target=True, reduction="none").sum(-1)
    follows = mask[:, 1:].to(each.dtype)
    return temperature**2 * (each * follows).sum() / follows.sum().clamp(min=1)


def readings(
    logits: Float[Tensor, "b n v"], mask: Int[Tensor, "b t"], count: int, images: int
) -> Float[Tensor, " count"]:
    """Random numbers read off what is said of every next word, by which `ops.pricing` prices a merge: its cost is the
    divergence of a word, in the mean over all words of an image."""
    said = logits[:, -mask.shape[1] :][:, :-1].float()
    words = said[mask[:, 1:].bool()]
    return one_answer.readings(words, count) * (images / max(len(words), 1)) ** 0.5
