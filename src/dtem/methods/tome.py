"""ToMe: merge by the similarity of attention keys (Bolya et al. 2023, https://arxiv.org/abs/2210.09461)."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dtem.methods.base import Method, merge_matched
from dtem.types import Taps, Tokens


class Tome(Method):
    """Bipartite matching on the head-mean of the keys. Nothing is trained."""

    name: ClassVar[str] = "tome"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})
    merges_only: ClassVar[bool] = True

    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        """Features by whose cosine tokens are compared."""
        return taps.k.mean(dim=1)

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        return tokens if r == 0 else merge_matched(tokens, self.metric(layer, taps), r, self.host.prefix)
