"""Token Pooling: cluster the tokens, keep one token per cluster (Marin et al. 2021, https://arxiv.org/abs/2110.03860).

After attention, patches are clustered into n − r clusters by weighted k-medoids (`ops.cluster`), which minimises
Σ_i w_i min_k ‖x_i − x_{m_k}‖² over medoids m. Each cluster becomes the weighted mean of its tokens. The weight w_i is
the significance of a token. The most significant tokens are the initial medoids; five iterations follow.

Differences from the publication: significance is the attention of the class token, averaged over heads, where the paper
takes the attention received from all tokens, which would need the full attention matrix. Clusters return their mean,
not their medoid (the paper has both k-means and k-medoids). The published method pools in every block and trains the
host with it; here the schedule gives the blocks, and the host may stay frozen.
"""

import dataclasses
from typing import ClassVar

import torch

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, full_size, is_count
from dtem.types import Taps, Tokens

#: Lower bound of the class attention, so that every cluster has a weighted mean.
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
        attention = self.class_attention(tokens, taps)
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
