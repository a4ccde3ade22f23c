"""DTEM: merge by a learned, decoupled embedding (Lee and Hong, NeurIPS 2024, https://arxiv.org/abs/2412.10569).

At inference this is bipartite matching on the embedding of each block's attention input. In training the choice of
edges is relaxed (`ops.soft_group`), so that the task's loss teaches the embedding what may be merged. The input of the
embedding is detached: its gradient does not reach the host.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from dtem import ops
from dtem.embedding import DecoupledEmbedding
from dtem.methods.base import Config, Method, full_size, merge_matched
from dtem.types import DtemError, HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class DtemConfig(Config):
    """Settings of DTEM."""

    dim: int | None = None
    """Width of the embedding; None: the head width, twice that from width 1024 on (64 and 128 for ViT-T/S/B and L)."""
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers; none: the embedding is one affine layer."""
    init: str = "keys"
    """Start from the head-mean key projection ("keys": untrained, it is ToMe) or at random ("random")."""
    seed: int = 0
    """Of the random part of the start."""
    temperature: float = 0.1
    """τ of soft grouping."""
    scale: float = 0.1
    """Similarities are divided by this before soft grouping."""
    candidates: int | None = None
    """Soft grouping sees only each A token's best few B tokens; None: all."""
    exclude: str = "mass"
    """Which tokens leave the merging after a soft merge: "mass" (those that inference removes) or "size"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, allowed in (
            ("init", self.init, ("keys", "random")),
            ("exclude", self.exclude, ("mass", "size")),
        ):
            if value not in allowed:
                raise DtemError(f"{name} = {value!r} is not known; choose one of: {', '.join(allowed)}")
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise DtemError(f"{name} = {value!r} must be a positive number")
        for name in ("dim", "candidates"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise DtemError(f"{name} = {value!r} must be a whole number, 1 or more, or None for the default")
        if not isinstance(self.hidden, tuple) or not all(map(_is_count, self.hidden)):
            raise DtemError(f"hidden = {self.hidden!r} must be a tuple of whole numbers, each 1 or more")
        if self.hidden and self.init == "keys":
            raise DtemError(f"hidden = {self.hidden} cannot start from the keys; add init='random'")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Dtem(Method):
    """Merging by decoupled embeddings, one beside each block."""

    name: ClassVar[str] = "dtem"
    needs: ClassVar[frozenset[str]] = frozenset({"input", "key_projection"})
    config_class: ClassVar[type[Config]] = DtemConfig
    config: DtemConfig

    def __init__(self, host: HostSpec, config: DtemConfig) -> None:
        super().__init__(host, config)
        self.dim = config.dim or host.head_dim * (1 if host.width < 1024 else 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embeddings = nn.ModuleList(
                DecoupledEmbedding(host.width, self.dim, config.hidden) for _ in range(host.depth)
            )
        if host.pooling == "prefix":
            # What the last block merges never reaches the class token: that embedding has no gradient to wait for.
            self.embeddings[-1].requires_grad_(False)

    def start(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.config.init == "keys":
            generator = torch.Generator().manual_seed(self.config.seed)
            for embedding, (weight, bias) in zip(self.embeddings, key_projections, strict=True):
                assert isinstance(embedding, DecoupledEmbedding)
                embedding.copy_keys(weight, bias, generator)

    def can_relax(self) -> bool:
        return True

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        if not self.soft:
            return merge_matched(tokens, self.embeddings[layer](taps.input), r, self.host.prefix)
        if self.host.pooling == "prefix" and layer == self.host.depth - 1:
            return tokens
        return self._reduce_softly(layer, tokens, taps, r)

    def _reduce_softly(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        config, prefix = self.config, self.host.prefix
        z = self.embeddings[layer](taps.input.detach())
        similarity = ops.cosine(z, prefix, tokens.excluded)
        edges = ops.soft_group(similarity, r, config.temperature, config.scale, config.candidates)
        merged = ops.soft_merge(tokens.x, full_size(tokens), edges, r, prefix, tokens.excluded, config.exclude)
        return tokens.replace(x=merged.x, size=merged.size, excluded=merged.excluded, source=None)
