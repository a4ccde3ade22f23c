"""Token Pooling: cluster the tokens, keep one token per cluster (Marin et al. 2021, https://arxiv.org/abs/2110.03860).

After attention, n − r clusters of patches are found by weighted k-medoids (`ops.cluster`): those that approximate the
tokens best, Σ_i w_i min_k ‖x_i − x_{m_k}‖² over medoids m. Each cluster becomes the mean of its tokens by weight. The
weight w_i is a token's significance, so that what matters is approximated better; the start is the most significant
tokens, five iterations follow.

Where this package departs from it: significance is the class token's attention to a token, averaged over heads, where
the paper takes the attention that it receives from all tokens; that would need the whole attention matrix. Clusters
return their mean, not their medoid (the paper has both k-means and k-medoids). The published method pools in every
block and trains the host with it; here the schedule says where, and the host may stay as it is.
"""

import dataclasses
from typing import ClassVar

import torch

from dtem import ops
from dtem.methods.base import Config, Method, full_size
from dtem.methods.soft import is_count
from dtem.types import DtemError, Taps, Tokens

#: Class attention below this counts as this, so that a cluster that nobody looks at has a mean too.
WEIGHT_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True)
class TokenPoolingConfig(Config):
    """Settings of Token Pooling."""

    proportional: bool | str | None = False
    """Proportional attention; Token Pooling has none. True, False or None, as for the other methods."""
    iterations: int = 5
    """Of k-medoids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.iterations):
            raise DtemError(f"iterations = {self.iterations!r} must be a whole number, 1 or more")


class TokenPooling(Method):
    """Clustering by k-medoids. Nothing is trained."""

    name: ClassVar[str] = "token_pooling"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    config_class: ClassVar[type[Config]] = TokenPoolingConfig
    config: TokenPoolingConfig

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        prefix = self.host.prefix
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale).mean(dim=1)
        weight = attention[:, prefix:].clamp(min=WEIGHT_FLOOR)
        x, size, source = tokens.x, full_size(tokens), tokens.source
        patches = x[:, prefix:]
        count = patches.shape[1] - r
        member = ops.cluster(patches, weight, count, self.config.iterations)
        new_x = torch.cat([x[:, :prefix], ops.pool(patches, weight, member, count)], dim=1)
        new_size = torch.cat([size[:, :prefix], ops.pool_sizes(size[:, prefix:], member, count)], dim=1)
        if source is not None:
            source = ops.compose(source - prefix, member + prefix)
        return tokens.replace(x=new_x, size=new_size, source=source)
