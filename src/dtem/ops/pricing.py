"""What a merge would do to the output, for every edge at once: training without any relaxation of the forward pass.

Merging token i into j moves both to their mean x̄ = (m_i x_i + m_j x_j) / (m_i + m_j). To first order that changes a
number s, read off the model's output, with gradient g = ∂s/∂x, by

    δ_ij = g_i · (x̄ − x_i) + g_j · (x̄ − x_j) = (m_j g_i − m_i g_j) · (x_j − x_i) / (m_i + m_j)

If s is a random reading whose covariance is the Fisher information of the output, then E δ²_ij / 2 is, to second order,
the divergence of the merged from the unmerged output. So one backward pass prices all |A| × |B| edges of a block, and

    loss = Σ_ij E_ij δ²_ij / 2

teaches an embedding, by its soft edges E, to choose the cheap ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dtem.ops.matching import sides


class Offer(NamedTuple):
    """The edges of one block that may be merged, and where to read what that would do."""

    edges: Float[Tensor, "b i j"]
    """Soft adjacency: what learns."""
    x: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"]
    nudge: Float[Tensor, "b n c"]
    """Zeros that were added to x, so that the output has a gradient in them."""
    prefix: int


def effect(
    x: Float[Tensor, "b n c"], size: Float[Tensor, "b n"], gradient: Float[Tensor, "b n c"], prefix: int = 0
) -> Float[Tensor, "b i j"]:
    """δ_ij: by how much the merge of i into j changes what `gradient` is the gradient of, to first order."""
    a, b = (slice(first, None, 2) for first in sides(prefix))
    m_a, m_b = size[:, a].unsqueeze(2), size[:, b].unsqueeze(1)
    g_a, g_b, x_a, x_b = gradient[:, a], gradient[:, b], x[:, a], x[:, b]
    along_a = g_a @ x_b.mT - (g_a * x_a).sum(dim=2, keepdim=True)  # g_i · (x_j − x_i)
    along_b = (g_b * x_b).sum(dim=2).unsqueeze(1) - x_a @ g_b.mT  # g_j · (x_j − x_i)
    return (m_b * along_a - m_a * along_b) / (m_a + m_b)


def expected_cost(readings: Float[Tensor, " k"], offers: Sequence[Offer]) -> Float[Tensor, ""]:
    """Σ_ij E_ij δ²_ij / 2 over all blocks, mean over images and `readings` (each summed over the images)."""
    nudges = [offer.nudge for offer in offers]
    total = torch.zeros((), device=readings.device)
    for index, reading in enumerate(readings):
        again = index + 1 < len(readings)
        for offer, gradient in zip(offers, torch.autograd.grad(reading, nudges, retain_graph=again), strict=True):
            with torch.autocast(readings.device.type, enabled=False):
                change = effect(offer.x.float(), offer.size.float(), gradient.float(), offer.prefix)
                total = total + (offer.edges * change.square()).sum() / (2 * len(change) * len(readings))
    return total
