"""DTEM: merge by a learned, decoupled embedding (Lee and Hong, NeurIPS 2024, https://arxiv.org/abs/2412.10569).

At inference this is bipartite matching on the embedding of each block's attention input. In training the choice of
edges is relaxed (`ops.soft_group`), so that the embedding is trained by the task's loss. The input of the embedding
is detached: its gradient does not reach the host.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem.embedding import DecoupledEmbedding
from dtem.errors import DtemError
from dtem.methods.base import Config, check_choice, check_count, is_count
from dtem.methods.soft import SoftConfig, SoftMethod
from dtem.types import HostSpec, Taps


@dataclasses.dataclass(frozen=True)
class DtemConfig(SoftConfig):
    """Settings of DTEM.

    Examples:
        >>> handle = dtem.patch(model, dtem.DtemConfig(temperature=0.3, sparse=True), r=16)
    """

    dim: int | None = None
    """Width of the embedding; None: the head width, twice that from width 1024 on (64 and 128 for ViT-T/S/B and L)."""
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers; empty: the embedding is one affine layer."""
    init: str = "keys"
    """Initialisation: the head-mean key projection ("keys": untrained, it is ToMe) or "random"."""
    seed: int = 0
    """Of the random part of the initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, ("keys", "random"))
        check_count("dim", self.dim)
        if not isinstance(self.hidden, tuple) or not all(map(is_count, self.hidden)):
            raise DtemError(f"hidden = {self.hidden!r} must be a tuple of whole numbers, each 1 or more")
        if self.hidden and self.init == "keys":
            raise DtemError(f"hidden = {self.hidden} cannot be initialised from the keys; add init='random'")


class Dtem(SoftMethod):
    """Merging by decoupled embeddings, one for each block."""

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
        self.embeddings[host.num_trainable_blocks :].requires_grad_(False)  # they never get a gradient

    def init_from_keys(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.config.init == "keys":
            generator = torch.Generator().manual_seed(self.config.seed)
            for embedding, (weight, bias) in zip(self.embeddings, key_projections, strict=True):
                assert isinstance(embedding, DecoupledEmbedding)
                embedding.copy_keys(weight, bias, generator)

    def metric(self, layer: int, taps: Taps) -> Float[Tensor, "b n d"]:
        embedded: Tensor = self.embeddings[layer](taps.input.detach() if self.soft else taps.input)
        return embedded
