"""BAT: keep attentive patches and diverse ones: cluster what the class token looks past, match what it looks at.

Long et al., "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient Vision Transformers",
CVPR 2023, https://arxiv.org/abs/2211.11315. In a block that reduces, with a_i the class token's attention to token i,
averaged over heads:

    attentive:     the patches with the largest a_i; the most similar of them are matched, each pair becomes one token
    inattentive:   all others, clustered by density peaks (`ops.density_peaks`); each cluster becomes one token

A new token is the mean of its members weighted by a_i, x taken after the attention residual.

The method is published without code. Published are: the two parts, the blocks (the 4th, 7th and 10th), and keep rates
with their GMACs, which are EViT's (`keep_rate`). Not found, so settled here: the shares of the two parts (settings; r
tokens fewer are left after a block, ⌊match · r⌋ of them attentive ones that were merged; the rest is given up by the
lowest patches, of which on average `cluster` become one), the matching (bipartite, by cosine of x: `ops.match`), the
weights (a_i in both parts) and what "density" is (`ops.density_peaks`). No proportional attention is described.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem import ops
from dtem.methods import evit
from dtem.methods.base import Config, Method, full_size
from dtem.methods.soft import is_count
from dtem.types import DtemError, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class BatConfig(Config):
    """Settings of BAT."""

    proportional: bool | str | None = False
    """Proportional attention; BAT has none. True, False or None, as for the other methods."""
    match: float = 0.25
    """Share of r that matching attentive patches gives; clustering the inattentive ones gives the rest."""
    cluster: float = 4.0
    """Inattentive patches per cluster, on average; 2 or more."""
    neighbours: int = 5
    """Nearest patches that tell how dense it is around one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.match) or not 0 <= self.match <= 1:
            raise DtemError(f"match = {self.match!r} must be a number from 0 to 1")
        if not _is_number(self.cluster) or not self.cluster >= 2:
            raise DtemError(f"cluster = {self.cluster!r} must be a number, 2 or more")
        if not is_count(self.neighbours):
            raise DtemError(f"neighbours = {self.neighbours!r} must be a whole number, 1 or more")

    def split(self, r: int) -> tuple[int, int, int]:
        """How r tokens are saved: attentive patches that are merged away; inattentive ones; clusters of these.

        Up to half of the patches r may be, and there are enough of both kinds: with at least two to a cluster,
        clustering takes at most 2 (r − merged) patches, which leaves 2 · merged to be matched.
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
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale).mean(dim=1)  # (b, n)
        step = self._groups(tokens.x, attention, r)
        left = tokens.x.shape[1] - r
        weight = attention.clamp(min=torch.finfo(attention.dtype).tiny)
        x = ops.pool(tokens.x, weight, step, left)
        size = ops.pool_sizes(full_size(tokens), step, left)
        source = None if tokens.source is None else ops.compose(tokens.source, step)
        return tokens.replace(x=x, size=size, source=source)

    @torch.no_grad()
    def _groups(self, x: Float[Tensor, "b n c"], attention: Float[Tensor, "b n"], r: int) -> Int[Tensor, "b n"]:
        """For each token the new token that it becomes part of: prefix, attentive ones, clusters."""
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
    """The published schedule as one r per block: in the blocks `at` (counted from 0), ⌈rate · n⌉ + 1 of the n patches
    that are left become the new tokens, as many as EViT keeps and fuses.

    Example:
        >>> dtem.patch(model, "bat", r=keep_rate(0.7, patches=196))
    """
    return evit.keep_rate(rate, patches, depth, at)
