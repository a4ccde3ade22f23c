"""ToMe with soft merging on the keys: DTEM without its embedding (https://arxiv.org/abs/2412.10569, end-to-end study).

At inference this is ToMe. In training the choice of edges is relaxed as in DTEM, but tokens are compared by the mean
over heads of the keys, not detached: the gradient reaches the key projections of the host.
"""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dtem.methods.soft import SoftMethod
from dtem.types import Taps


class TomeSoft(SoftMethod):
    """Bipartite matching on the head-mean keys, with a soft mode. It has no parameters of its own."""

    name: ClassVar[str] = "tome_soft"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})

    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        return taps.k.mean(dim=1)
