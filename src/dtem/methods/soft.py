"""Merging that can be relaxed: bipartite matching at inference, soft grouping and soft merging in training.

What differs from one such method to the next is the metric by which tokens are compared. How many tokens a block merges
may be learned too (`LearnedRates`): then soft merging goes on for the broken part of one more step, by which the loss
tells a block to merge more or less.
"""

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem.methods.base import Config, Method, full_size, merge_matched
from dtem.methods.rates import LearnedRates
from dtem.types import Above, DtemError, HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class SoftConfig(Config):
    """Settings of soft grouping and merging."""

    temperature: float = 0.1
    """τ of soft grouping."""
    scale: float = 0.1
    """Similarities are divided by this before soft grouping."""
    candidates: int | None = None
    """Soft grouping sees only each A token's best few B tokens; None: all."""
    exclude: str = "mass"
    """Which tokens leave the merging after a soft merge: "mass" (those that inference removes) or "size"."""
    sparse: bool = False
    """Tokens that leave the merging give away all of themselves and are computed on no more: training takes half the
    time and learns somewhat less (docs/training.md)."""
    priced: bool = False
    """Learn what each merge would do to the output (`ops.pricing`), instead of through relaxed merges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("exclude", self.exclude, ("mass", "size"))
        for name in ("sparse", "priced"):
            if not isinstance(getattr(self, name), bool):
                raise DtemError(f"{name} = {getattr(self, name)!r} must be True or False")
        if self.sparse and self.priced:
            raise DtemError("sparse = True and priced = True are two ways to learn: choose one")
        if self.sparse and self.exclude != "mass":
            raise DtemError(f"sparse = True goes with exclude = 'mass', not {self.exclude!r}: only A tokens can leave")
        for name in ("temperature", "scale"):
            check_positive(name, getattr(self, name))
        check_count("candidates", self.candidates)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a setting that is none of `allowed`."""
    if value not in allowed:
        raise DtemError(f"{name} = {value!r} is not known; choose one of: {', '.join(allowed)}")


def check_positive(name: str, value: object) -> None:
    """Refuse a setting that is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DtemError(f"{name} = {value!r} must be a positive number")


def check_count(name: str, value: object) -> None:
    """Refuse a setting that is neither a whole number from 1 on nor None."""
    if value is not None and not is_count(value):
        raise DtemError(f"{name} = {value!r} must be a whole number, 1 or more, or None for the default")


def is_count(value: object) -> bool:
    """Whether `value` is a whole number, 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class SoftMethod(Method):
    """A merging method with a soft mode."""

    adaptive: ClassVar[bool] = True
    config_class: ClassVar[type[Config]] = SoftConfig
    config: SoftConfig

    def __init__(self, host: HostSpec, config: SoftConfig) -> None:
        super().__init__(host, config)
        self.rates: LearnedRates | None = None
        """The r of every block, where that is learned."""

    @abstractmethod
    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        """What tokens are compared by (cosine)."""

    def edges(
        self, similarity: Float[Tensor, "b i j"], r: int, gates: Float[Tensor, " r"] | None
    ) -> Float[Tensor, "b i j"]:
        """Soft adjacency of the A and B tokens for r merges, weighted by `gates`."""
        config = self.config
        return ops.soft_group(similarity, r, config.temperature, config.scale, config.candidates, gates)

    def can_relax(self) -> bool:
        return True

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int | Above) -> Tokens:
        if not self.soft:
            return tokens if r == 0 else merge_matched(tokens, self.metric(layer, taps), r, self.host.prefix)
        if isinstance(r, Above):
            raise DtemError(f"r = t{r.threshold:g} is for inference; in soft mode give r as numbers")
        if self.rates is not None and "rates" not in tokens.carry:
            tokens = tokens.replace(carry={**tokens.carry, "rates": self.rates()})
        if self.host.pooling == "prefix" and layer == self.host.depth - 1:
            return tokens  # what the last block merges never reaches the class token
        if self.config.priced:
            return self._price(layer, tokens, taps, r)
        steps, gates = self._steps(layer, tokens, r)
        return tokens if steps == 0 else self._merge_softly(tokens, self.metric(layer, taps), r, steps, gates)

    def _steps(self, layer: int, tokens: Tokens, r: int) -> tuple[int, Float[Tensor, " steps"] | None]:
        """Steps of soft grouping and their weights. Learned rates add to r how far they are from a whole number: at
        ``r = "learned"`` that is the rate itself, and no device is asked for its value."""
        if self.rates is None:
            return r, None
        rate = tokens.carry["rates"][layer]
        steps = min(r + 1, ops.limit(tokens.x.shape[1] - self.host.prefix - tokens.excluded))
        return steps, ops.step_gates(r + (rate - rate.detach().round()), steps)

    def _price(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        """Of two neighbouring blocks one, drawn for this forward, merges twice as many tokens; the other merges none,
        and its edges are priced: so what they would do is seen where earlier blocks have merged."""
        if "draw" not in tokens.carry:
            draw = torch.randint(2, ((self.host.depth + 1) // 2,)).tolist()
            tokens = tokens.replace(carry={**tokens.carry, "draw": draw, "offers": ()})
        prefix, metric = self.host.prefix, self.metric(layer, taps)
        if tokens.carry["draw"][layer // 2] == layer % 2:
            return merge_matched(tokens, metric, min(2 * r, ops.limit(tokens.x.shape[1] - prefix)), prefix)
        nudge = torch.zeros_like(tokens.x, requires_grad=True)
        edges = self.edges(ops.cosine(metric, prefix), r, None)
        offer = ops.Offer(edges, tokens.x.detach(), full_size(tokens).detach(), nudge, prefix)
        carry = {**tokens.carry, "offers": (*tokens.carry["offers"], offer)}
        return tokens.replace(x=tokens.x + nudge, carry=carry)

    def offers(self, tokens: Tokens) -> tuple[ops.Offer, ...]:
        found: tuple[ops.Offer, ...] = tokens.carry.get("offers", ())
        return found

    def _merge_softly(
        self, tokens: Tokens, metric: Float[Tensor, "b n d"], r: int, steps: int, gates: Float[Tensor, " steps"] | None
    ) -> Tokens:
        config, prefix = self.config, self.host.prefix
        similarity = ops.cosine(metric, prefix, tokens.excluded)
        edges = self.edges(similarity, steps, gates)
        if config.sparse:
            edges = ops.give_all(edges, r)
        merged = ops.soft_merge(tokens.x, full_size(tokens), edges, r, prefix, tokens.excluded, config.exclude)
        if config.sparse:
            left = merged.x.shape[1] - r
            return tokens.replace(x=merged.x[:, :left], size=merged.size[:, :left], source=None)
        return tokens.replace(x=merged.x, size=merged.size, excluded=merged.excluded, source=None)
