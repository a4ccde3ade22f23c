"""BAT: keep attentive and diverse patches, by matching attentive ones and clustering inattentive ones.

Long et al., "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient Vision Transformers",
CVPR 2023, https://arxiv.org/abs/2211.11315. In a block that reduces, with a_i the class token's attention to token i,
averaged over heads:

    attentive:     the patches with the largest a_i; the most similar pairs are matched, each pair becomes one token
    inattentive:   all others, clustered by density peaks (`ops.density_peaks`); each cluster becomes one token

A new token is the a_i-weighted mean of its members, x taken after the attention residual.

The method is published without code. Published: the two parts, the blocks (the 4th, 7th and 10th), and keep rates with
their GMACs, which are EViT's (`keep_rate`). Chosen here: the shares of the two parts (⌊match · r⌋ tokens are removed by
matching, the others by clustering patches of lowest attention, on average `cluster` to one), the matching (bipartite,
by cosine of x: `ops.match`), the weights (a_i in both parts) and the density (`ops.density_peaks`). The paper describes
no proportional attention.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError
from dtem.methods import evit
from dtem.methods.base import Config, Method, full_size, is_count
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class BatConfig(Config):
    """Settings of BAT."""

    proportional: bool | str | None = False
    """Proportional attention; BAT has none. True, False or None, as for the other methods."""
    match: float = 0.25
    """Share of r removed by matching attentive patches; the rest is removed by clustering inattentive ones."""
    cluster: float = 4.0
    """Inattentive patches per cluster, on average; 2 or more."""
    neighbours: int = 5
    """Number of nearest neighbours in the density."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.match) or not 0 <= self.match <= 1:
            raise DtemError(f"match = {self.match!r} must be a number from 0 to 1")
        if not _is_number(self.cluster) or not self.cluster >= 2:
            raise DtemError(f"cluster = {self.cluster!r} must be a number, 2 or more")
        if not is_count(self.neighbours):
            raise DtemError(f"neighbours = {self.neighbours!r} must be a whole number, 1 or more")

    def split(self, r: int) -> tuple[int, int, int]:
        """How r tokens are removed: number of merged attentive patches, of inattentive patches, and of their clusters.

        For any r up to half of the patches there are enough of both kinds: with at least two patches in a cluster,
        clustering needs at most 2 (r − merged) patches, which leaves 2 · merged for matching.
        """
        merged = int(self.match * r)
        rest = r - merged
        clusters = min(rest, max(1, int(rest / (self.cluster - 1))))
        return merged, rest + clusters, clusters


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Bat(Method):
    """Clustering and matching by class attention. Nothing is trained."""

    name: ClassVar[str] = "bat"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    config_class: ClassVar[type[Config]] = BatConfig
    config: BatConfig

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        attention = self.class_attention(tokens, taps)  # (b, n)
        step = self._groups(tokens.x, attention, r)
        left = tokens.x.shape[1] - r
        weight = attention.clamp(min=torch.finfo(attention.dtype).tiny)
        x = ops.pool(tokens.x, weight, step, left)
        size = ops.pool_sizes(full_size(tokens), step, left)
        source = None if tokens.source is None else ops.compose(tokens.source, step)
        return tokens.replace(x=x, size=size, source=source)

    @torch.no_grad()
    def _groups(self, x: Float[Tensor, "b n c"], attention: Float[Tensor, "b n"], r: int) -> Int[Tensor, "b n"]:
        """For each token the index of its new token, in the order prefix, attentive tokens, clusters."""
        prefix = self.host.prefix
        merged, inattentive, clusters = self.config.split(r)
        kept, gone = ops.prune(attention, inattentive, prefix)
        matching = ops.match(ops.take(x, kept), merged, prefix)
        step = torch.empty_like(torch.cat([kept, gone], dim=1)).scatter(1, kept, matching.source)
        if not inattentive:
            return step
        labels = ops.density_peaks(ops.take(x, gone), clusters, self.config.neighbours)
        return step.scatter(1, gone, labels + (kept.shape[1] - merged))


def keep_rate(rate: float, patches: int, depth: int = 12, at: Collection[int] = (3, 6, 9)) -> tuple[int, ...]:
    """The published schedule as one r per block: in the blocks `at` (counted from 0), the n remaining patches become
    ⌈rate · n⌉ + 1 tokens, as many as EViT keeps and fuses.

    Examples:
        >>> dtem.patch(model, "bat", r=keep_rate(0.7, patches=196))
    """
    return evit.keep_rate(rate, patches, depth, at)
