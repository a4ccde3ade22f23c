"""PatchMerger: learned queries mix all patches into fewer (Renggli et al. 2022, https://arxiv.org/abs/2202.12015).

With a matrix W of M queries, learned with the task, n patches X become M tokens, each a mean of all of them:

    Y = softmax(W LN(X)ᵀ) X          (softmax over patches)

LN has no weights of its own: its scale is part of W, and its shift adds one number to a whole row of logits.

Where this package departs from it: the mean is taken over X itself (some implementations take LN(X)), which a frozen
host knows how to read; it stands between attention and MLP of a block that reduces (published: between two blocks); and
it may be used in any number of blocks (published: one, M = 8 in the middle). The published model has no class token;
here prefix tokens pass by untouched. Since the schedule says how many tokens are left, a block has as many queries as
the host has patches, and n − r patches are made by the first n − r of them.

No token is kept, so sizes mean nothing: all are 1. The source map says for each patch which token it is the strongest
part of (the first such token), and −1 for the others. Soft and hard mode compute the same.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dtem import ops
from dtem.methods.base import Config, Method
from dtem.ops.matching import full_precision
from dtem.types import DtemError, HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class PatchMergerConfig(Config):
    """Settings of PatchMerger."""

    proportional: bool | str | None = False
    """Proportional attention: without effect, since all sizes are 1."""
    seed: int = 0
    """Of the queries' start."""


class PatchMerger(Method):
    """Means of all patches by learned queries, beside each block."""

    name: ClassVar[str] = "patch_merger"
    keeps_mass = False
    config_class: ClassVar[type[Config]] = PatchMergerConfig
    config: PatchMergerConfig

    def __init__(self, host: HostSpec, config: PatchMergerConfig) -> None:
        super().__init__(host, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.queries = nn.ModuleList(nn.Linear(host.width, host.patches, bias=False) for _ in range(host.depth))
            for weight in self.queries.parameters():
                nn.init.normal_(weight)
        self.queries[host.learning :].requires_grad_(False)  # they have no gradient to wait for

    def can_relax(self) -> bool:
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
                f"{left} patches should be left in block {layer}, and patch_merger has {queries.shape[0]} queries: use "
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
    """softmax(W LN(x)ᵀ) x, and the softmax: the share of each token in each new one. In float32 (float64 stays)."""
    with full_precision(x.device):
        high = x if x.dtype == torch.float64 else x.float()
        logits = F.linear(F.layer_norm(high, high.shape[-1:]), queries.to(high.dtype)).mT
        share = logits.softmax(dim=2)
        return (share @ high).to(x.dtype), share


def held_by(share: Float[Tensor, "b m n"], first: int) -> Int[Tensor, "b n"]:
    """For each token the first new one whose largest share it has, −1 if there is none. New ones count from `first`."""
    batch, made, tokens = share.shape
    largest = share.argmax(dim=2)
    number = torch.arange(first, first + made, device=share.device).expand(batch, -1)
    return largest.new_full((batch, tokens), -1).scatter_reduce(1, largest, number, "amin", include_self=False)
