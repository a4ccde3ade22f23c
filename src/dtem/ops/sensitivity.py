"""The metric by which merging costs least, in closed form: how sensitive the output is to what a token holds.

Merging tokens i and j moves both to their mean, by ±(h_j − h_i) / 2. Take s, a random reading of the output, and its
gradient g = ∂s/∂h as in `ops.pricing`, and the gradients of two tokens to be independent, of each other and of what the
tokens hold. Then the expected cost of the merge is a squared distance:

    E δ²_ij / 2 = (h_i − h_j)ᵀ M (h_i − h_j) / 4        M = E[g gᵀ]

With M = Σ λ u uᵀ and z = [√λ uᵀ h], that is |z_i − z_j|² / 4. Matching goes by cosines; but with one more channel, the
same for all tokens, cosines are ordered as distances are: cos([z_i, c], [z_j, c]) → 1 − |z_i − z_j|² / 2c² as c grows.
So an affine embedding can hold the metric.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

FAR = 2.0
"""c, where |z| is 1 in the mean. Larger is nearer to distances, and nearer to what float32 can tell apart."""


class Moments(NamedTuple):
    """Sums over tokens, in float64."""

    tokens: Float[Tensor, ""]
    h: Float[Tensor, " c"]
    hh: Float[Tensor, "c c"]
    gg: Float[Tensor, "c c"]

    def plus(self, other: "Moments") -> "Moments":
        """Of both sets of tokens."""
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def moments(h: Float[Tensor, "b n c"], gradients: Float[Tensor, "k b n c"], prefix: int = 0) -> Moments:
    """Of the patches of some images, with the gradients of k readings."""
    h = h[:, prefix:].flatten(0, 1).double()
    g = gradients[:, :, prefix:].flatten(0, 2).double()
    return Moments(torch.tensor(float(len(h)), dtype=torch.float64, device=h.device), h.sum(dim=0), h.T @ h, g.T @ g)


def distance_embedding(
    found: Moments, dim: int, far: float = FAR
) -> tuple[Float[Tensor, "dim c"], Float[Tensor, " dim"]]:
    """Weight and bias of the embedding [z, c]: the dim − 1 directions that matter most, and the constant."""
    mean = found.h / found.tokens
    spread = found.hh / found.tokens - mean.outer(mean)
    values, vectors = torch.linalg.eigh(found.gg)
    kept = min(dim - 1, len(values))
    largest = slice(len(values) - kept, None)  # they come in ascending order
    rows = (vectors[:, largest] * values[largest].clamp(min=0).sqrt()).T
    rows = rows / (rows @ spread @ rows.T).trace().clamp(min=torch.finfo(rows.dtype).tiny).sqrt()
    weight, bias = rows.new_zeros(dim, rows.shape[1]), rows.new_zeros(dim)
    weight[:kept] = rows
    bias[:kept] = -rows @ mean
    bias[-1] = far
    return weight.float(), bias.float()
