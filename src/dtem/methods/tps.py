"""TPS: prune tokens, then squeeze each into its most similar kept token.

Wei et al., "Joint Token Pruning and Squeezing Towards More Aggressive Compression of Vision Transformers", CVPR 2023,
https://arxiv.org/abs/2304.10716. Tokens are selected as in another method; each pruned token is mixed into its most
similar kept token (`ops.squeeze` has the equation).

    etps    inside a block: selected by class attention, as in EViT, with features after the attention residual
    dtps    before a block: selected by predictors, as in DynamicViT, trained in the same way

Differences from the publication: r patches are pruned in a block (published: a keep rate, in three blocks;
`evit.keep_rate` with fuse=False and `dynamicvit.keep_rate` give those schedules), kept patches stay in order, and sizes
count the squeezed patches, though neither the mixture nor attention depends on sizes. The distillation of token
features in the published training of dtps is left out, as in `dynamicvit`.
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
        attention = self.class_attention(tokens, taps)
        return squeeze_pruned(tokens, *ops.prune(attention, r, self.host.prefix), self.host.prefix)


class Dtps(DynamicVit):
    """Pruning by trained predictors before a few blocks, with squeezing."""

    name: ClassVar[str] = "dtps"
    conserves_size = True

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """In training the log of the masks, not of sizes: sizes count squeezed patches, which attention ignores."""
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
        """As in DynamicViT; newly masked tokens are squeezed into the others. The masks get a gradient through the
        mixture too."""
        masked = super()._mask(predictor, layer, tokens, r)
        prefix, earlier, keep = self.host.prefix, tokens.carry.get("keep"), masked.carry["keep"]
        guest = (1.0 if earlier is None else earlier) - keep
        patches, stays = tokens.x[:, prefix:], keep.detach() > 0
        others = ~torch.eye(patches.shape[1], dtype=torch.bool, device=keep.device)
        cosine, host = ops.find_hosts(patches, patches, stays.unsqueeze(1) & others)
        x = torch.cat([tokens.x[:, :prefix], ops.squeeze(patches, patches, cosine, host, guest)], dim=1)
        old = full_size(tokens)[:, prefix:].detach().round()
        new = torch.where(stays, old.scatter_add(1, host, old * guest.detach().to(old.dtype)), 1.0)
        size = nn.functional.pad(keep * new + MASKED, (prefix, 0), value=1.0)
        return masked.replace(x=x, size=size)


def squeeze_pruned(tokens: Tokens, kept: Int[Tensor, "b k"], gone: Int[Tensor, "b r"], prefix: int) -> Tokens:
    """Keep the tokens `kept` and squeeze the tokens `gone` into the patches among them (never into prefix tokens)."""
    stay, guests = ops.take(tokens.x, kept), ops.take(tokens.x, gone)
    cosine, host = ops.find_hosts(guests, stay[:, prefix:])
    x = torch.cat([stay[:, :prefix], ops.squeeze(stay[:, prefix:], guests, cosine, host)], dim=1)
    into, size, source = host + prefix, full_size(tokens), tokens.source
    if source is not None:
        source = ops.compose(source, ops.pruned_source(kept, gone, 0).scatter(1, gone, into))
    return tokens.replace(x=x, size=size.gather(1, kept).scatter_add(1, into, size.gather(1, gone)), source=source)
