"""ToMe with Gumbel-softmax: the paper's alternative to soft grouping (https://arxiv.org/abs/2412.10569).

Each A token's choice of its most similar B token, an argmax over B, is relaxed row by row to a sample of the
Gumbel-softmax (Jang et al. 2017, Maddison et al. 2017; see `gumbel_group`). Embedding, soft merging and inference are
DTEM's. Unlike in soft grouping, the choice of the rows that merge is not relaxed, so no gradient can tell a row not to
merge.

The paper names the combination only. Decided here: the r rows are those that inference merges (largest cosine, without
noise); temperature and scale are DTEM's; noise is drawn in train mode only, like dropout.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dtem.methods.base import Config
from dtem.methods.dtem import Dtem, DtemConfig
from dtem.ops.grouping import keep_candidates
from dtem.ops.matching import check_r


@dataclasses.dataclass(frozen=True)
class TomeGumbelConfig(DtemConfig):
    """Settings of `TomeGumbel`: those of DTEM."""


class TomeGumbel(Dtem):
    """Merging by decoupled embeddings that are trained through the Gumbel-softmax."""

    name: ClassVar[str] = "tome_gumbel"
    config_class: ClassVar[type[Config]] = TomeGumbelConfig

    def edges(self, similarity: Float[Tensor, "b i j"], r: int) -> Float[Tensor, "b i j"]:
        c = self.config
        return gumbel_group(similarity, r, c.temperature, c.scale, c.candidates, noise=self.training)


def gumbel_group(
    similarity: Float[Tensor, "b i j"],
    r: int,
    temperature: float = 0.1,
    scale: float = 0.1,
    candidates: int | None = None,
    noise: bool = True,
) -> Float[Tensor, "b i j"]:
    """Soft adjacency E_ij = softmax_j((S_ij + g_ij) / τ) in r rows, 0 in all others; S = `similarity` / `scale`.

    g is standard Gumbel noise: each row is a relaxed sample of a partner j with probability ∝ exp S_ij. Without `noise`
    g is 0. The r rows are those with the largest similarity, ties to the lower index, as in hard matching; that choice
    has no gradient.
    """
    check_r(r, sum(similarity.shape[1:]))
    if r == 0:
        return 0.0 * similarity
    if candidates is not None:
        similarity = keep_candidates(similarity, candidates)
    logits = (similarity if similarity.dtype == torch.float64 else similarity.float()) / scale
    rows = F.gumbel_softmax(logits, tau=temperature, dim=2) if noise else torch.softmax(logits / temperature, dim=2)
    order = torch.sort(similarity.detach().amax(dim=2), dim=1, descending=True, stable=True).indices
    merged = torch.zeros_like(rows[:, :, 0]).scatter(1, order[:, :r], 1.0)
    return rows * merged.unsqueeze(2)
