"""PatchMerger: learned queries mix the patches into fewer tokens (Renggli et al. 2022, https://arxiv.org/abs/2202.12015).

With a matrix W of M trained queries, n patches X become M tokens, each a weighted mean of all patches:

    Y = softmax(W LN(X)ᵀ) X          (softmax over patches)

LN has no weights: its scale is part of W, and its shift adds a constant to each row of logits.

Differences from the publication: the mean is taken over X (some implementations take LN(X)), as a frozen host needs; it
runs between attention and MLP of a block (published: between two blocks), in any number of blocks (published: one, with
M = 8, in the middle). The published model has no class token; here prefix tokens are unchanged. Since the schedule
gives the number of tokens, a block has as many queries as the host has patches, and n − r tokens use the first n − r.

All sizes are 1, since no token is kept. The source map gives for each patch the first token in which it has the largest
share, and −1 for patches that have none. Soft and hard mode compute the same.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method
from dtem.ops.matching import full_precision
from dtem.types import HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class PatchMergerConfig(Config):
    """Settings of PatchMerger."""

    proportional: bool | str | None = False
    """Proportional attention: no effect, since all sizes are 1."""
    seed: int = 0
    """Of the initialisation of the queries."""


class PatchMerger(Method):
    """Weighted means of all patches by trained queries, for each block."""

    name: ClassVar[str] = "patch_merger"
    conserves_size = False
    config_class: ClassVar[type[Config]] = PatchMergerConfig
    config: PatchMergerConfig

    def __init__(self, host: HostSpec, config: PatchMergerConfig) -> None:
        super().__init__(host, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.queries = nn.ModuleList(nn.Linear(host.width, host.patches, bias=False) for _ in range(host.depth))
            for weight in self.queries.parameters():
                nn.init.normal_(weight)
        self.queries[host.num_trainable_blocks :].requires_grad_(False)  # they never get a gradient

    def has_soft_mode(self) -> bool:
        return True

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        x, prefix, source = tokens.x, self.host.prefix, tokens.source
        layer_queries = self.queries[layer]
        assert isinstance(layer_queries, nn.Linear)
        patches, queries = x[:, prefix:], layer_queries.weight
        left = patches.shape[1] - r
        if left > queries.shape[0]:
            raise DtemError(
                f"block {layer} should keep {left} patches, but patch_merger has {queries.shape[0]} queries: use "
                f"images of at most {self.host.patches} patches, or a larger r"
            )
        mixed, share = mix(patches, queries[:left])
        if source is not None:
            source = ops.compose(source - prefix, held_by(share, prefix))
        x = torch.cat([x[:, :prefix], mixed], dim=1)
        return tokens.replace(x=x, size=torch.ones(x.shape[:2], dtype=torch.float32, device=x.device), source=source)


def mix(
    x: Float[Tensor, "b n c"], queries: Float[Tensor, "m c"]
) -> tuple[Float[Tensor, "b m c"], Float[Tensor, "b m n"]]:
    """softmax(W LN(x)ᵀ) x, and the softmax: the share of each token in each new token. In float32 (float64 stays)."""
    with full_precision(x.device):
        high = x if x.dtype == torch.float64 else x.float()
        logits = F.linear(F.layer_norm(high, high.shape[-1:]), queries.to(high.dtype)).mT
        share = logits.softmax(dim=2)
        return (share @ high).to(x.dtype), share


def held_by(share: Float[Tensor, "b m n"], first: int) -> Int[Tensor, "b n"]:
    """Source map: for each token the first new token in which it has the largest share, −1 if there is none. New tokens
    are numbered from `first`."""
    batch, made, tokens = share.shape
    largest = share.argmax(dim=2)
    number = torch.arange(first, first + made, device=share.device).expand(batch, -1)
    return largest.new_full((batch, tokens), -1).scatter_reduce(1, largest, number, "amin", include_self=False)
