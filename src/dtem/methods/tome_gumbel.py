"""Gumbel-softmax instead of soft grouping: the paper's alternative relaxation (https://arxiv.org/abs/2412.10569).

ToMe's rule, each A token to its most similar B token, is relaxed row by row: the argmax over B becomes a sample of the
Gumbel-softmax (Jang et al. 2017, Maddison et al. 2017; see `ops.gumbel_group`). The embedding, soft merging and
everything at inference are DTEM's. Compared with soft grouping, which rows merge is not relaxed, so no gradient says
that a row had better not merge at all.

The paper names the combination only. Left open there and decided here: the r rows are those that inference takes (the
largest cosines, without noise); temperature and scale are DTEM's; noise is drawn only while the method is in train
mode, as dropout is.
"""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem.methods.dtem import Dtem


class TomeGumbel(Dtem):
    """Merging by decoupled embeddings that learn through the Gumbel-softmax."""

    name: ClassVar[str] = "tome_gumbel"

    def edges(
        self, similarity: Float[Tensor, "b i j"], r: int, gates: Float[Tensor, " r"] | None
    ) -> Float[Tensor, "b i j"]:
        c = self.config
        return ops.gumbel_group(similarity, r, c.temperature, c.scale, c.candidates, gates, noise=self.training)
