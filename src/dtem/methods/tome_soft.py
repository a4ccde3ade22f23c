"""Soft merging on keys: the ablation of DTEM without an embedding (https://arxiv.org/abs/2412.10569, end-to-end study).

At inference this is exactly ToMe. In training the choice of edges is relaxed as in DTEM, but tokens are compared by the
head-mean keys themselves, not detached: what may be merged is taught to the host, through its key projections.
"""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dtem.methods.soft import SoftMethod
from dtem.types import Taps


class TomeSoft(SoftMethod):
    """Bipartite matching on the mean over heads of the keys, with a soft mode. Nothing is trained but the host."""

    name: ClassVar[str] = "tome_soft"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})

    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        return taps.k.mean(dim=1)
