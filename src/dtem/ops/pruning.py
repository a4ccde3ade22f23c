"""Pruning: select tokens by a score, and fuse or drop the others. Sampling: select them at quantiles of the score."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.ops.matching import full_precision, positions
from dtem.ops.merging import take


def prune(score: Float[Tensor, "b n"], count: int, prefix: int = 0) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b r"]]:
    """Positions of the kept tokens (prefix, then patches in order) and of the `count` patches of lowest score, highest
    first. On ties the lower index is kept.
    """
    batch, tokens = score.shape
    patches = tokens - prefix
    if not 0 <= count <= patches:
        raise DtemError(f"{count} tokens cannot be pruned from {patches} patches")
    order = torch.sort(score[:, prefix:].detach(), dim=1, descending=True, stable=True).indices + prefix
    stay = order[:, : patches - count].sort(dim=1).values
    return torch.cat([positions(batch, prefix, score.device), stay], dim=1), order[:, patches - count :]


def fuse(x: Float[Tensor, "b n c"], weight: Float[Tensor, "b n"], index: Int[Tensor, "b r"]) -> Float[Tensor, "b 1 c"]:
    """Σ weight_i x_i over the tokens in `index`, as one token: a sum, not a mean."""
    with full_precision(x.device):
        return weight.gather(1, index).unsqueeze(1).to(x.dtype) @ take(x, index)


def pruned_source(kept: Int[Tensor, "b k"], gone: Int[Tensor, "b r"], into: int) -> Int[Tensor, "b n"]:
    """Source map of a pruning step: for each input token its position among `kept`, or `into` if it was removed."""
    batch, left = kept.shape
    source = kept.new_full((batch, left + gone.shape[1]), into)
    return source.scatter(1, kept, positions(batch, left, kept.device))


def sample(
    score: Float[Tensor, "b p"], samples: int, ascending: bool = True
) -> tuple[Int[Tensor, "b k"], Bool[Tensor, "b k"]]:
    """Inverse-transform sampling at the quantiles u = (2s − 1) / 2S, s = 1 … S = `samples`: the first i with
    Σ_{j ≤ i} score_j ≥ u, where scores sum to 1.

    The sum runs over tokens by increasing score, or, if not `ascending`, by position. A token that several quantiles
    select counts once, so the number of tokens differs between images: they come first, in order, then padding up to
    k = min(S, p). Returns positions (in the padding, that of the first token) and a mask that is False for padding.
    Scores are not negative and their sum is positive; a score of 0 is never selected.
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
        selected = torch.searchsorted(share.contiguous(), quantiles).clamp(max=tokens - 1)
        if order is not None:
            selected = order.gather(1, selected)
        unselected = torch.ones_like(score, dtype=torch.int8).scatter(1, selected, 0)
        index = unselected.sort(dim=1, stable=True).indices[:, : min(samples, tokens)]
        real = unselected.gather(1, index) == 0
        return torch.where(real, index, index[:, :1]), real
