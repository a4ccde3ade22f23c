"""ATS: sample patches by their significance; how many tokens are left differs from image to image.

Fayyaz et al., "Adaptive Token Sampling For Efficient Vision Transformers", ECCV 2022, https://arxiv.org/abs/2111.15667.
In a block that reduces, with a_hi the class token's attention to patch i in head h and v_hi that patch's value,

    significance s_i = Σ_h a_hi ‖v_hi‖, divided by its sum over all patches

At most K patches are drawn by inverse-transform sampling: those that the quantiles 1/2K, 3/2K, … of the cumulated
significance fall on. A patch that several quantiles fall on is kept once; what no quantile falls on is dropped.

K is what the schedule leaves: patches at the start less all r so far. **Tokens left:** each image has its own number,
K at most, so tokens are padded to K. Padding has size 0; attention and pooling pass it over. `handle.tokens` and
`dtem flops` are about the padded length, an upper bound; (size > 0) in a trace tells how many tokens there really are,
and by those `dtem eval` and `dtem compare` count.
With ``trim=True``, padding that no image of the batch needs is cut off, as published: the answer is the same and the
speed that of the longest image, but lengths vary, and reading them makes a GPU wait. (A compiled model stays padded.)

Where this departs from the publication: the paper prints the nearest cumulated significance and its code stretches the
curve between its ends, here it is the exact inverse; the code sums attention and value norms over heads before
multiplying, here as in the paper after it; attention is computed for dropped patches too (the fused kernel knows no
rows), their MLP is not. Published without training, K stays what it is once set: all further reduction comes from
repeats, which `every_block` and ``trim=True`` come closest to.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem import ops
from dtem.methods.base import Config, Method, full_size
from dtem.ops.matching import positions
from dtem.types import DtemError, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class AtsConfig(Config):
    """Settings of ATS."""

    proportional: bool | str | None = False
    """Proportional attention; all tokens of ATS have size 1, so this changes nothing."""
    ascending: bool = True
    """Cumulate significance from the lowest to the highest, as the published code does. False: patch by patch, as the
    paper prints it."""
    trim: bool = False
    """Cut off padding that no image of the batch needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ascending", "trim"):
            if not isinstance(getattr(self, name), bool):
                raise DtemError(f"{name} = {getattr(self, name)!r} must be True or False")


class Ats(Method):
    """Adaptive sampling by class attention and value norms. Nothing is trained."""

    name: ClassVar[str] = "ats"
    varies: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k", "v"})
    keeps_mass: bool = False
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
            carry = {**carry, "allowed": x.new_empty(allowed - r, 0)}  # its length tells the next block
        kept = torch.cat([positions(batch, prefix, x.device), index + prefix], dim=1)
        size = torch.nn.functional.pad(real.to(torch.float32), (prefix, 0), value=1.0)
        source = tokens.source
        if source is not None:
            source = ops.compose(source, _source(kept, size, count))
        return tokens.replace(x=ops.take(x, kept), size=size, source=source, carry=carry)

    def ladder(self) -> list[tuple[int, ...]]:
        return ladder(self.host.patches, self.host.depth)

    @torch.no_grad()
    def _significance(self, tokens: Tokens, taps: Taps) -> Float[Tensor, "b p"]:
        """s, not yet divided by its sum; 0 for padding, and for it alone."""
        attention = ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale)
        norm = torch.linalg.vector_norm(taps.v, dim=-1, dtype=attention.dtype)
        score = (attention * norm).sum(dim=1).clamp(min=torch.finfo(attention.dtype).tiny)
        return (score * full_size(tokens))[:, self.host.prefix :]


def _source(kept: Int[Tensor, "b k"], size: Float[Tensor, "b k"], count: int) -> Int[Tensor, "b n"]:
    """For each of `count` input tokens its place among `kept`, −1 if it was dropped. Padding holds no token."""
    batch, left = kept.shape
    nowhere = torch.where(size > 0, kept, count)
    source = kept.new_full((batch, count + 1), -1)
    return source.scatter(1, nowhere, positions(batch, left, kept.device))[:, :count]


def every_block(first: int = 3, depth: int = 12, r: int = 1) -> tuple[int, ...]:
    """ATS in every block from `first` on (counted from 0; published: the 4th). There K is r less than the patches; it
    then stays as it was, but for one per block.

    Example:
        >>> dtem.patch(model, "ats", r=every_block(), trim=True)
    """
    if not 0 <= first < depth:
        raise DtemError(f"block {first} is not among the {depth} blocks 0 … {depth - 1}")
    return (0,) * first + (r,) + (1,) * (depth - first - 1)


def ladder(patches: int, depth: int = 12) -> list[tuple[int, ...]]:
    """Plans from mild to strong, to find one that meets a budget: ATS in the last block alone, in ever more blocks down
    to the published first one (after a quarter of the depth), and in all those with ever fewer samples."""
    first = depth // 4
    later = [every_block(start, depth) for start in range(depth - 1, first, -1)]
    return later + [every_block(first, depth, r) for r in range(1, patches // 2 + 1)]
