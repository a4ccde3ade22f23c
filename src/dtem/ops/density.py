"""Clustering by density peaks (Rodriguez and Laio 2014; with nearest neighbours, Du et al. 2016)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.ops.clustering import squared_distances
from dtem.ops.matching import full_precision, positions
from dtem.types import DtemError


def density_peaks(x: Float[Tensor, "b n c"], clusters: int, neighbours: int = 5) -> Int[Tensor, "b n"]:
    """The cluster, 0 … `clusters` − 1, of each token.

        ρ_i = exp(−mean of d_ij² over the k nearest j, i itself included)      density
        δ_i = the smallest d_ij to a denser j; for the densest token, the largest distance of all

    The tokens with the largest ρ·δ are centres, in order of position; every other token joins the nearest centre.
    d² is the mean of squared differences over channels. Ties go to the lower index. Runs in float32 (float64 stays).
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
        score = 0.5 * gap.log() - sparse  # log(ρ δ): no density is too small for a float
        centres = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :clusters].sort(dim=1).values
        to_centre = square.gather(1, centres.unsqueeze(2).expand(-1, -1, tokens))
        return to_centre.argmin(dim=1).scatter(1, centres, positions(batch, clusters, x.device))
