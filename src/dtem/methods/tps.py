"""TPS: prune tokens, then squeeze each into the kept token that it is most like.

Wei et al., "Joint Token Pruning and Squeezing Towards More Aggressive Compression of Vision Transformers", CVPR 2023,
https://arxiv.org/abs/2304.10716. What is pruned is decided as in another method; what it held is not lost, but mixed
into its nearest kept token, by similarity (`ops.squeeze` has the equation).

    etps    inside a block: class attention decides, as in EViT, and features are those after the attention residual
    dtps    before a block: predictors decide, as in DynamicViT, trained in the same way

Where this package departs from the published method: r patches go in a block (published: a keep rate, in three blocks;
`evit.keep_rate` with fuse=False and `dynamicvit.keep_rate` give those schedules), kept patches stay in order, and a
token's size adds up the patches that were squeezed into it, though neither their mixture nor attention goes by size.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from dtem import ops
from dtem.methods.base import Config, Method, full_size
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class EtpsConfig(Config):
    """Settings of eTPS."""

    proportional: bool | str | None = False
    """Proportional attention; TPS has none. True, False or None, as for the other methods."""


class Etps(Method):
    """Pruning by class attention, with squeezing. Nothing is trained."""

    name: ClassVar[str] = "etps"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    config_class: ClassVar[type[Config]] = EtpsConfig

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale).mean(dim=1)
        return squeeze_pruned(tokens, *ops.prune(attention, r, self.host.prefix), self.host.prefix)


def squeeze_pruned(tokens: Tokens, kept: Int[Tensor, "b k"], gone: Int[Tensor, "b r"], prefix: int) -> Tokens:
    """Only `kept` tokens are left; those in `gone` joined the patches among them. Prefix tokens take nobody in."""
    stay, guests = ops.take(tokens.x, kept), ops.take(tokens.x, gone)
    cosine, host = ops.find_hosts(guests, stay[:, prefix:])
    x = torch.cat([stay[:, :prefix], ops.squeeze(stay[:, prefix:], guests, cosine, host)], dim=1)
    into, size, source = host + prefix, full_size(tokens), tokens.source
    if source is not None:
        source = ops.compose(source, ops.pruned_source(kept, gone, 0).scatter(1, gone, into))
    return tokens.replace(x=x, size=size.gather(1, kept).scatter_add(1, into, size.gather(1, gone)), source=source)
