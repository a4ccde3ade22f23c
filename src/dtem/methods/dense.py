"""Merging for dense prediction, where every patch is needed at the end: merge, compute, unmerge.

Each component of a block (attention, MLP) starts and ends with all tokens, each of size 1:

    h = norm(x)
    g = method.group(component, h, r)                  r tokens fewer
    y = component(g.x, method.bias_of(g))
    x = x + method.ungroup(y, g)                       merged tokens get a copy

In training, the last `relaxed` merges are soft and the others are chosen by hard matching. Soft unmerging mixes the
outputs of a token and of those that it was merged into by the soft edges, which is copying as τ → 0. With the Fisher
loss (`ops.fisher`) each component, at random, either merges as at inference or merges nothing and gives candidates.
Components are numbered: 2·layer is the attention of block `layer`, 2·layer + 1 its MLP.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.embedding import DecoupledEmbedding
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, check_count, check_flag, check_positive, is_count
from dtem.ops import Matching
from dtem.types import HostSpec, Tokens


class Grouped(NamedTuple):
    """The merged input of a component, and the data to unmerge its output."""

    x: Float[Tensor, "b m c"]
    size: Float[Tensor, "b m"] | None = None
    """None: no token was merged."""
    matching: Matching | None = None
    """The hard merge."""
    edges: Float[Tensor, "b i j"] | None = None
    """Edges of the soft merge after it; the order of tokens is prefix, A, B."""
    candidates: ops.MergeCandidates | None = None
    """Candidates for the Fisher loss; then nothing was merged."""


class DenseMethod(Method):
    """Merging before every component and unmerging after it."""

    restores: ClassVar[bool] = True
    resets_each_block: ClassVar[bool] = True

    @abstractmethod
    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """Features by whose cosine tokens are compared."""

    def group(self, component: int, h: Float[Tensor, "b n c"], r: int) -> Grouped:
        """Merge r tokens of the input `h` of a component."""
        if r == 0:
            return Grouped(h)
        matching = ops.match(self.metric(component, h), r, self.host.prefix)
        return Grouped(*ops.merge(h, None, matching), matching)

    def bias_of(self, grouped: Grouped) -> Float[Tensor, "b m"] | None:
        """Bias of the attention logits by key: log sizes if proportional. If not, every remaining token counts once; in
        training, a partly merged token counts by its remaining size."""
        size = grouped.size
        if size is not None and not self.proportional:
            size = None if grouped.edges is None else size.clamp(max=1.0)
        if size is None:
            return None
        return size.log() if grouped.edges is None else ops.log_size(size)

    def merge_candidates(self, tokens: Tokens) -> tuple[ops.MergeCandidates, ...]:
        return tuple(tokens.carry.get("merge_candidates", ()))

    def ungroup(self, y: Float[Tensor, "b m c"], grouped: Grouped) -> Float[Tensor, "b n c"]:
        """Unmerge the output of a component: one row for every token."""
        if grouped.edges is not None:
            y = ops.unmerge_along(y, grouped.edges, self.host.prefix)
        return y if grouped.matching is None else ops.unmerge(y, grouped.matching)


class DenseTome(DenseMethod):
    """ToMe: tokens are compared by the input of the component. Nothing is trained."""

    name: ClassVar[str] = "tome"
    needs: ClassVar[frozenset[str]] = frozenset({"input"})

    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        return h


@dataclasses.dataclass(frozen=True)
class DenseDtemConfig(Config):
    """Settings of DTEM for dense prediction."""

    temperature: float = 0.1
    """τ of soft grouping."""
    scale: float = 0.1
    """Similarities are divided by this before soft grouping."""
    candidates: int | None = None
    """Restrict soft grouping to the most similar few B tokens of each A token; None: all."""
    relaxed: int = 64
    """Number of soft merges of a component in training; the other merges are chosen by hard matching."""
    fisher: bool = False
    """Train with the Fisher loss of each merge (`ops.fisher`) instead of soft merges."""
    dim: int | None = None
    """Width of the embedding; None: the head width, twice that from width 1024 on (64 and 128 for ViT-T/S/B and L)."""
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers; empty: the embedding is one affine layer."""
    seed: int = 0
    """Of the initialisation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature", "scale"):
            check_positive(name, getattr(self, name))
        for name in ("candidates", "dim"):
            check_count(name, getattr(self, name))
        check_flag("fisher", self.fisher)
        if not is_count(self.relaxed):
            raise DtemError(
                f"relaxed = {self.relaxed!r} must be a whole number, 1 or more: soft merges are what is trained"
            )
        if not isinstance(self.hidden, tuple) or not all(map(is_count, self.hidden)):
            raise DtemError(f"hidden = {self.hidden!r} must be a tuple of whole numbers, each 1 or more")


class DenseDtem(DenseMethod):
    """DTEM: tokens are compared by a decoupled embedding of the input of the component, two for each block.

    A one-layer embedding is initialised as a random projection with orthonormal rows, which approximately preserves the
    cosines of the input: untrained, this is close to ToMe. (An MLP has no keys to start from.)
    """

    name: ClassVar[str] = "dtem"
    needs: ClassVar[frozenset[str]] = frozenset({"input"})
    config_class: ClassVar[type[Config]] = DenseDtemConfig
    config: DenseDtemConfig

    def __init__(self, host: HostSpec, config: DenseDtemConfig) -> None:
        super().__init__(host, config)
        self.collecting_fisher = False
        """No component merges; each gives its input as candidates, from which `init_from_fisher` is computed."""
        self.dim = config.dim or host.head_dim * (1 if host.width < 1024 else 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embeddings = nn.ModuleList(
                DecoupledEmbedding(host.width, self.dim, config.hidden) for _ in range(2 * host.depth)
            )

    def init_from_keys(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.config.hidden:
            return
        generator = torch.Generator().manual_seed(self.config.seed)
        for embedding in self.embeddings:
            assert isinstance(embedding, DecoupledEmbedding)
            embedding.copy_keys(torch.eye(self.host.width), None, generator)

    @torch.no_grad()
    def init_from_fisher(self, moments: Sequence[ops.Moments]) -> None:
        """Initialise by the Fisher information of the input of each component (`ops.distance_embedding`)."""
        for embedding, each in zip(self.embeddings, moments, strict=True):
            assert isinstance(embedding, DecoupledEmbedding)
            weight, bias = ops.distance_embedding(each, self.dim)
            affine = embedding.affine
            if affine is None:
                raise DtemError(f"hidden = {self.config.hidden}: Fisher initialisation needs an embedding of one layer")
            affine.weight.copy_(weight)
            affine.bias.copy_(bias)

    def has_soft_mode(self) -> bool:
        return True

    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        embedded: Tensor = self.embeddings[component](h.detach() if self.soft else h)
        return embedded

    def group(self, component: int, h: Float[Tensor, "b n c"], r: int) -> Grouped:
        config, prefix = self.config, self.host.prefix
        if self.collecting_fisher:
            return self._collect_candidates(h, h.new_zeros(len(h), 0, 0))
        if r == 0 or not self.soft:
            return super().group(component, h, r)
        if config.fisher and torch.randint(2, ()).item():
            return super().group(component, h, r)
        metric = self.metric(component, h)
        if config.fisher:
            similarity = ops.cosine(metric, prefix)
            return self._collect_candidates(
                h, ops.soft_group(similarity, r, config.temperature, config.scale, config.candidates)
            )
        soft = min(r, config.relaxed)
        matching = ops.match(metric, r - soft, prefix)
        similarity = ops.kept_rows(ops.cosine(metric, prefix), matching, prefix)
        edges = ops.soft_group(similarity, soft, config.temperature, config.scale, config.candidates)
        merged = ops.merge_along(*ops.merge(h, None, matching), edges, prefix)
        return Grouped(*merged, matching, edges)

    def _collect_candidates(self, h: Float[Tensor, "b n c"], edges: Float[Tensor, "b i j"]) -> Grouped:
        """All tokens unmerged, with the candidates of the Fisher loss."""
        perturbation = torch.zeros_like(h, requires_grad=True)
        ones = torch.ones(h.shape[:2], device=h.device)
        return Grouped(
            h + perturbation, candidates=ops.MergeCandidates(edges, h.detach(), ones, perturbation, self.host.prefix)
        )
