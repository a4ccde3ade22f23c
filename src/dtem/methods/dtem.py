"""DTEM: merge by a learned, decoupled embedding (Lee and Hong, NeurIPS 2024, https://arxiv.org/abs/2412.10569).

At inference this is bipartite matching on the embedding of each block's attention input. In training the choice of
edges is relaxed (`ops.soft_group`), so that the task's loss teaches the embedding what may be merged. The input of the
embedding is detached: its gradient does not reach the host.

Beyond the paper, which names it a direction to go: with `learn_rates` the r of every block is learned beside the
embedding. The loss has a gradient in it by the broken part of one more soft step (`ops.step_gates`); the loss
λ (GFLOPs / budget − 1)² keeps the rates at the cost of the plan that they start from (`handle.aim`).
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem.embedding import DecoupledEmbedding
from dtem.methods.base import Config
from dtem.methods.rates import LearnedRates
from dtem.methods.soft import SoftConfig, SoftMethod, check_choice, check_count, check_positive, is_count
from dtem.types import DtemError, HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class DtemConfig(SoftConfig):
    """Settings of DTEM."""

    dim: int | None = None
    """Width of the embedding; None: the head width, twice that from width 1024 on (64 and 128 for ViT-T/S/B and L)."""
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers; none: the embedding is one affine layer."""
    init: str = "keys"
    """Start from the head-mean key projection ("keys": untrained, it is ToMe) or at random ("random")."""
    seed: int = 0
    """Of the random part of the start."""
    learn_rates: bool = False
    """Learn the r of every block too; `handle.aim` says at which cost."""
    flops_weight: float = 100.0
    """λ of the loss (GFLOPs / budget − 1)² of learned rates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, ("keys", "random"))
        check_count("dim", self.dim)
        if not isinstance(self.learn_rates, bool):
            raise DtemError(f"learn_rates = {self.learn_rates!r} must be True or False")
        if self.learn_rates and self.priced:
            raise DtemError("priced = True cannot learn rates: each block's merges are priced at a given r")
        check_positive("flops_weight", self.flops_weight)
        if not isinstance(self.hidden, tuple) or not all(map(is_count, self.hidden)):
            raise DtemError(f"hidden = {self.hidden!r} must be a tuple of whole numbers, each 1 or more")
        if self.hidden and self.init == "keys":
            raise DtemError(f"hidden = {self.hidden} cannot start from the keys; add init='random'")


class Dtem(SoftMethod):
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
        self.embeddings[host.learning :].requires_grad_(False)  # they have no gradient to wait for

        if config.learn_rates:
            self.rates = LearnedRates(host)

    def start(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.config.init == "keys":
            generator = torch.Generator().manual_seed(self.config.seed)
            for embedding, (weight, bias) in zip(self.embeddings, key_projections, strict=True):
                assert isinstance(embedding, DecoupledEmbedding)
                embedding.copy_keys(weight, bias, generator)

    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        embedded: Tensor = self.embeddings[layer](taps.input.detach() if self.soft else taps.input)
        return embedded

    def schedule(self) -> tuple[int, ...] | None:
        if self.rates is None:
            return None
        return self.rates.nearest() if self.soft else self.rates.whole()

    def aim(self, plan: tuple[int, ...], cost: Callable[[tuple[int, ...]], float]) -> object:
        if self.rates is None:
            return super().aim(plan, cost)
        self.rates.aim(plan, cost)
        return "learned"

    def losses(self, tokens: Tokens) -> dict[str, Tensor]:
        rates = tokens.carry.get("rates")
        if self.rates is None or rates is None:
            return {}
        return {"flops": self.config.flops_weight * self.rates.excess(rates).square()}
