"""Fisher-information loss of a merge: learning what to merge without relaxing the forward pass.

*Loss.* Merging token i into j moves both to their mean x̄ = (m_i x_i + m_j x_j) / (m_i + m_j). To first order this
changes a scalar s of the output, with gradient g = ∂s/∂x, by

    δ_ij = g_i · (x̄ − x_i) + g_j · (x̄ − x_j) = (m_j g_i − m_i g_j) · (x_j − x_i) / (m_i + m_j)

If s is a random probe whose covariance is the Fisher information of the output, E δ²_ij / 2 is, to second order, the
KL divergence between the unmerged and the merged output. One backward pass gives it for all |A| × |B| edges of a block:

    loss = Σ_ij E_ij δ²_ij / 2          (E: the soft edges of the embedding that is trained)

*Initialisation.* For sizes of 1, and gradients of two tokens that are independent of each other and of the features h,
the expected loss of a merge is a squared distance:

    E δ²_ij / 2 = (h_i − h_j)ᵀ M (h_i − h_j) / 4          M = E[g gᵀ]

With M = Σ λ u uᵀ and z = [√λ uᵀ h], this is |z_i − z_j|² / 4. Matching compares tokens by cosine. One more channel c,
equal for all tokens, makes cosines order pairs as distances do: cos([z_i, c], [z_j, c]) → 1 − |z_i − z_j|² / 2c² for
large c. So an affine embedding can represent this metric.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dtem.ops.matching import sides

FAR = 2.0
"""c, in units of the mean |z|. A larger c is closer to distances, but loses more digits of float32."""


class MergeCandidates(NamedTuple):
    """The possible merges of one block, and the tensors that their Fisher loss is computed from."""

    edges: Float[Tensor, "b i j"]
    """Soft adjacency, through which the embedding gets its gradient."""
    x: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"]
    perturbation: Float[Tensor, "b n c"]
    """Zeros added to x: the gradient of the output with respect to them is g."""
    prefix: int


def output_change(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "b n"], gradient: Float[Tensor, "b n c"], prefix: int = 0
) -> Float[Tensor, "b i j"]:
    """δ_ij: the first-order change of the output by merging i into j, where `gradient` is that of the output."""
    a, b = (slice(first, None, 2) for first in sides(prefix))
    m_a, m_b = size[:, a].unsqueeze(2), size[:, b].unsqueeze(1)
    g_a, g_b, x_a, x_b = gradient[:, a], gradient[:, b], x[:, a], x[:, b]
    along_a = g_a @ x_b.mT - (g_a * x_a).sum(dim=2, keepdim=True)  # g_i · (x_j − x_i)
    along_b = (g_b * x_b).sum(dim=2).unsqueeze(1) - x_a @ g_b.mT  # g_j · (x_j − x_i)
    return (m_b * along_a - m_a * along_b) / (m_a + m_b)


def fisher_loss(fisher_probes: Float[Tensor, " k"], merge_candidates: Sequence[MergeCandidates]) -> Float[Tensor, ""]:
    """Σ_ij E_ij δ²_ij / 2 over all blocks, averaged over images and `fisher_probes` (each summed over the images)."""
    perturbations = [candidates.perturbation for candidates in merge_candidates]
    total = torch.zeros((), device=fisher_probes.device)
    for index, probe in enumerate(fisher_probes):
        retain_graph = index + 1 < len(fisher_probes)
        for candidates, gradient in zip(
            merge_candidates, torch.autograd.grad(probe, perturbations, retain_graph=retain_graph), strict=True
        ):
            with torch.autocast(fisher_probes.device.type, enabled=False):
                change = output_change(
                    candidates.x.float(), candidates.size.float(), gradient.float(), candidates.prefix
                )
                total = total + (candidates.edges * change.square()).sum() / (2 * len(change) * len(fisher_probes))
    return total


class Moments(NamedTuple):
    """Sums over tokens of 1, h, h hᵀ and g gᵀ, in float64."""

    tokens: Float[Tensor, ""]
    h: Float[Tensor, " c"]
    hh: Float[Tensor, "c c"]
    gg: Float[Tensor, "c c"]

    def plus(self, other: "Moments") -> "Moments":
        """The moments of both sets of tokens together."""
        return Moments(*(a + b for a, b in zip(self, other, strict=True)))


def moments(h: Float[Tensor, "b n c"], gradients: Float[Tensor, "k b n c"], prefix: int = 0) -> Moments:
    """Moments of the patches of a batch, with the gradients of k Fisher probes."""
    h = h[:, prefix:].flatten(0, 1).double()
    g = gradients[:, :, prefix:].flatten(0, 2).double()
    return Moments(torch.tensor(float(len(h)), dtype=torch.float64, device=h.device), h.sum(dim=0), h.T @ h, g.T @ g)


def distance_embedding(moments: Moments, dim: int) -> tuple[Float[Tensor, "dim c"], Float[Tensor, " dim"]]:
    """Weight and bias of the embedding [z, c]: the dim − 1 directions of largest λ, and the constant."""
    mean = moments.h / moments.tokens
    covariance = moments.hh / moments.tokens - mean.outer(mean)
    values, vectors = torch.linalg.eigh(moments.gg)
    count = min(dim - 1, len(values))
    largest = slice(len(values) - count, None)  # eigenvalues are in ascending order
    rows = (vectors[:, largest] * values[largest].clamp(min=0).sqrt()).T
    rows = rows / (rows @ covariance @ rows.T).trace().clamp(min=torch.finfo(rows.dtype).tiny).sqrt()
    weight, bias = rows.new_zeros(dim, rows.shape[1]), rows.new_zeros(dim)
    weight[:count] = rows
    bias[:count] = -rows @ mean
    bias[-1] = FAR
    return weight.float(), bias.float()
