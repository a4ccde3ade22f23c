"""Merging for dense prediction: a component runs on fewer tokens, and its output is copied back to all of them.

In training most merges are chosen by hard matching and only the last few are relaxed, so there are two steps each way:

    merge (hard)  ->  merge_along (soft)  ->  component  ->  unmerge_along (soft)  ->  unmerge (hard)

Between the hard and the soft step the order of tokens is that of a hard merge: prefix, kept A, B.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from dtem.ops.matching import Matching, full_precision, sides
from dtem.ops.merging import flow, take


def kept_rows(similarity: Float[Tensor, "b i j"], matching: Matching, prefix: int = 0) -> Float[Tensor, "b k j"]:
    """Rows of `similarity` of the A tokens that a hard matching kept."""
    first, _ = sides(prefix)
    kept = matching.kept[:, prefix : matching.kept.shape[1] - similarity.shape[2]]
    return take(similarity, torch.div(kept - first, 2, rounding_mode="floor"))


def merge_along(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "b n"], edges: Float[Tensor, "b k j"], prefix: int = 0
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b n"]]:
    """Soft merge of tokens in the order prefix, A, B. No token is removed; A tokens keep the rest of their sizes."""
    border = prefix + edges.shape[1]
    x_b, size_a, size_b = flow(x[:, prefix:border], size[:, prefix:border], x[:, border:], size[:, border:], edges)
    return torch.cat([x[:, :border], x_b], dim=1), torch.cat([size[:, :prefix], size_a, size_b], dim=1)


def unmerge_along(y: Float[Tensor, "b n c"], edges: Float[Tensor, "b k j"], prefix: int = 0) -> Float[Tensor, "b n c"]:
    """Soft unmerging: y_i ← (1 − Σ_j E_ij) y_i + Σ_j E_ij y_j for i in A; prefix and B are unchanged."""
    border = prefix + edges.shape[1]
    y_a, y_b = y[:, prefix:border], y[:, border:]
    with full_precision(y.device):
        copied = edges.to(y.dtype) @ y_b
    rest = (1.0 - edges.sum(dim=2)).to(y.dtype).unsqueeze(2)
    return torch.cat([y[:, :prefix], rest * y_a + copied, y_b], dim=1)
