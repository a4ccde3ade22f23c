"""Merging: hard (inference), soft (training; eq. 6-7 of https://arxiv.org/abs/2412.10569), and its inverse.

A merge replaces the receiving token j by the size-weighted mean (m_j x_j + Σ_i m_i x_i) / m̂_j. It is computed as a
correction, x_j + Σ_i m_i (x_i − x_j) / m̂_j: the hard merge writes only rows that change, and the soft merge keeps the
features of a token whose size has become 0.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.ops import kernel
from dtem.ops.matching import Matching, check_r, full_precision, match, positions, sides
from dtem.types import SIZE_FLOOR


def flat(index: Int[Tensor, "b k"], tokens: int) -> Int[Tensor, " rows"]:
    """Token positions of each image as row positions in the flattened batch."""
    batch = index.shape[0]
    if torch.compiler.is_exporting() or batch > 1:  # an exported graph serves every batch
        first = positions(1, batch, index.device).view(batch, 1)
        index = torch.add(index, first, alpha=tokens)
    return index.reshape(-1)


def take(x: Float[Tensor, "b n c"], index: Int[Tensor, "b k"]) -> Float[Tensor, "b k c"]:
    """Tokens at positions `index` of each image. (`index_select` is several times faster than `gather` on CPU.)"""
    batch, tokens, width = x.shape
    return x.reshape(-1, width).index_select(0, flat(index, tokens)).view(batch, index.shape[1], width)


def merge(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "b n"] | None, matching: Matching
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m"]]:
    """Size-weighted mean of matched tokens; the merged A tokens are removed. Sizes are positive."""
    batch, tokens, width = x.shape
    left = matching.kept.shape[1]
    if tokens != left + matching.merged.shape[1]:
        raise DtemError(f"this matching is for {left + matching.merged.shape[1]} tokens, x has {tokens}")
    if torch.compiler.is_exporting():
        return merge_by_product(x, size, matching)
    if kernel.serves(x) and (size is None or kernel.serves(size)):
        return kernel.merge(x, size, matching.kept, matching.merged, matching.into)
    kept, merged, into = flat(matching.kept, tokens), flat(matching.merged, tokens), flat(matching.into, left)

    if size is None:
        new_size = torch.ones(batch * left, dtype=torch.float32, device=x.device)
        moved = torch.ones(merged.shape, dtype=torch.float32, device=x.device)
    else:
        rows = size.reshape(-1)
        new_size, moved = rows.index_select(0, kept), rows.index_select(0, merged)
    new_size = new_size.index_add_(0, into, moved)
    share = moved / new_size.index_select(0, into)  # m_i / m̂_j

    rows = x.reshape(-1, width)
    out = rows.index_select(0, kept)
    change = rows.index_select(0, merged).sub_(out.index_select(0, into)).mul_(share.to(x.dtype).unsqueeze(1))
    return out.index_add_(0, into, change).view(batch, left, width), new_size.view(batch, left)


def match_and_merge(
    x: Float[Tensor, "b n c"],
    size: Float[Tensor, "b n"] | None,
    metric: Float[Tensor, "b n d"],
    r: int,
    prefix: int = 0,
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m"]]:
    """`merge(x, size, match(metric, r, prefix))`, where nobody needs the matching."""
    tokens = x.shape[1]
    check_r(r, tokens - prefix)
    served = tokens > prefix + 1 and kernel.serves(x) and (size is None or kernel.serves(size))
    if served and metric.shape[:2] == x.shape[:2] and kernel.serves(metric):
        return kernel.match_and_merge(x, size, metric, r, prefix)
    return merge(x, size, match(metric, r, prefix))


def merge_by_product(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "b n"] | None, matching: Matching
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m"]]:
    """`merge` by a matrix product with zeros and ones instead of `index_add_`, which few runtimes support.

    Used in exported graphs.
    """
    left = matching.kept.shape[1]
    here = torch.arange(left, device=x.device).unsqueeze(1)
    joins = (here == matching.into.unsqueeze(1)).float()  # (b, m, r): 1 where merged token r joins output token m
    out = take(x, matching.kept)
    if size is None:
        new_size = joins.sum(dim=2) + 1.0
        share = new_size.gather(1, matching.into).reciprocal()
    else:
        moved = size.gather(1, matching.merged)
        new_size = size.gather(1, matching.kept) + (joins * moved.unsqueeze(1)).sum(dim=2)
        share = moved / new_size.gather(1, matching.into)
    change = (take(x, matching.merged) - take(out, matching.into)) * share.to(x.dtype).unsqueeze(2)
    return out + joins.to(x.dtype) @ change, new_size


def unmerge(x: Float[Tensor, "b m c"], matching: Matching | Int[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
    """Copy each token to all tokens that were merged into it: undoes one merge, given its matching, or several, given a
    source map in which no patch was dropped."""
    if isinstance(matching, Matching):
        return take(x, matching.source)
    if not matching.is_meta and not torch.compiler.is_compiling() and bool((matching < 0).any()):
        raise DtemError(
            f"{int((matching < 0).sum())} of {matching.numel()} patches were dropped (−1 in the source map): no token "
            "holds them, so they cannot be restored. Use a method that merges instead"
        )
    return take(x, matching)


def floor(x: Float[Tensor, "*shape"], minimum: float) -> Float[Tensor, "*shape"]:
    """`x.clamp(min=minimum)` with the gradient of x everywhere (straight-through)."""
    return x + (x.clamp(min=minimum) - x).detach()


class SoftMerge(NamedTuple):
    """Result of a soft merge: no token is removed, but the last `excluded` ones take no part in later merges."""

    x: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"]
    excluded: int
    order: Int[Tensor, "b k"]
    """Positions in the sequence [A, B] of the patches in output order: kept ones, then the r newly excluded."""


def flow(
    x_a: Float[Tensor, "b i c"],
    size_a: Float[Tensor, "b i"],
    x_b: Float[Tensor, "b j c"],
    size_b: Float[Tensor, "b j"],
    edges: Float[Tensor, "b i j"],
) -> tuple[Float[Tensor, "b j c"], Float[Tensor, "b i"], Float[Tensor, "b j"]]:
    """Merge A tokens into B tokens along soft edges E (eq. 6-7 of the paper):

        x̂_j = (m_j x_j + Σ_i E_ij m_i x_i) / m̂_j      m̂_j = m_j + Σ_i E_ij m_i          for j in B
        x̂_i = x_i                                       m̂_i = m_i (1 − Σ_j E_ij)           for i in A

    Returns x̂_j, m̂_i and m̂_j. A row that gives away all of itself may sum to a little more than 1 by rounding; its size
    is 0 then, with the gradient of the equation.
    """
    moved = edges * size_a.unsqueeze(2)  # E_ij m_i
    received = moved.sum(dim=1)  # (b, j)
    new_size_b = size_b + received
    share = 1.0 / new_size_b.clamp(min=SIZE_FLOOR)
    with full_precision(x_a.device):
        inflow = (moved * share.unsqueeze(1)).transpose(1, 2).to(x_a.dtype) @ x_a
    new_x_b = x_b + inflow - (received * share).unsqueeze(-1).to(x_a.dtype) * x_b
    new_size_a = floor(size_a * (1.0 - edges.sum(dim=2)), 0.0)
    return new_x_b, new_size_a, new_size_b


def soft_merge(
    x: Float[Tensor, "b n c"],
    size: Float[Tensor, "b n"],
    edges: Float[Tensor, "b i j"],
    r: int,
    prefix: int = 0,
    excluded: int = 0,
    exclude: str = "mass",
) -> SoftMerge:
    """Merge along soft edges (`flow`).

    No token is removed, but r more are excluded from later merging: with ``exclude="mass"`` the A tokens of largest
    merged mass Σ_j E_ij (those that hard merging removes), with ``"size"`` the smallest tokens (the paper's rule).
    Output order: prefix, kept A, kept B, newly excluded, excluded before. Tokens that still merge are ordered as at
    inference.
    """
    stop = x.shape[1] - excluded
    check_r(r, stop - prefix)
    a, b = sides(prefix)
    x_a, size_a = x[:, a:stop:2], size[:, a:stop:2]
    new_x_b, new_size_a, new_size_b = flow(x_a, size_a, x[:, b:stop:2], size[:, b:stop:2], edges)

    patches_size = torch.cat([new_size_a, new_size_b], dim=1)
    order = _exclusion_order(edges.detach().sum(dim=2), patches_size, r, exclude)
    patches_x = take(torch.cat([x_a, new_x_b], dim=1), order)
    return SoftMerge(
        torch.cat([x[:, :prefix], patches_x, x[:, stop:]], dim=1),
        torch.cat([size[:, :prefix], patches_size.gather(1, order), size[:, stop:]], dim=1),
        excluded + r,
        order,
    )


def reordering(merged: SoftMerge, prefix: int = 0, excluded: int = 0) -> Int[Tensor, "b n"]:
    """Where each token of the input of a `soft_merge` is in its output. `excluded`: before the merge."""
    batch, tokens, _ = merged.x.shape
    here = positions(batch, tokens, merged.x.device)
    (a, b), stop = sides(prefix), tokens - excluded
    patches = torch.cat([here[:, a:stop:2], here[:, b:stop:2]], dim=1).gather(1, merged.order)
    return here.scatter(1, patches, here[:, prefix:stop])


def normalise_largest(edges: Float[Tensor, "b i j"], r: int) -> Float[Tensor, "b i j"]:
    """Normalise the r rows of largest mass to 1: E_ij ← E_ij / Σ_j E_ij there.

    Those tokens keep a size of 0, so that sparse training can leave them out of the computation. The other rows stay
    as they are: through them the loss still has a gradient in which rows are the r largest.
    """
    mass = edges.sum(dim=2)
    order = torch.sort(mass.detach(), dim=1, descending=True, stable=True).indices
    chosen = torch.zeros_like(mass).scatter(1, order[:, :r], 1.0).bool()
    divisor = mass.clamp(min=torch.finfo(mass.dtype).tiny)
    return edges / torch.where(chosen, divisor, 1.0).unsqueeze(2)


def _exclusion_order(
    mass: Float[Tensor, "b i"], size: Float[Tensor, "b k"], r: int, exclude: str
) -> Int[Tensor, "b k"]:
    """Positions in [A, B]: those that stay, in order, then the r that are excluded."""
    if exclude == "mass":
        key = torch.full_like(size, torch.inf)  # B tokens are never chosen: r <= |A|
        key[:, : mass.shape[1]] = -mass
    elif exclude == "size":
        key = size.detach()
    else:
        raise DtemError(f"exclude = {exclude!r} is not known; choose 'mass' or 'size'")
    ranked = torch.sort(key, dim=1, stable=True).indices
    return torch.cat([ranked[:, r:].sort(dim=1).values, ranked[:, :r]], dim=1)
