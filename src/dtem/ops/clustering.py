"""Clustering of tokens around medoids, all images at once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.ops.matching import full_precision
from dtem.ops.merging import flat


def cluster(x: Float[Tensor, "b n c"], weight: Float[Tensor, "b n"], count: int, iterations: int) -> Int[Tensor, "b n"]:
    """Weighted k-medoids: for each token the cluster (0 … count − 1) that it belongs to. No cluster is empty.

    Looks for the `count` tokens m_1, m_2, … (medoids) that make Σ_i w_i min_k ‖x_i − x_{m_k}‖² small, starting from
    those of largest weight, in order. One iteration: every token joins its nearest medoid (a medoid itself), then the
    medoid of each cluster becomes the member with the smallest Σ w_i ‖x_i − x_m‖² over the cluster. Ties go to the
    lower index. No gradient.
    """
    distance = squared_distances(x.detach())
    pull = distance * weight.detach().to(distance.dtype).unsqueeze(2)  # (b, i, m): what i costs if m is its medoid
    start = torch.sort(weight.detach(), dim=1, descending=True, stable=True).indices[:, :count]
    medoid = start.sort(dim=1).values
    number = torch.arange(count, device=x.device).expand(x.shape[0], -1)
    for _ in range(iterations):
        member = _nearest(distance, medoid, number)
        together = member.unsqueeze(2) == member.unsqueeze(1)
        cost = torch.where(together, pull, 0.0).sum(dim=1)  # (b, m)
        mine = member.unsqueeze(1) == number.unsqueeze(2)  # (b, k, m)
        medoid = torch.where(mine, cost.unsqueeze(1), torch.inf).argmin(dim=2)
    return _nearest(distance, medoid, number)


def _nearest(
    distance: Float[Tensor, "b n m"], medoid: Int[Tensor, "b k"], number: Int[Tensor, "b k"]
) -> Int[Tensor, "b n"]:
    """Each token's nearest medoid. A medoid is its own, even if another one has the same features."""
    tokens = distance.shape[1]
    to_medoids = distance.gather(2, medoid.unsqueeze(1).expand(-1, tokens, -1))
    return to_medoids.argmin(dim=2).scatter(1, medoid, number)


def squared_distances(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n n"]:
    """Of every two tokens, in float32 (float64 stays); from their mean, so that what all share costs no precision."""
    with full_precision(x.device):
        if x.dtype != torch.float64:
            x = x.float()
        x = x - x.mean(dim=1, keepdim=True)
        square = x.square().sum(dim=2)
        product = torch.bmm(x, x.mT)
        distance = (square.unsqueeze(2) + square.unsqueeze(1) - 2.0 * product).clamp(min=0.0)
        return distance.masked_fill(torch.eye(x.shape[1], dtype=torch.bool, device=x.device), 0.0)


def pool(
    x: Float[Tensor, "b n c"], weight: Float[Tensor, "b n"], member: Int[Tensor, "b n"], count: int
) -> Float[Tensor, "b k c"]:
    """The mean of each cluster's tokens, by weight. Weights are positive."""
    batch, _, width = x.shape
    rows = flat(member, count)
    total = weight.new_zeros(batch * count).index_add(0, rows, weight.reshape(-1))
    share = weight.reshape(-1) / total.index_select(0, rows)
    out = x.new_zeros(batch * count, width)
    return out.index_add(0, rows, x.reshape(-1, width) * share.to(x.dtype).unsqueeze(1)).view(batch, count, width)


def pool_sizes(size: Float[Tensor, "b n"], member: Int[Tensor, "b n"], count: int) -> Float[Tensor, "b k"]:
    """The sizes of each cluster's tokens, added up."""
    return size.new_zeros(size.shape[0], count).scatter_add(1, member, size)
