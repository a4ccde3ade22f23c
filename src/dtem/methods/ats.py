"""ATS: sample patches by their significance; the number of kept tokens differs between images.

Fayyaz et al., "Adaptive Token Sampling For Efficient Vision Transformers", ECCV 2022, https://arxiv.org/abs/2111.15667.
In a block that reduces, with a_hi the class token's attention to patch i in head h and v_hi that patch's value,

    significance s_i = Σ_h a_hi ‖v_hi‖, divided by its sum over all patches

At most K patches are drawn by inverse-transform sampling, at the quantiles 1/2K, 3/2K, … of the cumulative
significance. A patch that several quantiles select is kept once; all others are dropped.

K is given by the schedule: initial patches minus all r so far. **Padding:** each image keeps at most K tokens and is
padded to K. Padding has size 0 and is ignored by attention and pooling. `handle.tokens` and `dtem flops` give the
padded length, an upper bound; `dtem eval` and `dtem compare` count the actual tokens (size > 0).
With ``trim=True``, padding that no image of the batch needs is removed, as published: outputs are the same and the
speed is that of the longest image, but lengths vary, and reading them synchronises a GPU. (A compiled model stays
padded.)

Differences from the publication: the paper prints the nearest cumulative significance and its code stretches the curve
between its ends, here it is the exact inverse; the code sums attention and value norms over heads before multiplying,
here, as in the paper, after it; attention is computed for dropped patches too, their MLP is not. Without training, the
published K is constant and all further reduction comes from repeats: `every_block` with ``trim=True`` is closest.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem import ops
from dtem.methods.base import Config, Method, check_flag, full_size
from dtem.ops.matching import positions
from dtem.schedule import check_stages
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class AtsConfig(Config):
    """Settings of ATS."""

    proportional: bool | str | None = False
    """Proportional attention: no effect, since all tokens of ATS have size 1."""
    ascending: bool = True
    """Cumulate significance in ascending order, as in the published code; False: by position, as in the paper."""
    trim: bool = False
    """Remove padding that no image of the batch needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ascending", "trim"):
            check_flag(name, getattr(self, name))


class Ats(Method):
    """Adaptive sampling by class attention and value norms. Nothing is trained."""

    name: ClassVar[str] = "ats"
    variable_length: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k", "v"})
    conserves_size: bool = False
    config_class: ClassVar[type[Config]] = AtsConfig
    config: AtsConfig

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        return None if tokens.size is None else tokens.size.log()  # 0, and −inf for padding

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        x, prefix, carry = tokens.x, self.host.prefix, tokens.carry
        batch, count, _ = x.shape
        allowed = carry["allowed"].shape[0] if "allowed" in carry else count - prefix
        index, real = ops.sample(self._significance(tokens, taps), allowed - r, self.config.ascending)
        if self.config.trim and not x.is_meta and not torch.compiler.is_compiling():
            longest = int(real.sum(dim=1).max())
            index, real = index[:, :longest], real[:, :longest]
            carry = {**carry, "allowed": x.new_empty(allowed - r, 0)}  # its length is K, for the next block
        kept = torch.cat([positions(batch, prefix, x.device), index + prefix], dim=1)
        size = torch.nn.functional.pad(real.to(torch.float32), (prefix, 0), value=1.0)
        source = tokens.source
        if source is not None:
            source = ops.compose(source, _source(kept, size, count))
        return tokens.replace(x=ops.take(x, kept), size=size, source=source, carry=carry)

    def candidate_plans(self) -> list[tuple[int, ...]]:
        return candidate_plans(self.host.patches, self.host.depth)

    @torch.no_grad()
    def _significance(self, tokens: Tokens, taps: Taps) -> Float[Tensor, "b p"]:
        """s before the division by its sum; 0 for padding only."""
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale)
        norm = torch.linalg.vector_norm(taps.v, dim=-1, dtype=attention.dtype)
        score = (attention * norm).sum(dim=1).clamp(min=torch.finfo(attention.dtype).tiny)
        return (score * full_size(tokens))[:, self.host.prefix :]


def _source(kept: Int[Tensor, "b k"], size: Float[Tensor, "b k"], count: int) -> Int[Tensor, "b n"]:
    """Source map of `count` input tokens: the position among `kept`, −1 if dropped. Padding holds no token."""
    batch, left = kept.shape
    position = torch.where(size > 0, kept, count)
    source = kept.new_full((batch, count + 1), -1)
    return source.scatter(1, position, positions(batch, left, kept.device))[:, :count]


def every_block(first: int = 3, depth: int = 12, r: int = 1) -> tuple[int, ...]:
    """Schedule with ATS in every block from `first` on (counted from 0; published: the 4th): r tokens there, then one
    per block.

    Examples:
        >>> dtem.patch(model, "ats", r=every_block(), trim=True)
    """
    check_stages([first], depth)
    return (0,) * first + (r,) + (1,) * (depth - first - 1)


def candidate_plans(patches: int, depth: int = 12) -> list[tuple[int, ...]]:
    """Plans by decreasing cost, from which one is chosen for a budget: ATS in the last block only, then in more blocks,
    down to the published first one (a quarter of the depth), then in all of those with fewer samples."""
    first = depth // 4
    later = [every_block(start, depth) for start in range(depth - 1, first, -1)]
    return later + [every_block(first, depth, r) for r in range(1, patches // 2 + 1)]
