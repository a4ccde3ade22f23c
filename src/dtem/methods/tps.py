"""TPS: prune tokens, then squeeze each into the kept token that it is most like.

Wei et al., "Joint Token Pruning and Squeezing Towards More Aggressive Compression of Vision Transformers", CVPR 2023,
https://arxiv.org/abs/2304.10716. What is pruned is decided as in another method; what it held is not lost, but mixed
into its nearest kept token, by similarity (`ops.squeeze` has the equation).

    etps    inside a block: class attention decides, as in EViT, and features are those after the attention residual
    dtps    before a block: predictors decide, as in DynamicViT, trained in the same way

Where this package departs from the published method: r patches go in a block (published: a keep rate, in three blocks;
`evit.keep_rate` with fuse=False and `dynamicvit.keep_rate` give those schedules), kept patches stay in order, and a
token's size adds up the patches that were squeezed into it, though neither their mixture nor attention goes by size.
Distillation of token features, part of the published training of dtps, is left out, as in `dynamicvit`.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dtem import ops
from dtem.methods.base import MASKED, Config, Method, full_size
from dtem.methods.dynamicvit import DynamicVit
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


class Dtps(DynamicVit):
    """Pruning by trained predictors before a few blocks, with squeezing."""

    name: ClassVar[str] = "dtps"
    keeps_mass = True

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """In training, sizes are those of inference, and 0 for what is masked: attention is to see the masks alone."""
        if tokens.size is None or not self.soft:
            return None
        return ops.log_size(tokens.size / tokens.size.detach().clamp(min=1.0))

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        if r == 0 or self.soft:
            return super().before(layer, tokens, r)
        prefix = self.host.prefix
        score = self.predictors[str(layer)](tokens.x[:, prefix:], None)
        kept, gone = ops.prune(nn.functional.pad(score, (prefix, 0)), r, prefix)
        return squeeze_pruned(tokens, kept, gone, prefix)

    def _mask(self, predictor: nn.Module, layer: int, tokens: Tokens, r: int) -> Tokens:
        """As in DynamicViT, and those that are masked now are squeezed into those that are not. The gradient of the
        masks flows through the mixture too: what would a token give, were it pruned?"""
        masked = super()._mask(predictor, layer, tokens, r)
        prefix, earlier, keep = self.host.prefix, tokens.carry.get("keep"), masked.carry["keep"]
        guest = (1.0 if earlier is None else earlier) - keep
        patches, stays = tokens.x[:, prefix:], keep.detach() > 0
        others = ~torch.eye(patches.shape[1], dtype=torch.bool, device=keep.device)
        cosine, host = ops.find_hosts(patches, patches, stays.unsqueeze(1) & others)
        x = torch.cat([tokens.x[:, :prefix], ops.squeeze(patches, patches, cosine, host, guest)], dim=1)
        had = full_size(tokens)[:, prefix:].detach().round()
        holds = torch.where(stays, had.scatter_add(1, host, had * guest.detach().to(had.dtype)), 1.0)
        size = nn.functional.pad(keep * holds + MASKED, (prefix, 0), value=1.0)
        return masked.replace(x=x, size=size)


def squeeze_pruned(tokens: Tokens, kept: Int[Tensor, "b k"], gone: Int[Tensor, "b r"], prefix: int) -> Tokens:
    """Only `kept` tokens are left; those in `gone` joined the patches among them. Prefix tokens take nobody in."""
    stay, guests = ops.take(tokens.x, kept), ops.take(tokens.x, gone)
    cosine, host = ops.find_hosts(guests, stay[:, prefix:])
    x = torch.cat([stay[:, :prefix], ops.squeeze(stay[:, prefix:], guests, cosine, host)], dim=1)
    into, size, source = host + prefix, full_size(tokens), tokens.source
    if source is not None:
        source = ops.compose(source, ops.pruned_source(kept, gone, 0).scatter(1, gone, into))
    return tokens.replace(x=x, size=size.gather(1, kept).scatter_add(1, into, size.gather(1, gone)), source=source)
