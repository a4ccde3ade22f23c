"""PPT: prune or pool, by the variance of the patches' significance.

Wu et al., "PPT: Token Pruning and Pooling for Efficient Vision Transformers", 2023, https://arxiv.org/abs/2310.01812.
With a_hi the class token's attention to patch i in head h, v_i the values of that patch in all heads together and n
patches, in a block that reduces:

    significance  s_i = (Σ_h a_hi) ‖v_i‖, divided by its sum over all patches
    variance      V = Σ_i (s_i − 1/n)² / (n − 1)

    V < threshold    pool:   ToMe's bipartite matching on the head-mean keys, r edges
    otherwise        prune:  the r patches of lowest significance are dropped

Every image decides for itself; either way it loses r tokens. Attention is proportional, as published for models that
were not fine-tuned.

Published: r = 50 in the 4th, 7th and 10th block (`schedule`) with a threshold of 7e-5 for a frozen DeiT-S and 6e-5 for
fine-tuning. A budget is met in these blocks; any other schedule can be given. The threshold is for 196 patches: the
variance of shares falls with their number. Differences: kept patches stay in order (published: sorted by significance;
the output is the same), both outcomes are computed for every image of the batch, of which one is taken, and a
distillation token is never pruned (the published code scores it like a patch).
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, full_size
from dtem.schedule import check_stages
from dtem.types import Taps, Tokens

PUBLISHED = (3, 6, 9)
"""The published blocks, counted from 0."""


@dataclasses.dataclass(frozen=True)
class PptConfig(Config):
    """Settings of PPT."""

    threshold: float = 7e-5
    """Variance of significance below which an image is pooled; 0: always prune, inf: always pool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float) or not self.threshold >= 0:
            raise DtemError(f"threshold = {self.threshold!r} must be a number, 0 or more")


class Ppt(Method):
    """Pruning or pooling by class attention and value norms. Nothing is trained."""

    name: ClassVar[str] = "ppt"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k", "v"})
    conserves_size: bool = False
    config_class: ClassVar[type[Config]] = PptConfig
    config: PptConfig

    @property
    def budget_blocks(self) -> tuple[int, ...] | None:
        return PUBLISHED if self.host.depth > max(PUBLISHED) else None

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        prefix, size = self.host.prefix, full_size(tokens)
        score = self._significance(tokens, taps)
        kept, gone = ops.prune(score, r, prefix)
        matching = ops.match(taps.k.mean(dim=1), r, prefix)
        patches = score.shape[1] - prefix
        variance = (score[:, prefix:] - 1 / patches).square().sum(dim=1) / (patches - 1)
        pooled = variance < self.config.threshold
        x, new_size = ops.merge(tokens.x, size, matching)
        x = torch.where(pooled[:, None, None], x, ops.take(tokens.x, kept))
        new_size = torch.where(pooled[:, None], new_size, size.gather(1, kept))
        source = tokens.source
        if source is not None:
            step = torch.where(pooled[:, None], matching.source, ops.pruned_source(kept, gone, -1))
            source = ops.compose(source, step)
        return tokens.replace(x=x, size=new_size, source=source)

    @torch.no_grad()
    def _significance(self, tokens: Tokens, taps: Taps) -> Float[Tensor, "b n"]:
        """s of every patch; 0 for prefix tokens, which are never pruned."""
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale).sum(dim=1)
        norm = torch.linalg.vector_norm(taps.v, dim=(1, 3), dtype=attention.dtype)
        score = (attention * norm)[:, self.host.prefix :]
        score = score / score.sum(dim=1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
        return torch.nn.functional.pad(score, (self.host.prefix, 0))


def schedule(r: int = 50, depth: int = 12, at: Collection[int] = PUBLISHED) -> tuple[int, ...]:
    """The published schedule as one r per block: r tokens in each of the blocks `at`, counted from 0.

    Examples:
        >>> dtem.patch(model, "ppt", r=schedule(50))
    """
    check_stages(at, depth)
    return tuple(r if layer in at else 0 for layer in range(depth))
