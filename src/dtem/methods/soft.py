"""Merging with a soft mode: bipartite matching at inference; soft grouping and soft merging, or the Fisher loss, in
training. Methods differ in the metric by which tokens are compared.
"""

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import (
    Config,
    Method,
    check_choice,
    check_count,
    check_flag,
    check_positive,
    full_size,
    merge_matched,
)
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class SoftConfig(Config):
    """Settings of soft grouping and merging."""

    temperature: float = 0.1
    """τ of soft grouping."""
    scale: float = 0.1
    """Similarities are divided by this before soft grouping."""
    candidates: int | None = None
    """Restrict soft grouping to the most similar few B tokens of each A token; None: all."""
    exclude: str = "mass"
    """Which tokens are excluded after a soft merge: "mass" (those that inference removes) or "size" (the paper)."""
    sparse: bool = False
    """Merge excluded tokens completely and drop them from the computation: halves the training time, at some loss of
    accuracy (docs/train.md)."""
    fisher: bool = False
    """Train with the Fisher loss of each merge (`ops.fisher`) instead of soft merges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("exclude", self.exclude, ("mass", "size"))
        for name in ("sparse", "fisher"):
            check_flag(name, getattr(self, name))
        if self.sparse and self.fisher:
            raise DtemError("sparse = True and fisher = True are two ways to learn: choose one")
        if self.sparse and self.exclude != "mass":
            raise DtemError(f"sparse = True goes with exclude = 'mass', not {self.exclude!r}: only A tokens can leave")
        for name in ("temperature", "scale"):
            check_positive(name, getattr(self, name))
        check_count("candidates", self.candidates)


class SoftMethod(Method):
    """A merging method with a soft mode."""

    merges_only: ClassVar[bool] = True
    config_class: ClassVar[type[Config]] = SoftConfig
    config: SoftConfig

    @abstractmethod
    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        """Features by whose cosine tokens are compared."""

    def edges(self, similarity: Float[Tensor, "b i j"], r: int) -> Float[Tensor, "b i j"]:
        """Soft adjacency of the A and B tokens for r merges."""
        config = self.config
        return ops.soft_group(similarity, r, config.temperature, config.scale, config.candidates)

    def has_soft_mode(self) -> bool:
        return True

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if not self.soft:
            return tokens if r == 0 else merge_matched(tokens, self.metric(layer, taps), r, self.host.prefix)
        if self.host.pooling == "prefix" and layer == self.host.depth - 1:
            return tokens  # merging in the last block never changes the class token
        if self.config.fisher:
            return self._fisher_step(layer, tokens, taps, r)
        return tokens if r == 0 else self._soft_merge(tokens, self.metric(layer, taps), r)

    def _fisher_step(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        """One of each two neighbouring blocks, drawn for this forward, merges 2r tokens. The other merges none, and
        its edges are candidates for the Fisher loss: so the loss is computed where earlier blocks have merged."""
        if "draw" not in tokens.carry:
            draw = torch.randint(2, ((self.host.depth + 1) // 2,)).tolist()
            tokens = tokens.replace(carry={**tokens.carry, "draw": draw, "merge_candidates": ()})
        prefix, metric = self.host.prefix, self.metric(layer, taps)
        limit = ops.limit(tokens.x.shape[1] - prefix)
        if tokens.carry["draw"][layer // 2] == layer % 2:
            return merge_matched(tokens, metric, min(2 * r, limit), prefix)
        perturbation = torch.zeros_like(tokens.x, requires_grad=True)
        edges = self.edges(ops.cosine(metric, prefix), min(r, limit))  # fewer tokens than r's plan: see the 2r above
        candidates = ops.MergeCandidates(edges, tokens.x.detach(), full_size(tokens).detach(), perturbation, prefix)
        carry = {**tokens.carry, "merge_candidates": (*tokens.carry["merge_candidates"], candidates)}
        return tokens.replace(x=tokens.x + perturbation, carry=carry)

    def merge_candidates(self, tokens: Tokens) -> tuple[ops.MergeCandidates, ...]:
        return tuple(tokens.carry.get("merge_candidates", ()))

    def _soft_merge(self, tokens: Tokens, metric: Float[Tensor, "b n d"], r: int) -> Tokens:
        config, prefix = self.config, self.host.prefix
        similarity = ops.cosine(metric, prefix, tokens.excluded)
        edges = self.edges(similarity, r)
        if config.sparse:
            edges = ops.normalise_largest(edges, r)
        merged = ops.soft_merge(tokens.x, full_size(tokens), edges, r, prefix, tokens.excluded, config.exclude)
        source = None
        if tokens.source is not None:
            source = ops.compose(tokens.source, ops.reordering(merged, prefix, tokens.excluded))
        if config.sparse:
            left = merged.x.shape[1] - r
            source = None if source is None else source.masked_fill(source >= left, -1)
            return tokens.replace(x=merged.x[:, :left], size=merged.size[:, :left], source=source)
        return tokens.replace(x=merged.x, size=merged.size, excluded=merged.excluded, source=source)
