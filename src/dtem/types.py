"""Words shared by every room.

Shape letters, used in signatures and comments throughout:

    b  images in the batch          n  tokens (prefix and patches)
    c  width of the host            d  width of the decoupled embedding
    i  tokens on side A             j  tokens on side B
    h  attention heads              p  patches of the image grid
    r  tokens removed by one merge

*Prefix* tokens (class, distillation, registers) come first, are never merged and have size 1.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

#: Sizes below this are read as this inside a logarithm or a division.
SIZE_FLOOR = 1e-6


class DtemError(ValueError):
    """A mistake that the user can mend: the message names the value and the way out."""


@dataclass(frozen=True)
class Above:
    """In place of an r: as many merges as there are edges with a cosine above this, half of the patches at most."""

    threshold: float


class Tokens(NamedTuple):
    """What flows from block to block. Every step returns a new one; nothing is kept elsewhere."""

    x: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"] | None = None
    """Patches that each token stands for; None while nothing has been merged (all ones)."""
    source: Int[Tensor, "b p"] | None = None
    """Index of the token that holds each patch, −1 if it was dropped; tracked only when asked for."""
    excluded: int = 0
    """Tokens at the end of the sequence that take no further part in merging (soft training)."""
    carry: dict[str, Any] = {}  # noqa: RUF012 - never mutated, only replaced
    """What a method hands on to its own next step (tokens set aside, running scores, …)."""

    def replace(self, **changes: Any) -> "Tokens":
        """A new one with some fields changed. (`_replace` does the same, but older compilers stop there.)"""
        fields: dict[str, Any] = {
            "x": self.x,
            "size": self.size,
            "source": self.source,
            "excluded": self.excluded,
            "carry": self.carry,
        }
        return Tokens(**{**fields, **changes})


class Taps(NamedTuple):
    """What one attention layer lets a method see: views of what was computed anyway, valid during `Method.reduce`."""

    input: Float[Tensor, "b n c"]
    q: Float[Tensor, "b h n e"]
    k: Float[Tensor, "b h n e"]
    v: Float[Tensor, "b h n e"]
    scale: float


@dataclass(frozen=True)
class HostSpec:
    """What a method and a file need to know of the model that they serve."""

    name: str
    """Architecture name, e.g. ``deit_small_patch16_224``."""
    family: str
    """Adapter that speaks to it, e.g. ``timm_vit``."""
    depth: int
    width: int
    heads: int
    head_dim: int
    prefix: int
    patches: int
    """Patches at the host's own image size; other sizes are met when they come."""
    pooling: str
    """``prefix`` (class or distillation token), ``mean``, ``max``, ``avgmax``, ``attention`` or ``none``;
    ``prefix+max`` (class token and best patch); ``dense`` where every patch is read in its place."""
    image: tuple[int, int, int] = field(default=(3, 224, 224), compare=False)
    """Channels, height and width of the input."""
    masked: bool = field(default=False, compare=False)
    """Whether the weights come from masked pre-training (MAE): there, proportional attention does harm at inference."""
    class_token: bool = field(default=True, compare=False)
    """Whether the first prefix token, if there is one, is a class token: False where all of them are registers."""
    merging: int | None = field(default=None, compare=False)
    """The first so many blocks merge (and learn to) where r does not say otherwise block by block; None: all."""

    @property
    def learning(self) -> int:
        """The first so many blocks learn how to merge: what the last one merges never reaches a class token."""
        blocks = self.depth - 1 if self.pooling == "prefix" else self.depth
        return blocks if self.merging is None else min(blocks, self.merging)

    @property
    def dense(self) -> bool:
        """Whether every patch must be there at the end: then merging is undone after each component of a block."""
        return self.pooling == "dense"

    @property
    def provides(self) -> frozenset[str]:
        """What this model has and not every model of its family has."""
        return frozenset({"class_token"} if self.class_token and self.prefix else ())
