"""Pruning: which tokens stay, by a score, and what becomes of the rest."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.ops.matching import full_precision, positions
from dtem.ops.merging import take
from dtem.types import DtemError


def prune(score: Float[Tensor, "b n"], count: int, prefix: int = 0) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b r"]]:
    """The tokens that stay (prefix, then patches in order) and the `count` patches of lowest score, highest first.

    Ties: the lower index stays.
    """
    batch, tokens = score.shape
    patches = tokens - prefix
    if not 0 <= count <= patches:
        raise DtemError(f"{count} tokens cannot be pruned from {patches} patches")
    order = torch.sort(score[:, prefix:].detach(), dim=1, descending=True, stable=True).indices + prefix
    stay = order[:, : patches - count].sort(dim=1).values
    return torch.cat([positions(batch, prefix, score.device), stay], dim=1), order[:, patches - count :]


def fuse(x: Float[Tensor, "b n c"], weight: Float[Tensor, "b n"], index: Int[Tensor, "b r"]) -> Float[Tensor, "b 1 c"]:
    """Σ weight_i x_i over the tokens in `index`, as one token. Weights are taken as they are: a sum, not a mean."""
    with full_precision(x.device):
        return weight.gather(1, index).unsqueeze(1).to(x.dtype) @ take(x, index)


def pruned_source(kept: Int[Tensor, "b k"], gone: Int[Tensor, "b r"], into: int) -> Int[Tensor, "b n"]:
    """For each input token the output token that holds it: its place among `kept`; `into` for those that went."""
    batch, left = kept.shape
    source = kept.new_full((batch, left + gone.shape[1]), into)
    return source.scatter(1, kept, positions(batch, left, kept.device))
