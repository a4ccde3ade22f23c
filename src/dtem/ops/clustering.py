"""Clustering of tokens, all images of a batch at once: weighted k-medoids and density peaks."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.ops.matching import full_precision, positions
from dtem.ops.merging import flat


def cluster(x: Float[Tensor, "b n c"], weight: Float[Tensor, "b n"], count: int, iterations: int) -> Int[Tensor, "b n"]:
    """Weighted k-medoids: the cluster (0 … count − 1) of each token. No cluster is empty.

    Minimises Σ_i w_i min_k ‖x_i − x_{m_k}‖² over the `count` medoids m_k, starting from the tokens of largest weight.
    One iteration assigns every token to its nearest medoid (a medoid to itself), then makes the member with the
    smallest Σ w_i ‖x_i − x_m‖² the medoid of its cluster. Ties go to the lower index. No gradient.
    """
    distance = squared_distances(x.detach())
    weighted = distance * weight.detach().to(distance.dtype).unsqueeze(2)  # (b, i, m): cost of token i with medoid m
    start = torch.sort(weight.detach(), dim=1, descending=True, stable=True).indices[:, :count]
    medoid = start.sort(dim=1).values
    number = torch.arange(count, device=x.device).expand(x.shape[0], -1)
    for _ in range(iterations):
        member = _nearest(distance, medoid, number)
        together = member.unsqueeze(2) == member.unsqueeze(1)
        cost = torch.where(together, weighted, 0.0).sum(dim=1)  # (b, m)
        belongs = member.unsqueeze(1) == number.unsqueeze(2)  # (b, k, m)
        medoid = torch.where(belongs, cost.unsqueeze(1), torch.inf).argmin(dim=2)
    return _nearest(distance, medoid, number)


def _nearest(
    distance: Float[Tensor, "b n m"], medoid: Int[Tensor, "b k"], number: Int[Tensor, "b k"]
) -> Int[Tensor, "b n"]:
    """The nearest medoid of each token. A medoid belongs to itself, even if another one has the same features."""
    tokens = distance.shape[1]
    to_medoids = distance.gather(2, medoid.unsqueeze(1).expand(-1, tokens, -1))
    return to_medoids.argmin(dim=2).scatter(1, medoid, number)


def squared_distances(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n n"]:
    """Squared distances of all pairs of tokens, of centred features for precision. In float32 (float64 stays)."""
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
    """Weighted mean of the tokens of each cluster. Weights are positive."""
    batch, _, width = x.shape
    rows = flat(member, count)
    total = weight.new_zeros(batch * count).index_add(0, rows, weight.reshape(-1))
    share = weight.reshape(-1) / total.index_select(0, rows)
    out = x.new_zeros(batch * count, width)
    return out.index_add(0, rows, x.reshape(-1, width) * share.to(x.dtype).unsqueeze(1)).view(batch, count, width)


def pool_sizes(size: Float[Tensor, "b n"], member: Int[Tensor, "b n"], count: int) -> Float[Tensor, "b k"]:
    """Sum of the token sizes of each cluster."""
    return size.new_zeros(size.shape[0], count).scatter_add(1, member, size)


def density_peaks(x: Float[Tensor, "b n c"], clusters: int, neighbours: int = 5) -> Int[Tensor, "b n"]:
    """Density peaks (Rodriguez and Laio 2014; k nearest neighbours: Du et al. 2016): the cluster of each token.

        ρ_i = exp(−mean of d_ij² over the k nearest j, i itself included)      density
        δ_i = the smallest d_ij to a denser j; for the densest token, the largest distance of all

    The `clusters` tokens with the largest ρ·δ are centres, in order of position; every other token joins the nearest
    one. d² is the mean of squared differences over channels. Ties go to the lower index. In float32 (float64 stays).
    """
    batch, tokens, width = x.shape
    if not 1 <= clusters <= tokens:
        raise DtemError(f"{tokens} tokens cannot form {clusters} clusters; ask for 1 to {tokens}")
    if neighbours < 1:
        raise DtemError(f"neighbours = {neighbours} must be at least 1")
    with torch.no_grad(), full_precision(x.device):
        square = squared_distances(x) / width
        sparse = square.topk(min(neighbours, tokens), dim=2, largest=False).values.mean(dim=2)  # −log ρ
        rank = torch.sort(sparse, dim=1, stable=True).indices
        place = torch.empty_like(rank).scatter(1, rank, positions(batch, tokens, x.device))  # densest first
        denser = place.unsqueeze(1) < place.unsqueeze(2)  # [i, j]: j is denser than i
        gap = square.masked_fill(~denser, torch.inf).amin(dim=2)
        gap = torch.where(place == 0, square.amax(dim=(1, 2)).unsqueeze(1), gap)
        score = 0.5 * gap.log() - sparse  # log(ρ δ), which does not underflow
        centres = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :clusters].sort(dim=1).values
        to_centre = square.gather(1, centres.unsqueeze(2).expand(-1, -1, tokens))
        return to_centre.argmin(dim=1).scatter(1, centres, positions(batch, clusters, x.device))
