"""Types shared by all packages: tokens, attention taps, and the description of a host model.

Notation used for tensor shapes, in signatures and comments:

    b  images in the batch          n  tokens (prefix and patches)
    c  width of the host            d  width of the decoupled embedding
    i  tokens of set A              j  tokens of set B
    h  attention heads              p  patches of the image grid
    r  tokens removed by one merge

*Prefix* tokens (class, distillation, registers) come first, are never merged and have size 1.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

#: Lower bound of token sizes inside a logarithm or a division.
SIZE_FLOOR = 1e-6


class Tokens(NamedTuple):
    """The state of a forward between two steps: every step returns a new one, and there is no other state."""

    x: Float[Tensor, "b n c"]
    size: Float[Tensor, "b n"] | None = None
    """Number of patches in each token; None while nothing has been merged (all ones)."""
    source: Int[Tensor, "b p"] | None = None
    """Source map: index of the token that holds each patch, −1 if it was dropped; None unless traced."""
    excluded: int = 0
    """Number of tokens at the end of the sequence that take no further part in merging (soft mode)."""
    carry: dict[str, Any] = {}  # noqa: RUF012 - never mutated, only replaced
    """Values that a method passes to its own next step (tokens set aside, running scores, …)."""
    padded: bool = False
    """Whether tokens of size 0 are padding of the host, which neither merges nor receives."""

    def replace(self, **changes: Any) -> "Tokens":
        """A copy with some fields changed. (As `_replace`, which older versions of torch.compile cannot trace.)"""
        get = changes.get
        return Tokens(
            get("x", self.x),
            get("size", self.size),
            get("source", self.source),
            get("excluded", self.excluded),
            get("carry", self.carry),
            get("padded", self.padded),
        )


class Taps(NamedTuple):
    """Input, queries, keys and values of one attention layer: views that are valid during `Method.reduce`."""

    input: Float[Tensor, "b n c"]
    q: Float[Tensor, "b h n e"]
    k: Float[Tensor, "b h n e"]
    v: Float[Tensor, "b h n e"]
    scale: float


@dataclass(frozen=True)
class HostSpec:
    """Description of a host model, as methods and adapter files need it."""

    name: str
    """Architecture name, e.g. ``deit_small_patch16_224``."""
    family: str
    """Name of its integration, e.g. ``timm_vit``."""
    depth: int
    width: int
    heads: int
    head_dim: int
    prefix: int
    patches: int
    """Number of patches at the host's own image size. Forwards may have other sizes."""
    pooling: str
    """``prefix`` (class or distillation token), ``mean``, ``max``, ``avgmax``, ``attention`` or ``none``;
    ``prefix+max`` (class token and best patch); ``dense`` for dense prediction, which needs every patch."""
    image: tuple[int, ...] = field(default=(3, 224, 224), compare=False)
    """Channels, height and width of the input; of videos, the number of frames first."""
    masked: bool = field(default=False, compare=False)
    """Whether the weights come from masked pre-training (MAE), where proportional attention harms inference."""
    class_token: bool = field(default=True, compare=False)
    """Whether the first prefix token, if any, is a class token; False if all of them are registers."""
    num_merge_blocks: int | None = field(default=None, compare=False)
    """Number of first blocks that merge, unless r is given per block; None: all."""
    norms: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Scales and biases of the norms that see merged tokens: their names in the model, and shapes."""
    biases: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Biases of the linear layers in the blocks: their names in the model, and shapes."""

    @property
    def num_trainable_blocks(self) -> int:
        """Number of first blocks with trained parts: merging in the last block never changes the class token."""
        blocks = self.depth - 1 if self.pooling == "prefix" else self.depth
        return blocks if self.num_merge_blocks is None else min(blocks, self.num_merge_blocks)

    @property
    def dense(self) -> bool:
        """Whether the head needs every patch: then each merge is undone after the attention or MLP that it was for."""
        return self.pooling == "dense"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches, at the host's own image size."""
        _, height, width = self.image
        rows = max(1, round((self.patches * height / width) ** 0.5))
        return rows, self.patches // rows

    @property
    def provides(self) -> frozenset[str]:
        """Features of this model that not every model of its family has (see `Method.needs`)."""
        return frozenset({"class_token"} if self.class_token and self.prefix else ())
