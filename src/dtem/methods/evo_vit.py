"""Evo-ViT: compute informative patches (slow), and update the others through one representative token (fast).

Xu et al., "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer", AAAI 2022,
https://arxiv.org/abs/2108.01390. With g_i a running mean of the class token's attention to patch i:

    slow:   the patches with the largest g_i go through the block
    fast:   all others, the placeholders, are summarised as one token Σ g_i x_i / Σ g_i, which goes through the block
            with the slow ones; the residual that the block adds to it is added to every placeholder

No patch is removed: after the block all are in their places. g is the attention of the block as long as every patch is
computed, then g ← (1 − t) g + t·attention for slow patches, t = 0.5; placeholders keep their g.

r is the number of additional tokens that a block and all later ones leave out: with R the sum of r so far, the block
computes R tokens fewer (R + 1 placeholders, one summary), in its attention and in its MLP. Slow patches are selected
before the block, by the attention of earlier blocks; in the first block, after its attention. They are selected again
in every block with r > 0, and at the start of every stage of 4 blocks. That covers both published variants: layer by
layer, and by stages (`slow_share`: four full blocks, then half of the patches).

Differences from the published code: patches return to their places (there they stay sorted); the host's own head is
used (there, the mean of all patches, and the class token's head in training only). For DeiT the code does not update
placeholders: ``summary=False``.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, check_count, check_flag
from dtem.ops.matching import positions
from dtem.schedule import check_stages
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class EvoVitConfig(Config):
    """Settings of Evo-ViT."""

    proportional: bool | str | None = False
    """Proportional attention, where the summary counts as its number of placeholders; Evo-ViT has none."""
    summary: bool = True
    """Update placeholders through their summary token. False: leave them unchanged."""
    stage: int = 4
    """Number of blocks of a stage. Slow patches are selected again where one starts."""
    tradeoff: float = 0.5
    """Weight of a block's own attention in the running mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("summary", self.summary)
        if self.stage is None:
            raise DtemError("stage = None must be a whole number, 1 or more")
        check_count("stage", self.stage)
        if isinstance(self.tradeoff, bool) or not isinstance(self.tradeoff, int | float) or not 0 <= self.tradeoff <= 1:
            raise DtemError(f"tradeoff = {self.tradeoff!r} must be a number from 0 to 1")


class EvoVit(Method):
    """Slow and fast updates by class attention. Nothing is trained.

    `Tokens.carry` holds score (g); once patches are set aside, kept and gone (positions of slow and other patches) and
    back (the position of each token in [kept, gone]); within a block also rest (the placeholders) and summary (their
    summary token before the block).
    """

    name: ClassVar[str] = "evo_vit"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    restores: ClassVar[bool] = True
    config_class: ClassVar[type[Config]] = EvoVitConfig
    config: EvoVitConfig

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        carry = tokens.carry
        if "score" not in carry or not (r or "gone" in carry):
            return tokens
        return self._set_aside(tokens, r, renew=r > 0 or layer % self.config.stage == 0)

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        attention = self.class_attention(tokens, taps)  # (b, n)
        carry = tokens.carry
        if "rest" in carry:
            kept, t = carry["kept"], self.config.tradeoff
            slow = (1 - t) * carry["score"].gather(1, kept) + t * attention[:, : kept.shape[1]]
            return tokens.replace(carry={**carry, "score": carry["score"].scatter(1, kept, slow)})
        tokens = tokens.replace(carry={**carry, "score": attention})
        return self._set_aside(tokens, r, renew=True) if r else tokens

    def after(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        carry = tokens.carry
        if "rest" not in carry:
            return tokens
        x, rest = tokens.x, carry["rest"]
        if self.config.summary:
            x, rest = x[:, :-1], rest + (x[:, -1:] - carry["summary"])
        x = ops.take(torch.cat([x, rest], dim=1), carry["back"])
        carry = {name: carry[name] for name in ("score", "kept", "gone", "back")}
        return tokens.replace(x=x, size=_ones(x), carry=carry)

    def _set_aside(self, tokens: Tokens, r: int, renew: bool) -> Tokens:
        """Keep the slow patches and the summary token of all others."""
        x, carry, summary = tokens.x, tokens.carry, self.config.summary
        score = carry["score"]
        if renew:
            aside = carry["gone"].shape[1] + r if "gone" in carry else r + summary
            kept, gone = ops.prune(score, aside, self.host.prefix)
            order = torch.cat([kept, gone], dim=1)
            back = torch.empty_like(order).scatter(1, order, positions(x.shape[0], x.shape[1], x.device))
            carry = {**carry, "kept": kept, "gone": gone, "back": back}
        kept, gone = carry["kept"], carry["gone"]
        carry = {**carry, "rest": ops.take(x, gone)}
        x = ops.take(x, kept)
        size = _ones(x)
        if summary:
            weight = score.clamp(min=torch.finfo(score.dtype).tiny)
            weight = weight / weight.gather(1, gone).sum(dim=1, keepdim=True)
            carry["summary"] = ops.fuse(tokens.x, weight, gone)
            x = torch.cat([x, carry["summary"]], dim=1)
            size = torch.nn.functional.pad(size, (0, 1), value=float(gone.shape[1]))
        return tokens.replace(x=x, size=size, carry=carry)


def _ones(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n"]:
    return torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)


def slow_share(share: float, patches: int, depth: int = 12, first: int = 4) -> tuple[int, ...]:
    """The published schedule as one r per block: from block `first` on (counted from 0; published: the 5th), compute
    ⌊share · patches⌋ tokens, the summary included. A schedule removes at most half of the patches in a block, so shares
    below 0.5 are not reached.

    Examples:
        >>> dtem.patch(model, "evo_vit", r=slow_share(0.5, patches=196))
    """
    check_stages([first], depth, share)
    return tuple(patches - int(share * patches) if layer == first else 0 for layer in range(depth))
