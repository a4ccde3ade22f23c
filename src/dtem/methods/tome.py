"""ToMe: merge by the similarity of attention keys (Bolya et al. 2023, https://arxiv.org/abs/2210.09461)."""

from typing import ClassVar

from dtem.methods.base import Method, merge_matched
from dtem.types import Taps, Tokens


class Tome(Method):
    """Bipartite matching on the mean over heads of the keys. Nothing is trained."""

    name: ClassVar[str] = "tome"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        return merge_matched(tokens, taps.k.mean(dim=1), r, self.host.prefix)
