"""PiToMe: merge tokens of high energy, those with many similar ones, and protect the others.

Tran et al., "Accelerating Transformers with Spectrum-Preserving Token Merging", NeurIPS 2024,
https://arxiv.org/abs/2405.16148. With cos_ij the cosine of the head-mean keys of two patches and n patches, in block l
of L (counted from 0):

    energy    E_i = 1/n Σ_j f(cos_ij)        f(c) = c − margin_l  if c ≥ margin_l,  else  exp(c − margin_l) − 1
    margin_l  = margin · (1 − l/L)

Patches are ordered by decreasing energy. The first 2r may merge, the others are protected; every second of the 2r goes
into set A, and each of A merges into its most similar one of B: a size-weighted mean.

As in the published code, which departs from the paper here, half of the blocks protect nothing: there all patches are
split by their order of energy and the r strongest edges merge, as in ToMe. These are the first half, or, for MAE
weights, the second half. `protect="all"` is the paper. The n × n cosines are a matrix product (n² · e multiply-adds)
that ToMe needs a quarter of; they are counted.

Differences: r is given by the schedule (published: a constant share of the remaining tokens, here ``"7%"``); the margin
is the paper's 0.9 (the code of its classifiers has 0.75); α of the paper is 1, as in its code; attention is
proportional, as in the paper (a switch in its code).
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import elu, normalize

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, check_choice
from dtem.ops.matching import check_r, full_precision, positions
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class PitomeConfig(Config):
    """Settings of PiToMe."""

    margin: float = 0.9
    """Margin of the energy in the first block; it falls linearly with depth. From 0 to 1."""
    protect: str = "auto"
    """Blocks that protect patches of low energy: "late" (the second half), "early" (the first), "all", or "auto": early
    for MAE weights, else late."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not 0 <= self.margin <= 1:
            raise DtemError(f"margin = {self.margin!r} must be a number from 0 to 1")
        check_choice("protect", self.protect, ("auto", "late", "early", "all"))


class Pitome(Method):
    """Merging by energy. Nothing is trained."""

    name: ClassVar[str] = "pitome"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})
    config_class: ClassVar[type[Config]] = PitomeConfig
    config: PitomeConfig

    def protects(self, layer: int) -> bool:
        """Whether a block protects patches of low energy."""
        mode, first = self.config.protect, layer < (self.host.depth + 1) // 2
        if mode == "auto":
            mode = "early" if self.host.masked else "late"
        return mode == "all" or first == (mode == "early")

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        margin = self.config.margin * (1 - layer / self.host.depth)
        matching = match_by_energy(taps.k.mean(dim=1), r, margin, self.protects(layer), self.host.prefix)
        x, size = ops.merge(tokens.x, tokens.size, matching)
        source = None if tokens.source is None else ops.compose(tokens.source, matching.source)
        return tokens.replace(x=x, size=size, source=source)


@torch.no_grad()
def match_by_energy(metric: Float[Tensor, "b n d"], r: int, margin: float, protect: bool, prefix: int) -> ops.Matching:
    """Match patches as above; with `protect`, only the 2r of highest energy. On ties the lower index comes first."""
    batch, tokens, _ = metric.shape
    check_r(r, tokens - prefix)
    with full_precision(metric.device):
        z = metric[:, prefix:]
        z = normalize(z if z.dtype == torch.float64 else z.float(), dim=-1)
        cosine = z @ z.mT
    order = torch.sort(energy(cosine, margin), dim=1, descending=True, stable=True).indices
    merging = order[:, : 2 * r] if protect else order
    a, b = merging[:, ::2], merging[:, 1::2]
    best, partner = ops.take(cosine, a).gather(2, b.unsqueeze(1).expand(-1, a.shape[1], -1)).max(dim=2)
    chosen = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :r]
    merged = a.gather(1, chosen)
    stays = torch.ones_like(order).scatter(1, merged, 0)
    kept = torch.sort(stays, dim=1, descending=True, stable=True).indices[:, : tokens - prefix - r]
    place = (stays.cumsum(dim=1) - 1).gather(1, b.gather(1, partner.gather(1, chosen)))
    first = positions(batch, prefix, metric.device)
    return ops.Matching(kept=torch.cat([first, kept + prefix], dim=1), merged=merged + prefix, into=place + prefix)


def energy(cosine: Float[Tensor, "b p p"], margin: float) -> Float[Tensor, "b p"]:
    """Energy of every patch."""
    return elu(cosine - margin).mean(dim=2)
