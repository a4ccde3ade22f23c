"""EViT: keep the patches that the class token attends to, fuse the others into one token.

Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations", ICLR 2022,
https://arxiv.org/abs/2202.07800. In a block that reduces, with a_i the class token's attention to token i, averaged
over heads (of that block's attention; the softmax runs over all tokens, the class token included):

    kept:   the patches with the largest a_i      fused:  Σ a_i x_i over all the others, x after the attention residual

As in the published code, the fused token is the sum, not divided by Σ a_i, and later blocks treat it like any other
patch. Differences from the publication: kept patches stay in order (published: sorted by attention; the output is the
same), and attention dropout does not apply to a_i.

Published training lowers the keep rate from 1 along a cosine. The same for r: ``dtem train --mode finetune --method
evit --r-warmup 0.3``.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import ClassVar

import torch

from dtem import ops
from dtem.methods.base import Config, Method, check_flag, full_size
from dtem.schedule import check_stages
from dtem.types import HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class EvitConfig(Config):
    """Settings of EViT."""

    proportional: bool | str | None = False
    """Proportional attention; EViT has none. True, False or None, as for the other methods."""
    fuse: bool = True
    """Fuse the other patches into one token. False: drop them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("fuse", self.fuse)


class Evit(Method):
    """Pruning by class attention. Nothing is trained.

    A block removes r tokens: r + 1 patches become the fused token, or, without fusing, r are dropped.
    """

    name: ClassVar[str] = "evit"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    config_class: ClassVar[type[Config]] = EvitConfig
    config: EvitConfig

    def __init__(self, host: HostSpec, config: EvitConfig) -> None:
        super().__init__(host, config)
        self.conserves_size = config.fuse

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        fused = self.config.fuse
        attention = self.class_attention(tokens, taps)  # (b, n)
        kept, gone = ops.prune(attention, r + fused, self.host.prefix)
        x, size, source = ops.take(tokens.x, kept), full_size(tokens), tokens.source
        new_size = size.gather(1, kept)
        if fused:
            x = torch.cat([x, ops.fuse(tokens.x, attention, gone)], dim=1)
            new_size = torch.cat([new_size, size.gather(1, gone).sum(dim=1, keepdim=True)], dim=1)
        if source is not None:
            into = kept.shape[1] if fused else -1
            source = ops.compose(source, ops.pruned_source(kept, gone, into))
        return tokens.replace(x=x, size=new_size, source=source)


def keep_rate(
    rate: float, patches: int, depth: int = 12, at: Collection[int] = (3, 6, 9), fuse: bool = True
) -> tuple[int, ...]:
    """The published schedule as one r per block: in the blocks `at` (counted from 0; published: the 4th, 7th and 10th),
    keep ⌈rate · n⌉ of the n remaining patches, an earlier fused token included. A schedule removes at most half of the
    patches of a block, so rates below 0.5 are not reached.

    Examples:
        >>> dtem.patch(model, "evit", r=keep_rate(0.7, patches=196))
    """
    check_stages(at, depth, rate)
    plan = []
    for layer in range(depth):
        gone = patches - math.ceil(rate * patches) if layer in at else 0
        plan.append(max(gone - fuse, 0))
        patches -= plan[-1]
    return tuple(plan)
