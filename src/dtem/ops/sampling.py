"""Sampling tokens by their share of a score (inverse-transform sampling at fixed quantiles)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dtem.types import DtemError


def sample(
    score: Float[Tensor, "b p"], samples: int, ascending: bool = True
) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """Tokens hit by the quantiles u = (2s − 1) / 2S, s = 1 … S = `samples`: the first i with Σ_{j ≤ i} score_j ≥ u,
    where scores sum to 1.

    The sum runs over tokens from the lowest score to the highest, or, if not `ascending`, as they stand. A token that
    is hit more than once counts once, so images differ in how many tokens they have: they come first, in order, then
    padding up to the k = min(S, p) that there can be. Returns positions (of the first token hit, in the padding) and
    which of them are no padding. Scores are not negative, and their sum is positive; a score of 0 is never hit.
    """
    if samples < 1:
        raise DtemError(f"{samples} samples cannot be drawn; take at least 1")
    with torch.no_grad():
        batch, tokens = score.shape
        values, order = score.sort(dim=1, stable=True) if ascending else (score, None)
        share = values.cumsum(dim=1)
        share = share / share[:, -1:]  # ends at exactly 1
        steps = torch.arange(samples, device=score.device, dtype=share.dtype)
        quantiles = ((2 * steps + 1) / (2 * samples)).expand(batch, -1).contiguous()
        hit = torch.searchsorted(share.contiguous(), quantiles).clamp(max=tokens - 1)
        if order is not None:
            hit = order.gather(1, hit)
        missed = torch.ones_like(score, dtype=torch.int8).scatter(1, hit, 0)
        index = missed.sort(dim=1, stable=True).indices[:, : min(samples, tokens)]
        real = missed.gather(1, index) == 0
        return torch.where(real, index, index[:, :1]), real
